"""Log records of a process, and run directories."""

import io
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from nemo_rl.config.run import LoggerConfig
from nemo_rl.observability.console import HANDLER_NAME, NOISY_LIBRARIES, configure_logging, make_run_directory


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in ("nemo_rl", *NOISY_LIBRARIES)}
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, library_level in levels.items():
        logging.getLogger(name).setLevel(library_level)


def test_records_outside_a_terminal_are_plain_lines() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out))
    logging.getLogger("nemo_rl.test").info("step %d [bold]x[/bold] %s", 1, "long " * 60)
    logging.getLogger("nemo_rl.test").debug("hidden")
    [line] = out.getvalue().splitlines()
    assert "INFO nemo_rl.test: step 1 [bold]x[/bold] long long" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_text_of_a_model_or_a_client_moves_no_cursor(is_terminal: bool) -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out, force_terminal=is_terminal, color_system=None, width=200))
    logging.getLogger("nemo_rl.test").warning("it says %s", "\x1b[2J\x1b]0;owned\x07\r\x9b31m")
    assert "it says \\x1b[2J\\x1b]0;owned\\x07\\x0d\\x9b31m" in out.getvalue()
    assert not set("\x1b\x07\r\x9b") & set(out.getvalue())


def test_records_on_a_terminal_go_through_its_console() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out, force_terminal=True, color_system=None, width=80))
    logging.getLogger("nemo_rl.test").warning("careful [red]x[/red]")
    assert "WARNING  careful [red]x[/red]" in out.getvalue()


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("INFO", Console(file=first))
    configure_logging("INFO", Console(file=second))
    logging.getLogger("nemo_rl.test").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert [h.name for h in logging.getLogger().handlers].count(HANDLER_NAME) == 1


def test_libraries_are_quiet_below_warnings() -> None:
    out = io.StringIO()
    configure_logging("DEBUG", Console(file=out))
    logging.getLogger("httpx._client").info("request")
    logging.getLogger("httpx._client").warning("trouble")
    assert "request" not in out.getvalue()
    assert "trouble" in out.getvalue()


def test_python_warnings_are_log_records() -> None:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("INFO", Console(file=out))
        warnings.warn("an old name", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "an old name" in out.getvalue()


@pytest.mark.parametrize(("level", "shown"), [("DEBUG", True), ("INFO", True), ("WARNING", False)])
def test_logger_level_of_the_configuration_is_that_of_nemo_rls_records(level: str, shown: bool) -> None:
    out = io.StringIO()
    configure_logging(LoggerConfig.model_validate({"level": level}).level, Console(file=out))
    logging.getLogger("nemo_rl.test").info("a step")
    assert ("a step" in out.getvalue()) is shown


def test_unknown_logger_level_is_refused() -> None:
    with pytest.raises(ValidationError, match="level"):
        LoggerConfig.model_validate({"level": "LOUD"})


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
