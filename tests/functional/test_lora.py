"""LoRA through the command line: real vLLM, the quickstart's model, a few steps, packed, and on from a checkpoint."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl.launch.models import resolve_model
from tests.functional.cli import ROOT, Run, run_grpo

pytestmark = pytest.mark.timeout(600)  # the first one also makes the quickstart's model

SMALL = (
    "--config",
    str(ROOT / "examples/configs/lora.yaml"),
    "grpo.num_prompts_per_step=4",
    "policy.sequence_packing.enabled=true",
    "policy.train_micro_batch_size=8",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "grpo.max_val_samples=16",
    "grpo.val_at_start=false",
    "weight_sync.verify=true",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_grpo(tmp_path_factory.mktemp("logs"), *SMALL, "grpo.max_num_steps=2")
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def checkpoint(run: Run, step: int) -> Path:
    assert run.directory is not None
    return run.directory / "checkpoints" / f"step_{step}" / "policy"


def test_the_engine_holds_the_merged_weights_at_every_step(run: Run) -> None:
    metrics = run.metrics()
    for step in (1, 2):
        assert metrics[step]["train/max_logprob_error"] <= 1e-4
        assert metrics[step]["train/grad_norm"] > 0
    assert metrics[1]["train/kl_penalty"] == pytest.approx(0, abs=1e-6)  # the reference is the base
    assert metrics[2]["train/kl_penalty"] > 0


def test_the_checkpoint_is_a_merged_model_and_an_adapter_of_the_base(run: Run) -> None:
    base = AutoModelForCausalLM.from_pretrained(asyncio.run(resolve_model("nemo_rl/quickstart")), dtype=torch.float32)
    adapter = checkpoint(run, 2) / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 16
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    saved = AutoModelForCausalLM.from_pretrained(checkpoint(run, 2) / "weights", dtype=torch.float32)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), parameter, rtol=0, atol=1e-6)


@pytest.mark.slow  # exact resuming is the contract's: tests/contracts/test_policy_lora.py
def test_a_run_goes_on_from_its_adapter(run: Run, tmp_path: Path) -> None:
    assert run.directory is not None
    again = run_grpo(
        tmp_path, *SMALL, "grpo.max_num_steps=3", f"checkpointing.checkpoint_dir={run.directory / 'checkpoints'}"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert [step for step, metrics in again.metrics().items() if "train/loss" in metrics] == [3]
    assert again.metrics()[3]["train/max_logprob_error"] <= 1e-4
    assert (checkpoint(run, 3) / "adapter").exists()


@pytest.mark.slow  # a process for each refusal
def test_what_cannot_be_adapted_ends_before_a_model_loads(tmp_path: Path) -> None:
    run = run_grpo(tmp_path, *SMALL, "policy.dtensor_cfg.lora_cfg.target_modules=[q_porj]")
    assert run.returncode == 2, run.stderr
    assert "policy.dtensor_cfg.lora_cfg.target_modules = 'q_porj'" in run.stderr
    assert "Traceback" not in run.stderr
