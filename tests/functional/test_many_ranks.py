"""The main job over several processes of a local Ray cluster: policy ranks, engines, and the death of one."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.functional.cli import ROOT, command, environment, run_directory, run_grpo

pytestmark = pytest.mark.timeout(600)

TWO_RANKS = "policy.dtensor_cfg.data_parallel_size=2"
SMALL = ("grpo.num_prompts_per_step=4", "grpo.val_at_start=false", "logger.progress=false")
HF = ("policy.generation.backend=hf", "grpo.num_generations_per_prompt=4", "checkpointing.enabled=false")


def test_two_ranks_and_two_replicas_train_as_one_process_does(tmp_path: Path) -> None:
    run = run_grpo(
        tmp_path,
        *SMALL,
        TWO_RANKS,
        "policy.generation.num_replicas=2",
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=16",
        "weight_sync.verify=true",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    steps = {step: metrics for step, metrics in run.metrics().items() if "train/loss" in metrics}
    assert list(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["train/global_valid_seqs"] == 4 * 8  # each sample counted once, whatever rank has it
        # The engines hold the weights that the ranks share, and each rank has computed its own samples.
        assert metrics["train/max_logprob_error"] <= 1e-4
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/lr"] == pytest.approx(3e-4)
    assert 0 <= steps[2]["validation/accuracy"] <= 1
    assert run.directory is not None
    assert (run.directory / "checkpoints" / "step_2" / "policy" / "weights" / "config.json").exists()
    assert sorted(path.name for path in (run.directory / "logs").iterdir()) == ["policy_0.log", "policy_1.log"]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes], deadline_s: float = 400.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < end, "nothing happened before the deadline"
        time.sleep(0.05)


def has_trained(log_dir: Path) -> bool:
    directory = run_directory(log_dir)
    metrics = directory / "metrics.jsonl" if directory else None
    return metrics is not None and metrics.exists() and "train/loss" in metrics.read_text()


@pytest.mark.slow  # tests/contracts/test_policy_group.py kills ranks
def test_a_killed_rank_ends_the_run_with_its_cause_and_leaves_no_process(tmp_path: Path) -> None:
    output = tmp_path / "output"
    arguments = (*SMALL, *HF, TWO_RANKS, "grpo.max_num_steps=100000", "grpo.max_num_epochs=100000")
    with output.open("w") as file:
        process = subprocess.Popen(
            command(*arguments, f"logger.log_dir={tmp_path / 'logs'}"),
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(lambda: has_trained(tmp_path / "logs"), process)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        named = re.search(r"2 policy ranks are ready \(processes (\d+), (\d+)\)", output.read_text())
        assert named is not None
        os.kill(int(named[2]), signal.SIGKILL)
        process.wait(timeout=240)
    finally:
        process.kill()  # nothing where it has ended
    text = output.read_text()
    assert process.returncode == 1, text
    assert re.search(r"^WorkerDied: policy rank 1 has died: ", text, re.MULTILINE), text
    assert "Traceback" not in text
    _, alive = psutil.wait_procs(family, timeout=120)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow  # a process for one refusal
def test_a_model_that_ranks_cannot_share_ends_the_run_before_it_loads(tmp_path: Path) -> None:
    run = run_grpo(tmp_path, "policy.dtensor_cfg.tensor_parallel_size=5")
    assert run.returncode == 2, run.stderr
    assert "policy.dtensor_cfg.tensor_parallel_size = 5: must divide the model's" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.glob("exp_*/logs/*"))
