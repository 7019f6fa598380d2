"""The heartbeat file: what a supervisor reads of a live process, and of one that has failed."""

import json
import time
from pathlib import Path

import pytest

from nemo_rl.errors import RolloutError
from nemo_rl.observability import heartbeat


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "heartbeat.json"))
    return tmp_path / "heartbeat.json"


def test_nothing_is_written_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with heartbeat.beating():
        heartbeat.record(step=1)
    assert not heartbeat.is_supervised()
    assert not list(tmp_path.iterdir())


def test_beats_go_on_by_themselves_and_progress_is_counted(path: Path) -> None:
    with heartbeat.beating():
        first = heartbeat.read(path)
        heartbeat.record()
        heartbeat.record(step=3)
        deadline = time.monotonic() + 60
        while (state := heartbeat.read(path))["beats"] < first["beats"] + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (first["progress"], first["step"], first["phase"]) == (0, 0, "starting")
    assert (state["progress"], state["step"]) == (2, 3)
    assert "error" not in heartbeat.read(path)


def test_the_error_that_ends_the_process_is_its_cause(path: Path) -> None:
    with pytest.raises(RolloutError), heartbeat.beating():
        raise RolloutError("no rollout has progressed\nwith more lines")
    assert heartbeat.read(path)["error"] == "RolloutError: no rollout has progressed"


def test_the_modules_of_a_trained_process_end_before_the_engines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = dict.fromkeys(["nemo_rl.types", "json", "nemo_rl.errors", "vllm", "nemo_rl.batch"], json)
    monkeypatch.setattr(heartbeat.sys, "modules", modules)
    assert heartbeat.loaded_modules() == ["nemo_rl.types", "nemo_rl.errors"]
    monkeypatch.undo()
    assert heartbeat.read_modules(path) == []


def test_a_file_that_cannot_be_written_does_not_end_the_process(path: Path) -> None:
    path.with_suffix(".tmp").mkdir()
    with heartbeat.beating():
        heartbeat.record(step=1)
    assert heartbeat.read(path) == {}
