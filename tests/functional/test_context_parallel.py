"""The quickstart with two ranks that share each micro-batch: the steps of one process, and a kill between layouts."""

import subprocess
from pathlib import Path

import pytest

from tests.functional.cli import ROOT, Run, command, environment, run_directory, run_grpo
from tests.functional.test_interrupt_and_resume import HF, compared, wait_for

pytestmark = pytest.mark.timeout(1200)  # three runs one after the other, perhaps beside other work

SLICES = (*HF, "policy.dtensor_cfg.context_parallel_size=2")


def test_slices_train_as_one_process_does_and_resume_on_another_layout(tmp_path: Path) -> None:
    whole = run_grpo(tmp_path / "whole", *HF, "checkpointing.enabled=false")
    assert whole.returncode == 0, whole.stderr
    expected = compared(whole)
    checkpoints = tmp_path / "checkpoints"
    killed = subprocess.Popen(
        command(*SLICES, f"checkpointing.checkpoint_dir={checkpoints}", f"logger.log_dir={tmp_path / 'killed'}"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for((checkpoints / "step_4").exists)
    killed.kill()
    killed.wait(timeout=60)
    ranks = ("policy.dtensor_cfg.data_parallel_size=2", f"checkpointing.checkpoint_dir={checkpoints}")
    resumed = run_grpo(tmp_path / "resumed", *HF, *ranks)
    assert resumed.returncode == 0, resumed.stderr
    sliced = Run(0, "", "", run_directory(tmp_path / "killed"))
    steps = {**compared(sliced), **compared(resumed)}
    assert set(steps) == set(expected) == {1, 2, 3, 4, 5, 6}
    for step, values in steps.items():
        assert values == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step
