"""The whole configuration of a training run on rollouts; one class a script of examples/."""

from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from nemo_rl.config.algorithm import GRPO, Distillation, RolloutTraining
from nemo_rl.config.data import Data, DataSets
from nemo_rl.config.entries import KINDS
from nemo_rl.config.environment import EnvironmentSection
from nemo_rl.config.loss import DistillationLoss, LossFn
from nemo_rl.config.penalties import RewardPenalties
from nemo_rl.config.policy import RolloutPolicy, SampledModel
from nemo_rl.config.run import Checkpointing, Cluster, Gateway, Logger, Rollout, RolloutBounds, WeightSync
from nemo_rl.config.scorers import RewardModelPlacement, ScorerSection
from nemo_rl.config.section import Section
from nemo_rl.config.teacher import Teacher

TEACHER, TEACHERS = "teacher", "teachers"


class RolloutConfig(Section):
    """What rollouts are made of, whatever becomes of them."""

    policy: SampledModel
    data: DataSets
    env: dict[str, SerializeAsAny[EnvironmentSection]] = Field(default_factory=dict)
    scorers: dict[str, SerializeAsAny[ScorerSection]] = Field(default_factory=dict)
    reward_model: RewardModelPlacement = RewardModelPlacement()
    rollout: RolloutBounds = RolloutBounds()
    gateway: Gateway = Gateway()
    logger: Logger = Logger()
    cluster: Cluster = Cluster()

    @property
    def seed(self) -> int:
        """Of the order of prompts and of every sample."""
        raise NotImplementedError

    @property
    def max_rollout_turns(self) -> int:
        raise NotImplementedError

    @field_validator("env", mode="before")
    @classmethod
    def _environment_by_type(cls, entries: Any) -> Any:
        return KINDS["env"].read_all(entries)

    @field_validator("scorers", mode="before")
    @classmethod
    def _scorer_by_type(cls, entries: Any) -> Any:
        return KINDS["scorers"].read_all(entries)


class TrainingConfig(RolloutConfig):
    """What every algorithm that trains on rollouts has; `algorithm` is the section named `algorithm_key`."""

    algorithm_key: ClassVar[str]

    policy: RolloutPolicy
    data: Data
    rollout: Rollout = Rollout()
    weight_sync: WeightSync = WeightSync()
    checkpointing: Checkpointing = Checkpointing()
    teacher: Teacher | None = None  # of all tasks
    teachers: dict[str, Teacher] = Field(default_factory=dict)  # by task name, before `teacher`

    @property
    def algorithm(self) -> RolloutTraining:
        raise NotImplementedError

    @property
    def seed(self) -> int:
        return self.algorithm.seed

    @property
    def max_rollout_turns(self) -> int:
        return self.algorithm.max_rollout_turns

    @property
    def min_group_size(self) -> int:
        """Survivors that a group needs to be trained on: never more than it has members."""
        return min(self.rollout.min_group_size, self.algorithm.num_generations_per_prompt)

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first weights is kept."""
        return False

    @property
    def teacher_sections(self) -> dict[str, Teacher]:
        """All teachers by the key of their section."""
        default = {} if self.teacher is None else {TEACHER: self.teacher}
        return default | {f"{TEACHERS}.{task}": section for task, section in self.teachers.items()}

    def teacher_key(self, task_name: str) -> str | None:
        """The key of the task's teacher; None: it has none."""
        if task_name in self.teachers:
            return f"{TEACHERS}.{task_name}"
        return None if self.teacher is None else TEACHER


class GRPOConfig(TrainingConfig):
    """`examples/run_grpo.py`: what a recipe may say."""

    algorithm_key: ClassVar[str] = "grpo"

    grpo: GRPO
    loss_fn: LossFn = LossFn()
    reward_penalties: RewardPenalties = RewardPenalties()

    @property
    def algorithm(self) -> GRPO:
        return self.grpo

    @property
    def needs_reference(self) -> bool:
        return self.loss_fn.reference_policy_kl_penalty > 0

    @property
    def min_group_size(self) -> int:
        """Where a teacher and no reward says what to learn, a rollout needs no others beside it."""
        return 1 if self.grpo.adv_estimator.name == "opd" else super().min_group_size


class DistillationConfig(TrainingConfig):
    """`examples/run_distillation.py`: what a recipe may say."""

    algorithm_key: ClassVar[str] = "distillation"

    distillation: Distillation = Distillation()
    loss_fn: DistillationLoss = DistillationLoss()

    @property
    def algorithm(self) -> Distillation:
        return self.distillation

    @property
    def min_group_size(self) -> int:
        """Rollouts are not compared with each other: each that did not fail is trained on."""
        return 1
