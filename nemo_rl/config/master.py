"""The whole configuration of a GRPO run."""

from typing import Any

from pydantic import Field, SerializeAsAny, field_validator

from nemo_rl.config.algorithm import GRPO
from nemo_rl.config.data import Data
from nemo_rl.config.env import ENVIRONMENT_SECTIONS, CustomSection
from nemo_rl.config.environment import EnvironmentSection
from nemo_rl.config.loss import LossFn
from nemo_rl.config.penalties import RewardPenalties
from nemo_rl.config.policy import Policy
from nemo_rl.config.run import Checkpointing, Cluster, Gateway, Logger, Rollout, WeightSync
from nemo_rl.config.section import Section


class GRPOConfig(Section):
    """`examples/run_grpo.py`: what a recipe may say."""

    grpo: GRPO
    loss_fn: LossFn = LossFn()
    reward_penalties: RewardPenalties = RewardPenalties()
    policy: Policy
    data: Data
    env: dict[str, SerializeAsAny[EnvironmentSection]] = Field(default_factory=dict)
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
    def _section_by_type(cls, entries: Any) -> Any:
        """Validate each entry by the section of its type, so that its own keys are known."""
        if not isinstance(entries, dict):
            return entries
        return {name: environment_section(name, entry) for name, entry in entries.items()}


def environment_section(name: str, entry: Any) -> Any:
    """One entry of `env` as its type's section; what is no mapping is left for pydantic to refuse."""
    if not isinstance(entry, dict):
        return entry
    kind = entry.get("type") or name
    section = ENVIRONMENT_SECTIONS.get(kind, CustomSection)
    return section.model_validate({**entry, "type": kind})
