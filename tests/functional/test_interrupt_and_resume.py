"""A run that is stopped or killed goes on as if it had not been."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.cli import ROOT, Run, command, environment, run_directory, run_grpo

pytestmark = pytest.mark.timeout(1200)  # three runs one after the other, perhaps beside other work

# The hf engine in float32 on the CPU: the same batches give the same losses.
HF = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=6",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "logger.progress=false",
)
COMPARED = ("train/loss", "train/reward", "train/grad_norm", "train/total_num_tokens")


def compared(run: Run) -> dict[int, tuple[float, ...]]:
    return {s: tuple(m[name] for name in COMPARED) for s, m in run.metrics().items() if "train/loss" in m}


def assert_same_steps(resumed: dict[int, tuple[float, ...]], whole: dict[int, tuple[float, ...]]) -> None:
    for step, values in resumed.items():
        for value, expected in zip(values, whole[step], strict=True):
            assert abs(value - expected) <= 1e-6 * max(1.0, abs(expected)), (step, values, whole[step])


def kill_at(file: Path, *arguments: str) -> None:
    """Start a run, and kill it once the file exists."""
    running = subprocess.Popen(
        command(*arguments), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(file.exists)
    running.kill()
    running.wait(timeout=60)


def wait_for(condition, deadline_s: float = 240.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "nothing happened before the deadline"
        time.sleep(0.02)


def test_a_killed_run_resumes_to_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_grpo(tmp_path / "whole", *HF)
    assert whole.returncode == 0, whole.stderr
    expected = compared(whole)
    assert list(expected) == [1, 2, 3, 4, 5, 6]

    checkpoints = tmp_path / "checkpoints"
    arguments = (*HF, f"checkpointing.checkpoint_dir={checkpoints}")
    kill_at(checkpoints / "step_2", *arguments, f"logger.log_dir={tmp_path / 'killed'}")

    resumed = run_grpo(tmp_path / "resumed", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    steps = compared(resumed)
    assert min(steps, default=7) > 2 or (checkpoints / "step_6").exists()
    assert_same_steps(steps, expected)


@pytest.mark.slow  # tests/unit/algorithms/test_interrupt.py has the signals
def test_ctrl_c_leaves_no_process_and_a_state_to_go_on_from(tmp_path: Path) -> None:
    arguments = (
        "grpo.max_num_steps=1000",
        "grpo.max_num_epochs=100",
        "grpo.num_prompts_per_step=4",
        "grpo.val_at_start=false",
        "logger.progress=false",
        "checkpointing.save_period=1000",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
    )
    log_dir = tmp_path / "logs"
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            command(*arguments, f"logger.log_dir={log_dir}"), cwd=ROOT, env=environment(), stdout=output, stderr=output
        )

    def has_trained() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()
        directory = run_directory(log_dir)
        metrics = directory / "metrics.jsonl" if directory else None
        return metrics is not None and metrics.exists() and "train/loss" in metrics.read_text()

    wait_for(has_trained)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=120)
    assert process.returncode == 130, (tmp_path / "output").read_text()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    saved = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(saved) == 1
    step = int(saved[0].name.removeprefix("step_"))
    resumed = run_grpo(tmp_path / "resumed", *arguments, f"grpo.max_num_steps={step + 1}", "grpo.val_at_end=false")
    assert resumed.returncode == 0, resumed.stderr
    assert [s for s, m in resumed.metrics().items() if "train/loss" in m] == [step + 1]
