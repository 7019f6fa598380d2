import pytest

from nemo_rl.config.checks import check_async
from nemo_rl.errors import ConfigError
from tests.unit.algorithms.run_setup import make_config


def test_asynchronous_training_needs_the_off_policy_correction() -> None:
    config = make_config(grpo={"async_grpo": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"loss_fn.use_importance_sampling_correction = False: .* must be true"):
        check_async(config)
    check_async(
        make_config(grpo={"async_grpo": {"enabled": True}}, loss_fn={"use_importance_sampling_correction": True})
    )
    check_async(make_config())
