"""Environment `reward_model`: a single turn that `scorers` score."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Message

if TYPE_CHECKING:
    from nemo_rl.environments.boundary import StepResult


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """A single turn whose rewards are those of its `scorers`."""

    has_own_rewards: ClassVar[bool] = False


def check_reward_model_environment(key: str, section: RewardModelEnvironmentConfig, config: object) -> None:
    """Raise ConfigError for an entry without scorers."""
    if not section.scorers:
        raise ConfigError(f"{key}.scorers", [], "its rewards are those of scorers: must name one or more")


class RewardModelEnvironment:
    """A single turn without a reward of its own: `env.<name>.scorers` score the rollout when it has ended."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        return [
            EnvStep(state=state, answer=conversation[-1].content)
            for conversation, state in zip(conversations, states, strict=True)
        ]

    async def close(self) -> None:
        """Do nothing: no resources are held."""


REWARD_MODEL = Entry(
    RewardModelEnvironmentConfig,
    make=lambda name, section: RewardModelEnvironment(),
    check=check_reward_model_environment,
)
