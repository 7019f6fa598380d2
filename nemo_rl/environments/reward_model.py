"""An environment for data sets whose rewards are those of scorers alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config.environment import RewardModelEnvironmentConfig
from nemo_rl.environments.boundary import StepResult
from nemo_rl.types import EnvStep, Message


class RewardModelEnvironment:
    """One turn, and no reward of its own: `env.<name>.scorers` score the rollout behind its end."""

    def __init__(self, name: str, section: RewardModelEnvironmentConfig) -> None:
        """Takes nothing of the section."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return [
            EnvStep(state=state, answer=conversation[-1].content)
            for conversation, state in zip(conversations, states, strict=True)
        ]

    async def close(self) -> None:
        """Nothing is held."""
