import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from nemo_rl.config.run import LoggerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.observability import loggers
from nemo_rl.observability.loggers import CompositeLogger, make_logger


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
