"""`run.json` says who a run is, and how each of its starts ended."""

import asyncio
import json
from pathlib import Path

import pytest

from nemo_rl.config.shared_sections import LoggerConfig
from nemo_rl.durable_files import hold_directory, is_held
from nemo_rl.errors import RolloutError
from nemo_rl.observability.run_record import read_run_record, recorded_run

SECTION = LoggerConfig(run_name="words", tags=["first"], notes="What a reward of 2 does.")


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (None, "ended", ""),
        (RolloutError("3 of 4 failed\nand more"), "failed", "RolloutError: 3 of 4 failed"),
        (
            ExceptionGroup("two tasks", [ExceptionGroup("one", [ValueError("no reward")])]),
            "failed",
            "ValueError: no rew",
        ),
        (KeyboardInterrupt(), "interrupted", ""),
        (asyncio.CancelledError(), "interrupted", ""),
        (SystemExit(3), "failed", "SystemExit: 3"),
    ],
)
def test_how_a_run_ended_is_recorded_with_its_cause(
    error: BaseException | None, state: str, cause: str, tmp_path: Path
) -> None:
    def run() -> None:
        with recorded_run(tmp_path, SECTION):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    record = read_run_record(tmp_path)
    assert record is not None
    assert record.last is not None
    assert (record.name, record.tags, record.notes) == ("words", ("first",), "What a reward of 2 does.")
    assert record.last.state == state
    assert record.last.cause.startswith(cause)
    assert bool(record.last.cause) == bool(cause)
    assert record.last.ended_at is not None
    assert record.last.ended_at >= record.last.started_at


def test_run_that_was_asked_to_stop_is_interrupted_and_each_start_is_kept(tmp_path: Path) -> None:
    with recorded_run(tmp_path, SECTION, is_interrupted=lambda: True):
        pass
    with recorded_run(tmp_path, LoggerConfig()):
        pass
    record = read_run_record(tmp_path)
    assert record is not None
    assert (record.name, record.tags) == ("words", ("first",))  # of the start that gave them
    assert [start.state for start in record.starts] == ["interrupted", "ended"]


def test_start_that_nobody_ended_is_running_while_its_directory_is_held_and_died_after(tmp_path: Path) -> None:
    start = {"started_at": 1.0, "host": "here", "pid": 7, "state": "running", "cause": "", "ended_at": None}
    (tmp_path / "run.json").write_text(json.dumps({"name": "a", "tags": [], "notes": "", "starts": [start]}))

    def state() -> str:
        record = read_run_record(tmp_path)
        assert record is not None
        assert record.last is not None
        return record.last.state

    with hold_directory(tmp_path, key="logger.log_dir"):
        assert is_held(tmp_path)
        assert state() == "running"
    assert state() == "died"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a", "tags": [], "notes": "", "starts": [{"x": 1}]}'])
def test_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    (tmp_path / "run.json").write_text(text)
    assert read_run_record(tmp_path) is None
