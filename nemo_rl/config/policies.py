"""The table `policies`: named adapters on one base, each trained on its own rollouts. Imports no torch."""

from typing import Annotated, Any

from pydantic import Field, SerializeAsAny

from nemo_rl.config import registries
from nemo_rl.config.kinds import Section
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig


class PolicyOptimizerConfig(Section):
    """Values of `policy.optimizer` that differ for one policy."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # replace those of policy.optimizer.kwargs, key by key


class NamedPolicyConfig(Section):
    """One policy of several: a LoRA adapter with a name, on the base that all of them share."""

    trainable: bool = True  # train it on its own rollouts; false: it stays as it starts, without an optimizer
    # directory of the adapter to start from, in peft's format, or a checkpoint `step_N`; null: a new one, of no effect
    adapter_path: str | None = None
    optimizer: PolicyOptimizerConfig = PolicyOptimizerConfig.with_defaults()  # where it differs from policy.optimizer
    # its loss, a whole section; null: the run's loss_fn
    loss_fn: Annotated[SerializeAsAny[LossConfig] | None, registries.LOSSES] = None

    def applied_to(self, config: PolicyConfig) -> PolicyConfig:
        """Return the section `policy` with the values of this policy."""
        if not self.optimizer.kwargs:
            return config
        kwargs = config.optimizer.kwargs | self.optimizer.kwargs
        return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"kwargs": kwargs})})
