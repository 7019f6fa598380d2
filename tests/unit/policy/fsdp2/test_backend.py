import pytest
from transformers import GPT2Config, Qwen3Config

from nemo_rl.config.policy import PolicyConfig, TeacherConfig, check_backend
from nemo_rl.errors import ConfigError
from nemo_rl.policy.fsdp2.backend import check_expert_parallel, check_tensor_parallel
from tests.unit.policy.tiny import EXPERT_MODELS

KEY = r"policy\.dtensor_cfg\.tensor_parallel_size"


def qwen3(*, heads: int = 16, key_value_heads: int = 8, width: int = 96) -> Qwen3Config:
    return Qwen3Config(num_attention_heads=heads, num_key_value_heads=key_value_heads, intermediate_size=width)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_size_that_divides_the_model_is_allowed(size: int) -> None:
    check_tensor_parallel(size, qwen3())


@pytest.mark.parametrize(
    ("size", "sizes", "allowed"),
    [
        (3, {}, "1, 2, 4, 8"),
        (16, {}, "1, 2, 4, 8"),
        (8, {"width": 100}, "1, 2, 4"),
        (4, {"heads": 14, "key_value_heads": 2}, "1, 2"),
    ],
)
def test_size_that_does_not_names_those_that_do(size: int, sizes: dict[str, int], allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY} = {size}: .*allowed: {allowed}$"):
        check_tensor_parallel(size, qwen3(**sizes))


def test_model_without_a_plan_names_those_with_one() -> None:
    with pytest.raises(ConfigError, match=f"{KEY} = 2: .*'gpt2'; supported: llama, qwen2, qwen3, qwen3_moe, mixtral$"):
        check_tensor_parallel(2, GPT2Config())
    check_tensor_parallel(1, GPT2Config())


def test_experts_are_spread_over_ranks_that_divide_them() -> None:
    for size in (1, 2, 4, 8):
        check_expert_parallel(size, EXPERT_MODELS["deepseek_v3"]().config)
    with pytest.raises(
        ConfigError, match=r"expert_parallel_size = 3: must divide the model's 8 experts; .*1, 2, 4, 8$"
    ):
        check_expert_parallel(3, EXPERT_MODELS["qwen3_moe"]().config)


def test_experts_of_other_models_stay_together() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3'; supported: qwen3_moe, mixtral, deepseek_v3, gpt_oss; else 1$"):
        check_expert_parallel(2, qwen3())
    check_expert_parallel(1, qwen3())


@pytest.mark.parametrize("section", [PolicyConfig, TeacherConfig])
def test_layers_whose_ranks_exchange_tokens_are_not_compiled(section: type[PolicyConfig | TeacherConfig]) -> None:
    options = {"compile": True, "expert_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"model\.dtensor_cfg\.compile = True: .*expert_parallel_size is 2: .*auto$"):
        check_backend(section.model_validate({"model_name": "m", "dtensor_cfg": options}), key="model")


@pytest.mark.parametrize("section", [PolicyConfig, TeacherConfig])
def test_compiled_layers_are_refused_where_ranks_share_them(section: type[PolicyConfig | TeacherConfig]) -> None:
    options = {"compile": True, "tensor_parallel_size": 2}
    with pytest.raises(
        ConfigError, match=r"model\.dtensor_cfg\.compile = True: .*tensor_parallel_size is 2: .*false, auto$"
    ):
        check_backend(section.model_validate({"model_name": "m", "dtensor_cfg": options}), key="model")
    check_backend(section.model_validate({"model_name": "m", "dtensor_cfg": {"compile": True}}), key="model")
    other = {"model_name": "m", "dtensor_cfg": options, "backend": "megatron"}
    check_backend(section.model_validate(other), key="model")
