"""The quickstart on Megatron-core: two stages of the model train as FSDP2 does."""

from pathlib import Path

import pytest

from tests.functional.cli import run_grpo

pytestmark = pytest.mark.timeout(900)

# Rollouts are the same as long as the weights are. Two optimizer steps each, so that ratios and losses are not trivial.
FIVE_STEPS = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "grpo.max_num_steps=5",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "logger.progress=false",
)
MEGATRON = ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.pipeline_model_parallel_size=2")
COMPARED = ("loss", "grad_norm", "reward", "kl_penalty", "lr", "global_valid_toks")


@pytest.mark.slow  # two runs; test_gpu_scripts.py starts one on Megatron
def test_two_stages_train_with_the_losses_of_fsdp2(tmp_path: Path) -> None:
    runs = [run_grpo(tmp_path / "fsdp2", *FIVE_STEPS), run_grpo(tmp_path / "megatron", *FIVE_STEPS, *MEGATRON)]
    for run in runs:
        assert run.returncode == 0, run.stdout + run.stderr
    expected, found = (run.metrics() for run in runs)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5]
    for step, metrics in found.items():
        for name in COMPARED:
            want = expected[step][f"train/{name}"]
            assert metrics[f"train/{name}"] == pytest.approx(want, rel=1e-4, abs=1e-4), (step, name)
        assert metrics["train/max_logprob_error"] <= 1e-4  # the engine has the weights of all stages
    assert any(abs(metrics["train/loss"]) > 1e-3 for metrics in found.values())
