from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_rl.observability.logging_setup import make_run_directory


def test_runs_are_numbered_after_the_last(tmp_path: Path) -> None:
    log_dir = tmp_path / "runs"
    assert make_run_directory(log_dir) == log_dir / "exp_001"
    assert make_run_directory(str(log_dir)) == log_dir / "exp_002"
    (log_dir / "exp_041").mkdir()
    (log_dir / "exp_notes").mkdir()
    assert make_run_directory(log_dir).name == "exp_042"


def test_a_number_taken_by_a_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "exp_001").write_text("")
    assert make_run_directory(tmp_path).name == "exp_002"


def test_numbers_go_past_999(tmp_path: Path) -> None:
    (tmp_path / "exp_999").mkdir()
    assert make_run_directory(tmp_path).name == "exp_1000"
    assert make_run_directory(tmp_path).name == "exp_1001"


def test_runs_that_start_together_get_one_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_directory(tmp_path), range(32)))
    assert len(set(made)) == 32
