import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from nemo_rl.cli import run
from nemo_rl.command_line import ExitCode
from tests.unit.viewer.rundirs import failed, rollout, write_collection, write_run


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_run(directory: Path, *, num_failed: int = 0) -> Path:
    metrics = [{"step": step, "train/reward": step / 10} for step in range(1, 4)]
    train = [rollout(s, index=i) for s in (1, 2, 3) for i in range(4)] + [failed(3, index=9)] * num_failed
    return write_run(directory, metrics=metrics, train=train)


def test_check_passes_a_run_without_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(make_run(tmp_path / "run"))]) is ExitCode.DONE
    assert capsys.readouterr().out == "no findings\n"


def test_check_fails_with_evidence_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run", num_failed=8)
    assert run(["check", str(path)]) is ExitCode.FAILED
    out = capsys.readouterr().out
    assert "alarm    failures_environment: 8 of 20 rollouts failed; the first: ValueError: bad move" in out
    assert "rollout 0.12: /s/run/rollout/train/0.12" in out
    assert run(["check", str(path), "--json"]) is ExitCode.FAILED
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["failures_environment"]


def test_directory_that_is_no_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["check", str(tmp_path)], ["compare", str(tmp_path), str(tmp_path)], ["view", str(tmp_path)]):
        assert run(arguments) is ExitCode.BAD_INPUT
    assert "is no run (metrics.jsonl, rollouts/train.jsonl)" in capsys.readouterr().err


def test_compare_prints_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(make_run(tmp_path / name)) for name in "ab"]
    assert run(["compare", *paths, "--json", str(tmp_path / "c.json")]) is ExitCode.DONE
    assert "train/reward" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["differences"][0]["difference"] == 0


def test_compare_of_collections_prints_intervals_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    write_collection(tmp_path / "a", ((0, 0), (1, 1)))
    write_collection(tmp_path / "b", ((1, 1), (1, 1)))
    paths = [str(tmp_path / name) for name in "ab"]
    assert run(["compare", *paths, "--json", str(tmp_path / "c.json")]) is ExitCode.DONE
    printed = capsys.readouterr().out
    # differences 1 and 0: mean .5, standard error .5, t of 1 degree 12.706
    assert re.search(r"reward +│ +0\.5 +│ +1 +│ +0\.5 +│ +-5\.853 to 6\.853 +│ +2", printed), printed
    written = json.loads((tmp_path / "c.json").read_text())
    reward = next(each for each in written["differences"] if each["quantity"] == "reward")
    assert (written["names"], reward["num_pairs"], reward["is_significant"]) == (["a", "b"], 2, False)
    assert (reward["low"], reward["difference"], reward["high"]) == pytest.approx((-5.853, 0.5, 6.853), abs=1e-3)


def test_view_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "run")
    assert run(["view", str(path), "--export", str(tmp_path / "out")]) is ExitCode.DONE
    assert re.search(r"\d+ pages: .*index.html", capsys.readouterr().out)
    group = ["view", str(path), "--export", str(tmp_path / "one"), "--group", "2:g", "--step", "2"]
    assert run(group) is ExitCode.DONE
    assert (tmp_path / "one" / "group.html").exists()


def test_view_serves_until_it_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nemo_rl", "view", str(make_run(tmp_path / "run"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        killer = threading.Timer(120, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            match = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stdout.readline())
            assert match is not None
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(match[0], timeout=60) as page:
                assert "Runs and collections" in page.read().decode()
            process.send_signal(2)
            assert process.wait(60) == 0
        finally:
            killer.cancel()
            process.kill()


def test_pages_and_collections_are_read_without_torch() -> None:
    """Importing it takes seconds."""
    code = "import sys, nemo_rl.viewer.web_app, nemo_rl.collect.profile_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
