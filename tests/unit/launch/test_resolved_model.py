import pytest
from transformers import LlamaConfig, MixtralConfig

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.launch.resolved_model import check_router_replay

REPLAY = PolicyConfig.model_validate({"model_name": "m", "router_replay": {"enabled": True}})


def test_replay_of_a_dense_model_is_refused() -> None:
    types = "deepseek_v3, glm4_moe, gpt_oss, mixtral, nemotron_h, qwen3_moe"
    with pytest.raises(ConfigError, match=rf"type 'llama' have no routers .* {types}") as caught:
        check_router_replay(REPLAY, LlamaConfig())
    assert caught.value.key == "policy.router_replay.enabled"


def test_replay_of_experts_and_dense_models_without_replay_are_accepted() -> None:
    check_router_replay(REPLAY, MixtralConfig())
    check_router_replay(PolicyConfig(model_name="m"), LlamaConfig())
