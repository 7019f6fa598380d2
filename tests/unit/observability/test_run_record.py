"""`run.json` says who a run is, and how each of its starts ended."""

import asyncio
import errno
import json
import socket
from pathlib import Path

import pytest

from nemo_rl import durable_files
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


def write_start(run_dir: Path, **values: object) -> None:
    start = {"started_at": 1.0, "host": socket.gethostname(), "pid": 7, "state": "running", "cause": ""} | values
    (run_dir / "run.json").write_text(json.dumps({"name": "a", "tags": [], "notes": "", "starts": [start]}))


def states(run_dir: Path) -> list[str]:
    record = read_run_record(run_dir)
    assert record is not None
    return [start.state for start in record.starts]


def test_start_that_nobody_ended_is_running_while_its_directory_is_held_and_died_after(tmp_path: Path) -> None:
    write_start(tmp_path)
    with hold_directory(tmp_path, key="logger.log_dir"):
        assert is_held(tmp_path)
        assert states(tmp_path) == ["running"]
    assert states(tmp_path) == ["died"]


def test_start_that_was_killed_has_died_once_the_run_resumes(tmp_path: Path) -> None:
    write_start(tmp_path)
    with hold_directory(tmp_path, key="logger.log_dir"), recorded_run(tmp_path, SECTION):
        assert states(tmp_path) == ["died", "running"]
    assert states(tmp_path) == ["died", "ended"]


def test_start_is_running_where_nobody_can_tell_whether_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_start(tmp_path, host="elsewhere")
    assert states(tmp_path) == ["running"]
    write_start(tmp_path)
    (tmp_path / ".lock").touch()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(durable_files.fcntl, "flock", refuse)
    assert is_held(tmp_path) is None
    assert states(tmp_path) == ["running"]
    monkeypatch.undo()
    assert states(tmp_path) == ["died"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a", "tags": [], "notes": "", "starts": [{"x": 1}]}'])
def test_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    assert read_run_record(tmp_path) is None
    (tmp_path / "run.json").write_text(text)
    assert read_run_record(tmp_path) is None


@pytest.mark.parametrize(
    "values",
    [
        {"started_at": "1"},
        {"started_at": float("nan")},
        {"started_at": -1},
        {"ended_at": 1e300},
        {"ended_at": float("inf")},
        {"state": "asleep"},
        {"state": []},
        {"cause": {"a": 1}},
        {"pid": True},
        {"host": None},
    ],
)
def test_start_with_a_value_of_another_kind_is_no_record(values: dict[str, object], tmp_path: Path) -> None:
    write_start(tmp_path, **values)
    assert read_run_record(tmp_path) is None


@pytest.mark.parametrize("values", [{"name": 1}, {"tags": "ab"}, {"tags": [1]}, {"notes": None}])
def test_record_whose_texts_are_none_is_no_record(values: dict[str, object], tmp_path: Path) -> None:
    record = {"name": "a", "tags": [], "notes": "", "starts": []} | values
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_run_record(tmp_path) is None
