from typing import Any

import pytest

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.policy.megatron.optimizer_keys import to_torch_config
from nemo_rl.policy.optimizers import check_optimizer
from tests.unit.policy.tiny import learning_rates


def policy(**megatron_cfg: Any) -> PolicyConfig:
    settings: dict[str, Any] = {"model_name": "m", "megatron_cfg": {"enabled": True, **megatron_cfg}}
    return PolicyConfig.model_validate(settings)


def test_without_keys_of_their_own_policys_are_used() -> None:
    config = policy()
    assert to_torch_config(config) is config


def test_adam_is_torchs_adamw() -> None:
    config = to_torch_config(policy(optimizer={"lr": 0.5, "adam_beta1": 0.8, "adam_eps": 1e-6, "weight_decay": 0.1}))
    assert config.optimizer.name == "torch.optim.AdamW"
    assert config.optimizer.kwargs == {"lr": 0.5, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 0.1}
    check_optimizer(config)
    assert learning_rates(config, 2) == [0.5, 0.5]


def test_sgd_has_momentum() -> None:
    config = to_torch_config(policy(optimizer={"optimizer": "sgd", "lr": 0.5}))
    assert config.optimizer.name == "torch.optim.SGD"
    assert config.optimizer.kwargs["momentum"] == 0.9


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.1, 0.55, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.1, 0.55, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.1, 0.55, 1.0, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2, 0.2]),
    ],
)
def test_learning_rate_warms_up_and_decays(style: str, expected: list[float]) -> None:
    schedule = {"lr_warmup_iters": 2, "lr_warmup_init": 0.1, "lr_decay_style": style, "lr_decay_iters": 6}
    config = to_torch_config(policy(optimizer={"lr": 1.0, "min_lr": 0.2}, scheduler=schedule))
    assert learning_rates(config, len(expected)) == pytest.approx(expected)


def test_schedule_goes_with_policys_optimizer() -> None:
    config = to_torch_config(policy(scheduler={"lr_warmup_iters": 5}))
    assert learning_rates(config, 2) == pytest.approx([0.0, 1e-6])  # of 5e-6
