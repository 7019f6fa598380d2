import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nemo_rl.config.run import LoggerConfig
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
