"""How a LoRA policy reaches the engines: the rule, and its refusals."""

from typing import Any

import pytest
from transformers import Idefics3Config, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe
from nemo_rl.weight_sync.adapters import choose_adapter_refit, num_live_versions

ON_MEGATRON = (
    *("policy.dtensor_cfg.lora_cfg.enabled=false", "++policy.megatron_cfg.enabled=true"),
    "++policy.megatron_cfg.peft={enabled: true, dim: 8}",
)
BACKGROUND = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")


def choose(*overrides: str, model: PreTrainedConfig | None = None, device: Any = "cpu") -> tuple[str, str]:
    config = load_config(find_recipe("lora"), list(overrides))
    return choose_adapter_refit(config, make_layout(config, device), model or Qwen3Config())


@pytest.mark.parametrize(
    ("overrides", "model", "chosen", "reason"),
    [
        ((), None, "merged", "no rollout runs while the policy trains"),
        (BACKGROUND, None, "separate", "rollouts run while the policy trains"),
        (BACKGROUND, LlamaConfig(), "separate", "rollouts run"),
        ((*BACKGROUND, "grpo.async_grpo.max_trajectory_age_steps=0"), None, "merged", "no rollout runs"),
        ((*BACKGROUND, "weight_sync.adapter=merged"), None, "merged", "weight_sync.adapter is merged"),
        (("weight_sync.adapter=separate",), None, "separate", "weight_sync.adapter is separate"),
        ((*BACKGROUND, *ON_MEGATRON), None, "separate", "rollouts run while the policy trains"),
        ((*BACKGROUND, "policy.generation.backend=hf"), None, "merged", "the hf engine"),
        (BACKGROUND, Qwen3MoeConfig(), "merged", "experts of this 'qwen3_moe' model"),
        (BACKGROUND, Idefics3Config(), "merged", "a model of type 'idefics3', which sees, are not tested"),
        (BACKGROUND, PreTrainedConfig(), "merged", "auto separates adapters of llama, qwen2, qwen3 alone"),
    ],
)
def test_auto_separates_where_rollouts_run_while_the_policy_trains(
    overrides: tuple[str, ...], model: PreTrainedConfig | None, chosen: str, reason: str
) -> None:
    said = choose(*overrides, model=model)
    assert said[0] == chosen
    assert reason in said[1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("policy.dtensor_cfg.lora_cfg.enabled=false",), "no adapter is trained"),
        ((*ON_MEGATRON, "policy.megatron_cfg.peft.dim=513"), "policy.megatron_cfg.peft.dim is 513"),
        (("policy.generation.backend=hf",), "the hf engine holds whole weights"),
        (("policy.dtensor_cfg.lora_cfg.dim=513",), "dim is 513, and vLLM's adapters have at most 512"),
    ],
)
def test_what_cannot_be_separated_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"weight_sync.adapter = 'separate': .*{said}.*allowed: auto, merged"):
        choose(*overrides, "weight_sync.adapter=separate")


def test_an_engine_that_sleeps_keeps_no_adapters() -> None:
    separate = "weight_sync.adapter=separate"
    with pytest.raises(ConfigError, match="the engine discards its base model"):
        choose(separate, device="cuda")
    for stays in ("policy.offload=never", "policy.generation.vllm_cfg.enable_sleep_mode=false"):
        assert choose(separate, stays, device="cuda")[0] == "separate"


def test_the_engine_has_room_for_the_versions_of_running_rollouts() -> None:
    config = load_config(find_recipe("lora"), [*BACKGROUND, "grpo.async_grpo.max_trajectory_age_steps=3"])
    assert num_live_versions(config) == 4
    assert num_live_versions(load_config(find_recipe("lora"), [])) == 1
