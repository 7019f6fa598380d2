"""The monitor of GPUs, with a stand-in for nvidia-smi."""

import json
from pathlib import Path

import pytest

from nemo_rl.config.shared_sections import LoggerConfig
from nemo_rl.observability.gpu_monitor import GpuMonitor, query_gpus, start_gpu_monitor
from nemo_rl.observability.loggers import make_logger
from tests.support.kept_spans import kept_spans
from tests.support.metric_names import find_undocumented

ROWS = "0, 50, 2048, 300.5, 61\\n1, [N/A], [N/A], 90.25, 40\\n"
QUERY = "index,utilization.gpu,memory.used,power.draw,temperature.gpu"
EXPECTED = {
    "gpu/0/util": 50,
    "gpu/0/mem_gb": 2,
    "gpu/0/power_w": 300.5,
    "gpu/0/temperature_c": 61,
    "gpu/1/power_w": 90.25,
    "gpu/1/temperature_c": 40,
}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers the one query with two GPUs, one of them partitioned."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = '--query-gpu={QUERY}' ] && printf '{ROWS}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def wait_for_sample(monitor: GpuMonitor) -> dict[str, float]:
    while not (taken := monitor.take()):
        assert monitor._thread.is_alive()
    return taken


def test_values_are_read_and_unknown_ones_left_out(nvidia_smi: Path) -> None:
    assert query_gpus() == EXPECTED
    assert find_undocumented(EXPECTED) == []


def test_samples_are_counters_of_a_trace(nvidia_smi: Path) -> None:
    with kept_spans() as kept:
        monitor = GpuMonitor()
        wait_for_sample(monitor)
        monitor.close()
    assert {counter.name: counter.value for counter in kept.counters} == EXPECTED


def test_training_steps_have_what_was_measured_since_the_last(nvidia_smi: Path, tmp_path: Path) -> None:
    logger = make_logger(LoggerConfig(), tmp_path, {})
    assert logger._monitor is not None
    measured = wait_for_sample(logger._monitor)
    logger._monitor._samples.update({name: [value, value + 2] for name, value in measured.items()})
    logger.log_metrics({"validation/reward": 1.0}, 1)
    logger.log_metrics({"train/loss": 0.5}, 1)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    means = {name: value + 1 for name, value in EXPECTED.items()}
    assert lines == [{"step": 1, "validation/reward": 1.0}, {"step": 1, "train/loss": 0.5, **means}]


def test_a_driver_that_fails_is_told_once(nvidia_smi: Path, caplog: pytest.LogCaptureFixture) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    monitor = GpuMonitor(period_s=0)
    monitor._thread.join(30)
    assert not monitor._thread.is_alive()
    assert (monitor.take(), len(caplog.messages)) == ({}, 1)
    assert "nvidia-smi failed" in caplog.messages[0]


def test_without_nvidia_smi_or_switched_off_nothing_is_sampled(
    nvidia_smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_logger(LoggerConfig(monitor_gpus=False), tmp_path, {})._monitor is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert start_gpu_monitor() is None
