"""The main job on CUDA devices, colocated and split; skipped, and reported as skipped, where there are too few."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.quickstart.models import make_tokenizer
from tests.functional.cli import Run, run_grpo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SMALL = (
    "policy.device=cuda",
    "policy.precision=bfloat16",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.max_val_samples=16",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    "weight_sync.verify=true",  # each refit: the engines hold what the ranks hold
)
TWO_GPUS = "cluster.gpus_per_node=2"
SPLIT = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
TENSOR_PARALLEL = ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size=2")
BACKGROUND = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
OPTIONS = {
    "float32": ("policy.precision=float32",),
    "packing": ("++policy.sequence_packing={enabled: true, train_mb_tokens: 128, logprob_mb_tokens: 256}",),
    "lora": ("++policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}",),
    "recomputed": ("++policy.dtensor_cfg.activation_checkpointing=true", "++policy.dtensor_cfg.keep_unsharded=false"),
    "offloaded": ("++policy.dtensor_cfg.cpu_offload=true",),
    "reference": ("loss_fn.reference_policy_kl_penalty=0.01",),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights in Qwen2.5's shape: biases at queries, keys and values, grouped heads, tied embeddings."""
    directory = tmp_path_factory.mktemp("qwen2_5")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **ends,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def assert_two_steps(run: Run) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    steps = {step: metrics for step, metrics in run.metrics().items() if "train/loss" in metrics}
    assert list(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["train/global_valid_seqs"] == 4 * 8
        assert 1 <= metrics["train/token_mult_prob_error"] < 1.1
        assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("sleeps", ["true", "false"])
def test_two_steps_with_a_colocated_engine(tmp_path: Path, qwen: str, sleeps: str) -> None:
    sleep_mode = f"policy.generation.vllm_cfg.enable_sleep_mode={sleeps}"
    assert_two_steps(run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, sleep_mode))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_steps_with_options_of_the_policy(tmp_path: Path, qwen: str, options: tuple[str, ...]) -> None:
    assert_two_steps(run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, *options))


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path, qwen: str) -> None:
    saved = (
        "++checkpointing.enabled=true",
        "++checkpointing.save_period=2",
        f"++checkpointing.checkpoint_dir={tmp_path}/c",
    )
    assert_two_steps(run_grpo(tmp_path / "first", f"policy.model_name={qwen}", *SMALL, *saved))
    resumed = run_grpo(tmp_path / "second", f"policy.model_name={qwen}", *SMALL, *saved, "grpo.max_num_steps=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [step for step, metrics in resumed.metrics().items() if "train/loss" in metrics] == [3]


@two_devices
@pytest.mark.parametrize("sleeps", ["true", "false"])
def test_two_steps_with_two_ranks_and_engines_on_their_devices(tmp_path: Path, qwen: str, sleeps: str) -> None:
    sleep_mode = f"policy.generation.vllm_cfg.enable_sleep_mode={sleeps}"
    run = run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, TWO_GPUS, sleep_mode)
    assert_two_steps(run)
    assert "2 policy ranks are ready" in run.stderr


@two_devices
def test_two_steps_with_tensor_parallel_policy_and_engine(tmp_path: Path, qwen: str) -> None:
    assert_two_steps(run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, TWO_GPUS, *TENSOR_PARALLEL))


@two_devices
def test_two_steps_with_an_engine_on_a_device_of_its_own(tmp_path: Path, qwen: str) -> None:
    assert_two_steps(run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, TWO_GPUS, *SPLIT))


@two_devices
def test_two_steps_in_the_background_of_an_engine_on_a_device_of_its_own(tmp_path: Path, qwen: str) -> None:
    assert_two_steps(run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, TWO_GPUS, *SPLIT, *BACKGROUND))


@two_devices
def test_more_ranks_than_devices_end_before_a_model_loads(tmp_path: Path, qwen: str) -> None:
    run = run_grpo(tmp_path, f"policy.model_name={qwen}", *SMALL, "policy.dtensor_cfg.data_parallel_size=2")
    assert run.returncode == 2, run.stderr
    assert "policy.dtensor_cfg.data_parallel_size = 2" in run.stderr
