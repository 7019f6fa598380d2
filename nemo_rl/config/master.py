"""The whole configuration of a training run on rollouts: one class per script of examples/, and the sections `grpo` and
`distillation`, under NeMo-RL's names."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from nemo_rl.config import registries
from nemo_rl.config import shared_sections as shared
from nemo_rl.config.data import BaseDataConfig, DataConfig
from nemo_rl.config.environment import EnvironmentConfig, RewardModelPlacementConfig, RolloutRunnerConfig, ScorerConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policies import NamedPolicyConfig
from nemo_rl.config.policy import RolloutPolicyConfig, SampledModelConfig, TeacherConfig
from nemo_rl.config.value_types import Seed, TokenId

TEACHER, TEACHERS = "teacher", "teachers"


class PenaltyTokenIdsConfig(Section):
    unwanted: list[TokenId] = Field(default_factory=list)  # none of them may be sampled
    think_open: TokenId | None = None  # replaces the first of thinking_tags
    think_close: TokenId | None = None  # replaces the second


class RewardPenaltiesConfig(Section):
    """A rollout with such a reply gets the reward 0, unless its own is lower. All off by default."""

    penalize_duplicated_reasoning: bool = False  # a reply whose answer repeats its thinking
    penalize_empty_final_answer: bool = False  # a last reply without answer and without tool call
    penalize_unwanted_tokens: bool = False  # any of token_ids.unwanted in a reply
    penalize_malformed_think_tag: bool = False  # thinking tags that do not open and close once
    token_ids: PenaltyTokenIdsConfig = PenaltyTokenIdsConfig.with_defaults()  # the tokens that the penalties look for
    # texts that open and close the thinking of a reply
    thinking_tags: list[str] = Field(default=["<think>", "</think>"], min_length=2, max_length=2)
    invalid_tool_call_patterns: list[str] = Field(  # read by grpo.invalid_tool_call_advantage
        default=["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"], min_length=1
    )

    @property
    def enabled(self) -> tuple[str, ...]:
        return tuple(name for name in type(self).model_fields if name.startswith("penalize_") and getattr(self, name))


class RewardScalingConfig(Section):
    """Clamp rewards to the source range, then map it linearly to the target range."""

    enabled: bool = False  # clamp and map the reward of each rollout
    source_min: float = 0.0  # lowest reward; lower ones count as this
    source_max: float = 1.0  # highest reward; higher ones count as this
    target_min: float = 0.0  # the value of source_min after the mapping
    target_max: float = 1.0  # the value of source_max after the mapping


class RewardShapingConfig(Section):
    """DAPO's penalty for overlong responses (arXiv 2503.14476, equation 13)."""

    enabled: bool = False  # penalize overlong responses
    overlong_buffer_length: int = Field(default=128, gt=0)  # tokens before the maximum in which the penalty grows
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)  # subtracted from the reward at the maximum length
    max_response_length: int | None = Field(default=None, gt=0)  # None: policy.generation.max_new_tokens
    # Factor of the rewards of truncated rollouts, in place of the overlong penalty; None: that penalty.
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)


class AdvantageEstimatorConfig(Section):
    """Base of all sections of `grpo.adv_estimator`; each estimator has its own in algorithms/estimators.py."""

    name: str  # "grpo", "gdpo", ..., or the dotted path of an estimator of one's own

    @property
    def uses_teachers(self) -> bool:
        """Return whether the estimator reads the teachers' log-probs."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Return whether the estimator reads a frozen reference policy for more than the loss's KL in the reward."""
        return False

    @property
    def compares_group(self) -> bool:
        """Return whether rollouts of a group are compared, so that training needs several survivors of each."""
        return True

    @property
    def reads_named_rewards(self) -> bool:
        """Return whether each named reward counts by itself, not their sum."""
        return False

    @property
    def needs_greedy_baseline(self) -> bool:
        """Return whether each prompt has a greedy rollout beside those that are trained."""
        return False


class AsyncRolloutsConfig(Section):
    """Rollouts collected in the background, while the policy trains (AReaL, arXiv 2505.24298)."""

    enabled: bool = False  # collect rollouts while the policy trains; false: before each step
    max_trajectory_age_steps: int = Field(default=1, ge=0)  # weight updates since a group's oldest token; 0: as if sync
    in_flight_weight_updates: bool = False  # rollouts continue through a refit; else none runs during one
    recompute_kv_cache_after_weight_updates: bool = True  # else running requests keep keys and values of old weights
    max_generation_failures: int = Field(default=10, ge=0)  # groups in a row that fail whole; above it the run stops
    # a group at the age bound that still runs: the trainer waits for it, drops it, or takes its ended rollouts
    stale_groups: Literal["wait", "drop", "trim"] = "wait"

    @property
    def overlaps(self) -> bool:
        """Return whether engine and trainer compute at the same time."""
        return self.enabled and self.max_trajectory_age_steps > 0


class RolloutTrainingConfig(Section):
    """Training on rollouts of the policy: how many, for how long, and how it is validated."""

    num_prompts_per_step: int = Field(default=32, gt=0)  # prompts whose rollouts a step trains on
    num_generations_per_prompt: int = Field(default=16, gt=0)  # rollouts of each prompt: its group
    max_rollout_turns: int = Field(default=1, gt=0)  # turns of a conversation with an environment
    max_num_epochs: int = Field(default=1, gt=0)  # passes over the training data
    max_num_steps: int = Field(default=1_000_000, gt=0)  # the run ends with this step, or with the last epoch
    seed: Seed = 42  # seeds the order of prompts and every sample

    val_period: int = Field(default=10, ge=0)  # steps; 0: never
    val_at_start: bool = False  # validate before the first step
    val_at_end: bool = True  # validate after the last step
    val_overlap: bool = False  # validate beside the next step; its refit waits for the end
    max_val_samples: int | None = Field(default=256, gt=0)  # prompts of each dataset; None: all
    val_batch_size: int = Field(default=256, gt=0)  # validation prompts at once
    val_num_generations_per_prompt: int = Field(default=1, gt=0)  # rollouts of each validation prompt
    val_temperature: float | None = Field(default=None, ge=0, le=2)  # None: the training temperature
    val_top_p: float | None = Field(default=None, gt=0, le=1)  # None: the training's
    val_top_k: int | None = Field(default=None, gt=0)  # None: the training's
    val_greedy: bool = False  # a second, greedy pass: validation/greedy_reward and greedy_accuracy
    val_correct_reward: float | None = 1.0  # lowest reward of a correct rollout; None: no validation/accuracy

    @property
    def num_samples_per_step(self) -> int:
        """Rollouts of one step, failures included."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def background(self) -> AsyncRolloutsConfig:
        """Return whether, and how, rollouts are collected while the policy trains."""
        raise NotImplementedError

    @property
    def samples_beside_training(self) -> bool:
        """Return whether the engine samples while the policy trains, for rollouts or for validation."""
        return self.background.enabled or self.val_overlap


class GRPOConfig(RolloutTrainingConfig):
    """Group-relative policy optimization (arXiv 2402.03300) and its relatives."""

    adv_estimator: Annotated[SerializeAsAny[AdvantageEstimatorConfig], registries.ADVANTAGE_ESTIMATORS] = Field(
        default_factory=registries.ADVANTAGE_ESTIMATORS.new
    )
    advantage_clip_low: float | None = None  # lower bound of every advantage; None: none
    advantage_clip_high: float | None = None  # upper bound of every advantage; None: none
    invalid_tool_call_advantage: float | None = None  # advantage of replies with an unreadable tool call
    malformed_thinking_advantage: float | None = None  # advantage of replies with malformed thinking tags
    reward_scaling: RewardScalingConfig = RewardScalingConfig.with_defaults()
    reward_shaping: RewardShapingConfig = RewardShapingConfig.with_defaults()
    overlong_filtering: bool = False  # truncated rollouts: weight 0, still in the baseline
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)  # sequences above it get weight 0

    use_dynamic_sampling: bool = False  # drop groups whose rewards are all equal
    # batches drawn for one step at most; above it the run stops
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    batch_multiplier: float = Field(default=1.0, ge=1)  # prompts drawn at once, relative to num_prompts_per_step

    async_grpo: AsyncRolloutsConfig = AsyncRolloutsConfig.with_defaults()

    @property
    def background(self) -> AsyncRolloutsConfig:
        return self.async_grpo


class DistillationConfig(RolloutTrainingConfig):
    """On-policy distillation (arXiv 2306.13649): the student samples, a teacher says what it would have said."""

    num_generations_per_prompt: int = Field(default=1, gt=0)
    topk_logits_k: int = Field(default=64, gt=0)  # the teacher's most likely tokens that the loss compares
    off_policy: bool = False  # learn from the responses in the training data, in place of the student's samples
    val_teacher: bool = False  # measure the teachers too, once at the start, by the hf engine: for small models
    async_rollouts: AsyncRolloutsConfig = AsyncRolloutsConfig.with_defaults()  # the keys of grpo.async_grpo

    @property
    def background(self) -> AsyncRolloutsConfig:
        return self.async_rollouts


class RolloutRunConfig(Section):
    """Sections that every run with rollouts has."""

    policy: SampledModelConfig
    data: BaseDataConfig  # the datasets, and what they have in common
    env: Annotated[dict[str, SerializeAsAny[EnvironmentConfig]], registries.ENVIRONMENTS] = Field(default_factory=dict)
    scorers: Annotated[dict[str, SerializeAsAny[ScorerConfig]], registries.SCORERS] = Field(default_factory=dict)
    reward_model: RewardModelPlacementConfig = RewardModelPlacementConfig.with_defaults()
    rollout: shared.RolloutBoundsConfig = shared.RolloutBoundsConfig.with_defaults()
    gateway: shared.GatewayConfig = shared.GatewayConfig.with_defaults()
    logger: shared.LoggerConfig = shared.LoggerConfig.with_defaults()
    cluster: shared.ClusterConfig = shared.ClusterConfig.with_defaults()

    @property
    def seed(self) -> int:
        """Return the seed of the prompt order and of every sample."""
        raise NotImplementedError

    @property
    def runner_sections(self) -> dict[str, RolloutRunnerConfig]:
        """Return the entries of `env` that run whole rollouts through the gateway: agents and NeMo Gym stacks."""
        return {name: section for name, section in self.env.items() if isinstance(section, RolloutRunnerConfig)}

    @property
    def policy_table(self) -> tuple[str, tuple[str, ...]]:
        """Return the key whose names `env.<task>.policies` may hold, and these names."""
        return "policies", ()

    @property
    def speakers(self) -> dict[str, tuple[str, ...]]:
        """Return the policies that speak in the rollouts of each task; empty in a run of one policy."""
        return {}

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
    rollout: shared.RolloutConfig = shared.RolloutConfig.with_defaults()
    loss_fn: SerializeAsAny[LossConfig]
    weight_sync: Annotated[SerializeAsAny[shared.WeightSyncConfig], registries.WEIGHT_TRANSPORTS] = Field(
        default_factory=registries.WEIGHT_TRANSPORTS.new
    )
    # checkpoints: whether, when, where, and which are kept
    checkpointing: shared.CheckpointingConfig = shared.CheckpointingConfig.with_defaults()
    teacher: TeacherConfig | None = None  # the teacher of all tasks
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)  # by task name; take precedence over `teacher`

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
    def policy_names(self) -> tuple[str, ...]:
        """Return the names of several policies; one empty name in a run of one policy."""
        return ("",)

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
    loss_fn: Annotated[SerializeAsAny[LossConfig], registries.LOSSES] = Field(default_factory=registries.LOSSES.new)
    # several policies by name: LoRA adapters on one base, each trained on its own rollouts; empty: a single policy
    policies: dict[str, NamedPolicyConfig] = Field(default_factory=dict)
    reward_penalties: RewardPenaltiesConfig = RewardPenaltiesConfig.with_defaults()

    @property
    def algorithm(self) -> GRPOConfig:
        return self.grpo

    @property
    def needs_reference(self) -> bool:
        losses = self.losses.values()
        return any(loss.needs_reference for loss in losses) or self.grpo.adv_estimator.needs_reference

    @property
    def losses(self) -> dict[str, LossConfig]:
        """Return the loss of each policy that is trained, by name; "" is that of a run of one policy."""
        if not self.policies:
            return {"": self.loss_fn}
        return {name: one.loss_fn or self.loss_fn for name, one in self.policies.items() if one.trainable}

    @property
    def policy_names(self) -> tuple[str, ...]:
        return tuple(self.policies) or ("",)

    @property
    def policy_table(self) -> tuple[str, tuple[str, ...]]:
        return "policies", tuple(self.policies)

    @property
    def speakers(self) -> dict[str, tuple[str, ...]]:
        default = tuple(self.policies)[:1]
        return {name: tuple(env.policies) or default for name, env in self.env.items()} if self.policies else {}

    @property
    def min_group_size(self) -> int:
        """Return 1 with opd: a teacher and no reward decides what to learn, so a single rollout suffices."""
        return super().min_group_size if self.grpo.adv_estimator.compares_group else 1


class DistillationRunConfig(TrainingRunConfig):
    """The configuration of `examples/run_distillation.py`."""

    algorithm_key: ClassVar[str] = "distillation"

    distillation: DistillationConfig = DistillationConfig.with_defaults()
    loss_fn: Annotated[SerializeAsAny[LossConfig], registries.DISTILLATION_LOSSES] = Field(
        default_factory=registries.DISTILLATION_LOSSES.new
    )

    @property
    def algorithm(self) -> DistillationConfig:
        return self.distillation

    @property
    def min_group_size(self) -> int:
        """Return 1: rollouts are not compared with each other, so each that did not fail is trained on."""
        return 1
