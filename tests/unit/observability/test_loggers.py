"""Loggers (JSON Lines, TensorBoard, W&B, a user's own) and the timer of phases."""

import asyncio
import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.config.shared_sections import LoggerConfig, WandbLoggerConfig
from nemo_rl.errors import ConfigError, RecordError
from nemo_rl.interfaces import HistogramLogger
from nemo_rl.observability import loggers
from nemo_rl.observability.loggers import (
    CompositeLogger,
    DrawingLogger,
    JsonlLogger,
    StepTimer,
    TensorboardLogger,
    WandbLogger,
    has_api_key,
    make_logger,
)
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.tracing import Tracer
from tests.support.kept_spans import KeptSpans


class Recorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.fails = fails

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if self.fails:
            raise OSError("disk full")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._record(f"metrics {step} {dict(metrics)}")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._record(f"table {name} {step}")

    def close(self) -> None:
        self._record("close")


def test_a_failing_logger_is_named_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder(fails=True), Recorder()
    composite = CompositeLogger({"wandb": broken, "jsonl": sound})
    composite.log_metrics({"train/loss": 0.5}, 1)
    composite.log_table("samples", ("a",), [("b",)], 1)
    composite.close()
    assert sound.calls == ["metrics 1 {'train/loss': 0.5}", "table samples 1", "close"]
    assert broken.calls == sound.calls
    [record] = caplog.records
    assert "the wandb logger failed" in record.getMessage()
    assert "disk full" in record.getMessage()


def test_distributions_go_to_the_loggers_that_draw_them_without_what_is_not_finite() -> None:
    class Drawing(Recorder):
        def log_histogram(self, name: str, values: Sequence[float], step: int) -> None:
            self._record(f"histogram {name} {list(values)} {step}")

    plain, drawing = Recorder(), Drawing()
    composite = DrawingLogger({"jsonl": plain, "wandb": drawing})
    composite.log_histogram("train/reward/histogram", [0.5, math.nan, 1.0, math.inf], 3)
    composite.log_histogram("train/reward/histogram", [math.nan], 4)
    assert drawing.calls == ["histogram train/reward/histogram [0.5, 1.0] 3"]
    assert plain.calls == []


@pytest.mark.parametrize("draws", [False, True])
def test_distributions_are_computed_for_loggers_that_draw_them_alone(draws: bool, tmp_path: Path) -> None:
    logger = make_logger(LoggerConfig(tensorboard_enabled=draws), tmp_path, {})
    logger.close()
    assert isinstance(logger, HistogramLogger) is draws


def test_tensorboard_forgets_the_steps_that_a_resumed_run_trains_again(tmp_path: Path) -> None:
    for losses, resumed_from in (({1: 0.5, 2: 0.25, 3: 9.0}, None), ({3: 0.125}, 2)):
        logger = make_logger(LoggerConfig(tensorboard_enabled=True), tmp_path, {})
        if resumed_from is not None:
            logger.resume_after(resumed_from)
        for step, loss in losses.items():
            logger.log_metrics({"train/loss": loss}, step)
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_tensorboard_has_the_distribution(tmp_path: Path) -> None:
    written = TensorboardLogger(tmp_path, {})
    written.log_histogram("train/reward/histogram", [0.0, 0.0, 1.0], 2)
    written.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (found,) = events.Histograms("train/reward/histogram")
    assert (found.step, found.histogram_value.num, found.histogram_value.sum) == (2, 3, 1.0)


def test_metrics_that_a_full_disk_does_not_take_are_counted_and_leave_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = LostRecords()
    composite = make_logger(LoggerConfig(), tmp_path, {}, lost=lost)
    composite.log_metrics({"train/loss": 0.5}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_part_once(os.write))
        composite.log_metrics({"train/loss": 0.25}, 2)
    composite.log_metrics({"train/loss": 0.125}, 3)
    composite.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    assert str(lost) == "metrics.jsonl lacks 1"
    with pytest.raises(RecordError, match=r"metrics\.jsonl lacks 1"):
        lost.check()


def write_a_part_once(write: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    """Return a `write` to a disk that takes five bytes and is full then."""
    calls = iter((5,))

    def limited(descriptor: int, data: bytes) -> int:
        for room in calls:
            return write(descriptor, data[:room])
        raise OSError(errno.ENOSPC, "No space left on device")

    return limited


def test_only_failures_of_a_disk_count_as_lost_records() -> None:
    for error, expected in ((OSError(errno.ENOSPC, "full"), "the remote logger lacks 1"), (OSError("no network"), "")):
        lost = LostRecords()
        composite = CompositeLogger({"remote": Raising(error)}, lost)
        composite.log_metrics({}, 1)
        assert str(lost) == expected


class Raising(Recorder):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        raise self.error


def test_json_lines_are_always_written(tmp_path: Path) -> None:
    logger = make_logger(LoggerConfig(), tmp_path, {})
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


class CountingLogger(Recorder):
    """A user's own, found by its dotted path."""

    made: ClassVar[list["CountingLogger"]] = []

    def __init__(self, run_dir: Path, config: Mapping[str, object], *, label: str) -> None:
        super().__init__()
        self.arguments = (run_dir, dict(config), label)
        self.made.append(self)


def test_a_logger_of_ones_own_is_named_by_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingLogger, "made", [])
    section = LoggerConfig.model_validate(
        {"loggers": {"counts": {"type": f"{__name__}:CountingLogger", "kwargs": {"label": "x"}}}}
    )
    logger = make_logger(section, tmp_path, {"grpo": {}})
    logger.log_metrics({"train/loss": 0.5}, 1)
    (own,) = CountingLogger.made
    assert own.arguments == (tmp_path, {"grpo": {}}, "x")
    assert own.calls == ["metrics 1 {'train/loss': 0.5}"]
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("logger_type", "problem"),
    [("tensorbord", r"unknown logger, .*did you mean tensorboard\?"), ("string.digits", "must be a class or function")],
)
def test_an_unknown_logger_is_refused_with_the_configuration(logger_type: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LoggerConfig.model_validate({"loggers": {"own": {"type": logger_type}}})


def test_a_logger_that_cannot_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*arguments: object) -> Recorder:
        raise OSError("no route to host")

    monkeypatch.setattr(loggers, "WandbLogger", unreachable)
    logger = make_logger(LoggerConfig(wandb_enabled=True), tmp_path, {})
    logger.log_metrics({}, 1)
    logger.close()
    assert "the wandb logger cannot start" in caplog.text
    assert (tmp_path / "metrics.jsonl").exists()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalar(value: float) -> Any:
    """A number as numpy's reductions give it."""
    return np.float32(value)


def test_each_call_is_a_line_that_is_readable_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"train/loss": 0.5, "train/total_num_tokens": 3}, 1)
    logger.log_metrics({"validation/accuracy": scalar(0.25)}, 1)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.5, "train/total_num_tokens": 3},
        {"step": 1, "validation/accuracy": 0.25},
    ]
    logger.close()


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = JsonlLogger(tmp_path)
        logger.log_metrics({}, step)
        logger.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_numbers_that_json_lacks_are_strings_that_float_reads(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"nan": math.nan, "up": math.inf, "down": scalar(-math.inf)}, 1)
    logger.close()
    [line] = lines(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    assert [float(str(line[name])) for name in ("up", "down")] == [math.inf, -math.inf]
    assert math.isnan(float(str(line["nan"])))


def test_tables_are_files_with_one_object_a_row(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_table(
        "validation/samples", ("prompt", "reward", "note"), [("Grüße\n", 1.0, None), ("\ud800", 0, Path("x"))], 7
    )
    logger.close()
    [first, second] = lines(tmp_path / "tables" / "validation_samples_step7.jsonl")
    assert first == {"prompt": "Grüße\n", "reward": 1.0, "note": None}
    assert (second["reward"], second["note"]) == (0, "x")


def test_a_row_of_another_length_is_refused(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        logger.log_table("samples", ("prompt", "reward"), [("x",)], 1)
    logger.close()


def test_scalars_tables_and_configuration_are_read_back(tmp_path: Path) -> None:
    logger = TensorboardLogger(tmp_path, {"grpo": {"seed": 42}})
    logger.log_metrics({"train/loss": 0.5, "train/reward": 0.25}, 1)
    logger.log_metrics({"train/loss": 0.125}, 2)
    logger.log_table("validation/samples", ("prompt", "reward"), [("a|b\n<c>", 1.0)], 2)
    logger.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25)]
    [table] = events.Tensors("validation/samples/text_summary")
    assert table.step == 2
    assert table.tensor_proto.string_val[0].decode() == "| prompt | reward |\n| --- | --- |\n| a\\|b<br>&lt;c> | 1.0 |"
    [config] = events.Tensors("config/text_summary")
    assert '"seed": 42' in config.tensor_proto.string_val[0].decode()


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_without_a_key_the_run_is_written_offline(
    no_key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "250")  # a busy machine starts W&B's process slowly
    logger = WandbLogger(
        WandbLoggerConfig(project="words", tags=["test"], group="pairs"), tmp_path, {"grpo": {"seed": 42}}
    )
    logger.log_metrics({"train/loss": 0.5, "timing/train/generation": 0.1}, 3)
    logger.log_metrics({"validation/accuracy": 0.25, "timing/validation/total_validation_time": 2.0}, 3)
    logger.log_table("validation/samples", ("prompt", "reward"), [("a", 1.0), ("b", "failed: x")], 3)
    logger.log_histogram("train/reward/histogram", [0.0, 0.0, 1.0], 3)
    logger.close()

    records = inspect(tmp_path / "wandb")
    [run] = [r["run"] for r in records if r["type"] == "run"]
    assert (run["project"], run["display_name"], run["run_group"]) == ("words", tmp_path.name, "pairs")
    assert run["run_id"] == (tmp_path / "wandb_run_id").read_text()
    assert run["config"]["update"]["grpo"] == {"seed": 42}
    steps = {r["metric"]["glob_name"]: r["metric"]["step_metric"] for r in records if r["type"] == "metric"}
    assert steps["train/*"] == steps["timing/train/*"] == steps["performance/*"] == "train/step"
    assert steps["validation/*"] == steps["timing/validation/*"] == "validation/step"
    history = [without_own(r["history"]["item"]) for r in records if r["type"] == "history"]
    assert history[:2] == [
        {"train/step": 3, "train/loss": 0.5, "timing/train/generation": 0.1},
        {"validation/step": 3, "validation/accuracy": 0.25, "timing/validation/total_validation_time": 2.0},
    ]
    assert history[2]["validation/step"] == 3
    name = "train/reward/histogram"
    assert (history[3]["train/step"], history[3][f"{name}._type"]) == (3, "histogram")
    assert sum(history[3][f"{name}.values"]) == 3
    [table] = tmp_path.rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["a", 1.0], ["b", "failed: x"]]


def inspect(directory: Path) -> list[dict]:
    """The records of the run under `directory`, by W&B's own reader."""
    [path] = directory.rglob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def without_own(item: dict) -> dict:
    """A history item without the keys that W&B adds."""
    return {name: value for name, value in item.items() if not name.startswith("_")}


def test_a_key_is_found_in_the_environment_or_in_netrc(no_key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_api_key()
    no_key.write_text("machine example.org login user password x\n")
    no_key.chmod(0o600)
    assert not has_api_key()
    no_key.write_text("machine api.wandb.ai login user password x\n")
    assert has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443")
    assert not has_api_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_api_key()


def test_a_broken_netrc_is_no_key(no_key: Path) -> None:
    no_key.write_text("machine\n")
    assert not has_api_key()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_blocks_of_a_name_add_up() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    for seconds in (2.0, 3.0):
        with timer("policy_training"):
            clock.now += seconds
        clock.now += 10.0
    assert timer.seconds() == {"policy_training": 5.0}


def test_spans_of_a_steps_phases_tell_the_threads_cpu_time() -> None:
    used_ns = iter([1_000, 4_000])
    kept = KeptSpans()
    with Tracer([kept], thread_cpu_ns=lambda: next(used_ns)), StepTimer(step=1)("generation"):
        pass
    (phase,) = kept.spans
    assert phase.attributes == {"step": 1, "driver_cpu_ns": 3_000}


def test_nested_blocks_are_measured_apart() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer("total_step_time"):
        clock.now += 1.0
        with timer("generation"):
            clock.now += 2.0
        assert timer.seconds() == {"total_step_time": 3.0, "generation": 2.0}
        clock.now += 4.0
    assert timer.seconds() == {"total_step_time": 7.0, "generation": 2.0}


def test_blocks_that_overlap_in_tasks_count_once() -> None:
    clock = Clock()
    timer = StepTimer(clock)

    async def block(opened: asyncio.Event, close: asyncio.Event) -> None:
        with timer("generation"):
            opened.set()
            await close.wait()

    async def main() -> None:
        opened, closed = [asyncio.Event() for _ in range(2)], [asyncio.Event() for _ in range(2)]
        tasks = [asyncio.create_task(block(o, c)) for o, c in zip(opened, closed, strict=True)]
        for event in opened:
            await event.wait()
        for task, event in zip(tasks, closed, strict=True):
            clock.now += 5.0
            event.set()
            await task

    asyncio.run(main())
    assert timer.seconds() == {"generation": 10.0}


def test_a_block_that_raises_is_measured() -> None:
    clock = Clock()
    timer = StepTimer(clock)

    def failing() -> None:
        with timer("generation"):
            clock.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    clock.now += 1.0
    assert timer.seconds() == {"generation": 1.0}


def test_names_are_told_as_their_blocks_begin() -> None:
    entered: list[str] = []
    timer = StepTimer(on_enter=entered.append)
    with timer("generation"), timer("weight_sync"):
        assert entered == ["generation", "weight_sync"]
