"""The whole configuration of a GRPO run."""

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator

from nemo_rl.config.algorithm import GRPO
from nemo_rl.config.data import Data
from nemo_rl.config.entries import KINDS
from nemo_rl.config.environment import EnvironmentSection
from nemo_rl.config.loss import LossFn
from nemo_rl.config.penalties import RewardPenalties
from nemo_rl.config.policy import Policy
from nemo_rl.config.run import Checkpointing, Cluster, Gateway, Logger, Rollout, WeightSync
from nemo_rl.config.scorers import RewardModelPlacement, ScorerSection
from nemo_rl.config.section import Section


class GRPOConfig(Section):
    """`examples/run_grpo.py`: what a recipe may say."""

    grpo: GRPO
    loss_fn: LossFn = LossFn()
    reward_penalties: RewardPenalties = RewardPenalties()
    policy: Policy
    data: Data
    env: dict[str, SerializeAsAny[EnvironmentSection]] = Field(default_factory=dict)
    scorers: dict[str, SerializeAsAny[ScorerSection]] = Field(default_factory=dict)
    reward_model: RewardModelPlacement = RewardModelPlacement()
    rollout: Rollout = Rollout()
    gateway: Gateway = Gateway()
    weight_sync: WeightSync = WeightSync()
    checkpointing: Checkpointing = Checkpointing()
    logger: Logger = Logger()
    cluster: Cluster = Cluster()

    @property
    def min_group_size(self) -> int:
        """Survivors that a group needs to be trained on: never more than it has members."""
        return min(self.rollout.min_group_size, self.grpo.num_generations_per_prompt)

    @field_validator("env", mode="before")
    @classmethod
    def _environment_by_type(cls, entries: Any) -> Any:
        return KINDS["env"].read_all(entries)

    @field_validator("scorers", mode="before")
    @classmethod
    def _scorer_by_type(cls, entries: Any) -> Any:
        return KINDS["scorers"].read_all(entries)
