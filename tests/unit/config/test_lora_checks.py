from typing import Any

import pytest

from nemo_rl.config.policy import PolicyConfig, check_lora
from nemo_rl.errors import ConfigError


def policy(lora: dict[str, Any], **sections: Any) -> PolicyConfig:
    dtensor = {"lora_cfg": lora, **sections.pop("dtensor_cfg", {})}
    return PolicyConfig.model_validate({"model_name": "m", "dtensor_cfg": dtensor, **sections})


@pytest.mark.parametrize(
    ("lora", "sections", "said"),
    [
        ({}, {"dtensor_cfg": {"tensor_parallel_size": 2}}, "lora_cfg.enabled = True: .*tensor_parallel_size is 2"),
        ({}, {"megatron_cfg": {"enabled": True}}, "lora_cfg.enabled = True: policy.megatron_cfg.enabled is true"),
        (
            {"match_all_linear": True, "target_modules": ["q_proj"]},
            {},
            r"target_modules = \['q_proj'\]: .*match_all_linear is true",
        ),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused(
    lora: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_lora(policy({"enabled": True, **lora}, **sections))
    check_lora(policy({"enabled": False, **lora}, **sections))


def test_adapters_of_some_or_of_all_layers_are_accepted() -> None:
    check_lora(policy({"enabled": True, "match_all_linear": True}))
    check_lora(policy({"enabled": True, "target_modules": ["q_proj"], "exclude_modules": ["*.0.*"]}))
