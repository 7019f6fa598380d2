from typing import Any

import pytest
from transformers import (
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_rl.config.policy import PolicyConfig, check_backend
from nemo_rl.errors import ConfigError
from tests.unit.policy.tiny import SIZES, deepseek_v3, mixtral

KEY = r"policy\.megatron_cfg"


def check(model: PreTrainedConfig | None = None, **sections: Any) -> None:
    megatron = {"enabled": True, **sections.pop("megatron_cfg", {})}
    policy = PolicyConfig.model_validate({"model_name": "m", **sections, "megatron_cfg": megatron})
    policy.parallelism.check_model(model or Qwen3Config(**SIZES), key=f"policy.{policy.backend_key}")
    check_backend(policy, key="policy")


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
        {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
    ],
)
def test_sizes_that_divide_the_model_pass(sizes: dict[str, int]) -> None:
    check(megatron_cfg=sizes)


@pytest.mark.parametrize(
    ("model", "megatron_cfg", "said"),
    [
        (
            None,
            {"tensor_model_parallel_size": 3},
            rf"{KEY}\.tensor_model_parallel_size = 3: .*num_key_value_heads 2.*allowed: 1, 2",
        ),
        (
            None,
            {"pipeline_model_parallel_size": 3},
            rf"{KEY}\.pipeline_model_parallel_size = 3: must divide .* 2 layers",
        ),
        (
            None,
            {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 2},
            rf"{KEY}\.pipeline_model_parallel_size = 2: .*2 of them in num_layers_in_first_pipeline_stage",
        ),
        (
            None,
            {"num_layers_in_last_pipeline_stage": 1},
            rf"{KEY}\.num_layers_in_last_pipeline_stage = 1: .* one stage",
        ),
        (
            None,
            {"scheduler": {"lr_decay_style": "cosine", "lr_warmup_iters": 5, "lr_decay_iters": 5}},
            rf"{KEY}\.scheduler\.lr_decay_iters = 5: .*above lr_warmup_iters, 5",
        ),
        (GPT2Config(), {}, rf"{KEY}\.enabled = True: .*'gpt2'; supported: llama, qwen2, qwen3, qwen3_moe"),
        (deepseek_v3().config, {}, rf"{KEY}\.enabled = True: .*'deepseek_v3': its multi-head latent attention"),
        (None, {"expert_model_parallel_size": 2}, rf"{KEY}\.expert_model_parallel_size = 2: .*'qwen3' has no experts"),
        (
            mixtral().config,
            {"expert_model_parallel_size": 3},
            rf"{KEY}\.expert_model_parallel_size = 3: must divide the model's 4 experts",
        ),
        (
            mixtral().config,
            {"expert_tensor_parallel_size": 5},
            rf"{KEY}\.expert_tensor_parallel_size = 5: must divide .* experts, 48",
        ),
        (Glm4MoeConfig(**SIZES, norm_topk_prob=False), {}, "always renormalizes sigmoid scores"),
        (Glm4MoeConfig(**SIZES, n_group=4, topk_group=2, num_experts_per_tok=8), {}, "Megatron ranks groups by"),
        (MixtralConfig(**SIZES, router_jitter_noise=0.1), {}, "router_jitter_noise is not 0"),
        (LlamaConfig(**SIZES, mlp_bias=True), {}, "mlp_bias is True"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), {}, "hidden_act is 'gelu'"),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
            {},
            "layer_types is .*sliding_attention",
        ),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "no rotary embedding of type 'dynamic'",
        ),
        (
            Qwen3Config(**{**SIZES, "vocab_size": 2, "num_key_value_heads": 4}),
            {"tensor_model_parallel_size": 4},
            "leaves the last rank no token",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: PreTrainedConfig | None, megatron_cfg: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(model, megatron_cfg=megatron_cfg)


def test_optimizer_that_needs_whole_weights_is_refused() -> None:
    optimizer = {"name": "torch.optim.Adafactor", "kwargs": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.name = 'torch\.optim\.Adafactor'"):
        check(optimizer=optimizer)
    check(optimizer=optimizer, megatron_cfg={"optimizer": {"optimizer": "adam"}})  # which is in its place


def test_nothing_is_asked_of_a_policy_on_fsdp2() -> None:
    check(GPT2Config(), megatron_cfg={"enabled": False, "tensor_model_parallel_size": 7})


@pytest.mark.parametrize(
    ("ddp", "device", "ranks", "expected"),
    [
        ({}, "cuda", 8, (True, True)),
        ({}, "cuda", 1, (False, False)),
        ({}, "cpu", 8, (False, False)),
        ({"overlap_grad_reduce": False}, "cuda", 8, (False, True)),
        ({"use_distributed_optimizer": False}, "cuda", 8, (True, False)),
        ({"overlap_grad_reduce": True, "use_distributed_optimizer": True}, "cpu", 2, (True, True)),
    ],
)
def test_ranks_of_gpus_overlap_the_reduction_and_divide_the_optimizer_unless_told_otherwise(
    ddp: dict[str, Any], device: str, ranks: int, expected: tuple[bool, bool]
) -> None:
    megatron = {"enabled": True, "distributed_data_parallel_config": ddp}
    section: Any = PolicyConfig.model_validate({"model_name": "m", "megatron_cfg": megatron}).parallelism
    reduction = section.reduction_on(device, ranks)
    assert (reduction.is_overlapped, reduction.divides_optimizer) == expected
