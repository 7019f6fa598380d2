"""`policy.moe` is refused by name for models that lack what it sets."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig

from nemo_rl.config.moe import MoEConfig, check_moe, num_experts
from nemo_rl.errors import ConfigError
from nemo_rl.policy.fsdp2.balance import freeze_routers
from tests.unit.policy.tiny import EXPERT_MODELS, SIZES, qwen2


def config_of(name: str) -> PreTrainedConfig:
    return EXPERT_MODELS[name]().config


@pytest.mark.parametrize(("name", "number"), [("qwen3_moe", 8), ("mixtral", 4), ("deepseek_v3", 8)])
def test_the_number_of_experts_has_one_name(name: str, number: int) -> None:
    assert num_experts(config_of(name)) == number
    assert num_experts(qwen2().config) == 0


@pytest.mark.parametrize("key", ["freeze_router", "aux_loss_coeff", "z_loss_coeff", "bias_update_rate"])
def test_a_dense_model_has_no_router_to_set(key: str) -> None:
    section = MoEConfig.model_validate({key: True if key == "freeze_router" else 0.1})
    with pytest.raises(ConfigError, match=rf"policy\.moe\.{key}.*'qwen2'"):
        check_moe(section, qwen2().config)
    check_moe(MoEConfig(), qwen2().config)


def test_a_bias_is_updated_where_the_router_has_one() -> None:
    section = MoEConfig(bias_update_rate=1e-3)
    check_moe(section, config_of("deepseek_v3"))
    with pytest.raises(ConfigError, match="read only for deepseek_v3, glm4_moe, nemotron_h; allowed: 0"):
        check_moe(section, config_of("qwen3_moe"))


@pytest.mark.parametrize("name", [*EXPERT_MODELS, "gpt_oss"])
def test_a_frozen_router_is_one_matrix_of_each_layer_with_experts(name: str) -> None:
    if name == "gpt_oss":
        sizes: dict[str, Any] = {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes))
    else:
        model = EXPERT_MODELS[name]()
    freeze_routers(model)
    frozen = [p for p in model.parameters() if not p.requires_grad and p.ndim == 2]
    assert [p.shape for p in frozen] == [(num_experts(model.config), 32)] * (1 if name == "deepseek_v3" else 2)
