"""The main job on a CUDA device; skipped, and reported as skipped, without one."""

from pathlib import Path

import pytest
import torch

from tests.functional.cli import run_grpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = (
    "policy.device=cuda",
    "policy.precision=bfloat16",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.max_val_samples=16",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
)


@pytest.mark.parametrize("sleeps", ["true", "false"])
def test_two_steps_with_a_colocated_engine(tmp_path: Path, sleeps: str) -> None:
    run = run_grpo(tmp_path, *SMALL, f"policy.generation.vllm_cfg.enable_sleep_mode={sleeps}")
    assert run.returncode == 0, run.stderr
    steps = {step: m for step, m in run.metrics().items() if "train/loss" in m}
    assert list(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["train/token_mult_prob_error"] < 1.1
