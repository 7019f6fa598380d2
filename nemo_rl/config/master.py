"""The whole configuration of a training run on rollouts: one class per script of examples/."""

from typing import Annotated, ClassVar

from pydantic import Field, SerializeAsAny

from nemo_rl.config.algorithm import DistillationConfig, GRPOConfig, RewardPenaltiesConfig, RolloutTrainingConfig
from nemo_rl.config.data import BaseDataConfig, DataConfig
from nemo_rl.config.environment import EnvironmentConfig, RewardModelPlacementConfig, ScorerConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import RolloutPolicyConfig, SampledModelConfig, TeacherConfig
from nemo_rl.config.registries import DISTILLATION_LOSSES, ENVIRONMENTS, LOSSES, SCORERS, WEIGHT_TRANSPORTS
from nemo_rl.config.run import (
    CheckpointingConfig,
    ClusterConfig,
    GatewayConfig,
    LoggerConfig,
    RolloutBoundsConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from nemo_rl.config.section import Section

TEACHER, TEACHERS = "teacher", "teachers"


class RolloutRunConfig(Section):
    """Sections that every run with rollouts has."""

    policy: SampledModelConfig
    data: BaseDataConfig
    env: Annotated[dict[str, SerializeAsAny[EnvironmentConfig]], ENVIRONMENTS] = Field(default_factory=dict)
    scorers: Annotated[dict[str, SerializeAsAny[ScorerConfig]], SCORERS] = Field(default_factory=dict)
    reward_model: RewardModelPlacementConfig = RewardModelPlacementConfig()
    rollout: RolloutBoundsConfig = RolloutBoundsConfig()
    gateway: GatewayConfig = GatewayConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def seed(self) -> int:
        """Return the seed of the prompt order and of every sample."""
        raise NotImplementedError

    @property
    def generation_timeout_s(self) -> float:
        """Return the deadline of one generation request."""
        return self.policy.generation.timeout_s

    @property
    def max_rollout_turns(self) -> int:
        raise NotImplementedError


class TrainingRunConfig(RolloutRunConfig):
    """Sections that every algorithm on rollouts has; `algorithm` is the section named `algorithm_key`."""

    algorithm_key: ClassVar[str]

    policy: RolloutPolicyConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss_fn: SerializeAsAny[LossConfig]
    weight_sync: Annotated[SerializeAsAny[WeightSyncConfig], WEIGHT_TRANSPORTS] = Field(
        default_factory=WEIGHT_TRANSPORTS.new
    )
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    teacher: TeacherConfig | None = None  # for all tasks
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)  # by task name; takes precedence over `teacher`

    @property
    def algorithm(self) -> RolloutTrainingConfig:
        raise NotImplementedError

    @property
    def seed(self) -> int:
        return self.algorithm.seed

    @property
    def generation_timeout_s(self) -> float:
        """Return the deadline of one generation request.

        With background collection it may wait for the requests of as many steps as are collected ahead.
        """
        background = self.algorithm.background
        steps_ahead = background.max_trajectory_age_steps if background.enabled else 0
        return self.policy.generation.timeout_s * (steps_ahead + 1)

    @property
    def max_rollout_turns(self) -> int:
        return self.algorithm.max_rollout_turns

    @property
    def min_group_size(self) -> int:
        """Return the survivors that a group needs to be trained on; never more than it has members."""
        return min(self.rollout.min_group_size, self.algorithm.num_generations_per_prompt)

    @property
    def needs_reference(self) -> bool:
        """Return whether a frozen copy of the initial weights is kept."""
        return False

    @property
    def teacher_sections(self) -> dict[str, TeacherConfig]:
        """Return every teacher by the key of its section."""
        default = {} if self.teacher is None else {TEACHER: self.teacher}
        return default | {f"{TEACHERS}.{task}": section for task, section in self.teachers.items()}

    def teacher_key(self, task_name: str) -> str | None:
        """Return the key of the task's teacher; None: it has none."""
        if task_name in self.teachers:
            return f"{TEACHERS}.{task_name}"
        return None if self.teacher is None else TEACHER


class GRPORunConfig(TrainingRunConfig):
    """The configuration of `examples/run_grpo.py`."""

    algorithm_key: ClassVar[str] = "grpo"

    grpo: GRPOConfig
    loss_fn: Annotated[SerializeAsAny[LossConfig], LOSSES] = Field(default_factory=LOSSES.new)
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig()

    @property
    def algorithm(self) -> GRPOConfig:
        return self.grpo

    @property
    def needs_reference(self) -> bool:
        return self.loss_fn.needs_reference or self.grpo.adv_estimator.needs_reference

    @property
    def min_group_size(self) -> int:
        """Return 1 with opd: a teacher and no reward decides what to learn, so a single rollout suffices."""
        return super().min_group_size if self.grpo.adv_estimator.compares_group else 1


class DistillationRunConfig(TrainingRunConfig):
    """The configuration of `examples/run_distillation.py`."""

    algorithm_key: ClassVar[str] = "distillation"

    distillation: DistillationConfig = DistillationConfig()
    loss_fn: Annotated[SerializeAsAny[LossConfig], DISTILLATION_LOSSES] = Field(default_factory=DISTILLATION_LOSSES.new)

    @property
    def algorithm(self) -> DistillationConfig:
        return self.distillation

    @property
    def min_group_size(self) -> int:
        """Return 1: rollouts are not compared with each other, so each that did not fail is trained on."""
        return 1
