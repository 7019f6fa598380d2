"""The quickstart with two ranks that share each micro-batch: the steps of one process, and a kill between layouts."""

from pathlib import Path

import pytest

from tests.functional.cli import Run, run_directory, run_grpo
from tests.functional.test_interrupt_and_resume import HF, compared, kill_at

pytestmark = pytest.mark.timeout(1200)  # three runs one after the other, perhaps beside other work

SLICES = (*HF, "policy.dtensor_cfg.context_parallel_size=2")


@pytest.mark.slow  # three runs; tests/contracts/test_context_parallel.py has the numbers
def test_slices_train_as_one_process_does_and_resume_on_another_layout(tmp_path: Path) -> None:
    whole = run_grpo(tmp_path / "whole", *HF, "checkpointing.enabled=false")
    assert whole.returncode == 0, whole.stderr
    expected = compared(whole)
    checkpoints = tmp_path / "checkpoints"
    kept, log_dir = f"checkpointing.checkpoint_dir={checkpoints}", f"logger.log_dir={tmp_path / 'killed'}"
    kill_at(checkpoints / "step_4", *SLICES, kept, log_dir)
    ranks = ("policy.dtensor_cfg.data_parallel_size=2", kept)
    resumed = run_grpo(tmp_path / "resumed", *HF, *ranks)
    assert resumed.returncode == 0, resumed.stderr
    sliced = Run(0, "", "", run_directory(tmp_path / "killed"))
    steps = {**compared(sliced), **compared(resumed)}
    assert set(steps) == set(expected) == {1, 2, 3, 4, 5, 6}
    for step, values in steps.items():
        assert values == pytest.approx(expected[step], rel=1e-5, abs=1e-5), step
