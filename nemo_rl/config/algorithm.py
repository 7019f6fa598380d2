"""`grpo` and `distillation`: sizes, schedule and validation, and what each has of its own, under NeMo-RL's names."""

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS
from nemo_rl.config.section import Section


class PenaltyTokenIdsConfig(Section):
    unwanted: list[int] = Field(default_factory=list)  # none of them may be sampled
    think_open: int | None = None  # replaces the first of thinking_tags
    think_close: int | None = None  # replaces the second


class RewardPenaltiesConfig(Section):
    """A rollout with such a reply gets the reward 0, unless its own is lower. All off by default."""

    penalize_duplicated_reasoning: bool = False  # a reply whose answer repeats its thinking
    penalize_empty_final_answer: bool = False  # a last reply without answer and without tool call
    penalize_unwanted_tokens: bool = False  # any of token_ids.unwanted in a reply
    penalize_malformed_think_tag: bool = False  # thinking tags that do not open and close once
    token_ids: PenaltyTokenIdsConfig = PenaltyTokenIdsConfig()
    thinking_tags: list[str] = Field(default=["<think>", "</think>"], min_length=2, max_length=2)
    invalid_tool_call_patterns: list[str] = Field(  # of grpo.invalid_tool_call_advantage
        default=["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"], min_length=1
    )

    @property
    def enabled(self) -> tuple[str, ...]:
        """The keys that are on."""
        return tuple(name for name in type(self).model_fields if name.startswith("penalize_") and getattr(self, name))


class RewardScalingConfig(Section):
    """Clamp rewards to the source range, then map it linearly to the target range."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


class RewardShapingConfig(Section):
    """DAPO's penalty for overlong responses (arXiv 2503.14476, equation 13)."""

    enabled: bool = False
    overlong_buffer_length: int = Field(default=128, gt=0)  # tokens before the maximum in which the penalty grows
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    max_response_length: int | None = Field(default=None, gt=0)  # None: policy.generation.max_new_tokens


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


class AsyncRolloutsConfig(Section):
    """Rollouts collected in the background, while the policy trains (AReaL, arXiv 2505.24298)."""

    enabled: bool = False
    max_trajectory_age_steps: int = Field(default=1, ge=0)  # weight updates since a group's oldest token; 0: as if sync
    in_flight_weight_updates: bool = False  # rollouts continue through a refit; else none runs during one
    recompute_kv_cache_after_weight_updates: bool = True  # else running requests keep keys and values of old weights
    max_generation_failures: int = Field(default=10, ge=0)  # groups in a row that fail whole; above it the run stops
    stale_groups: Literal["wait", "drop"] = "wait"  # a group at the age bound that still runs: the trainer waits for it


class RolloutTrainingConfig(Section):
    """Training on rollouts of the policy: how many, for how long, and how it is validated."""

    num_prompts_per_step: int = Field(default=32, gt=0)
    num_generations_per_prompt: int = Field(default=16, gt=0)
    max_rollout_turns: int = Field(default=1, gt=0)
    max_num_epochs: int = Field(default=1, gt=0)
    max_num_steps: int = Field(default=1_000_000, gt=0)
    seed: int = 42

    val_period: int = Field(default=10, ge=0)  # steps; 0: never
    val_at_start: bool = False
    val_at_end: bool = True
    max_val_samples: int | None = Field(default=256, gt=0)  # prompts of each dataset; None: all
    val_batch_size: int = Field(default=256, gt=0)
    val_num_generations_per_prompt: int = Field(default=1, gt=0)
    val_temperature: float | None = Field(default=None, ge=0)  # None: the training temperature
    val_greedy: bool = False  # a second, greedy pass: validation/greedy_accuracy

    @property
    def num_samples_per_step(self) -> int:
        """Rollouts of one step, failures included."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def background(self) -> AsyncRolloutsConfig:
        """Return whether, and how, rollouts are collected while the policy trains."""
        raise NotImplementedError


class GRPOConfig(RolloutTrainingConfig):
    """Group-relative policy optimization (arXiv 2402.03300) and its relatives."""

    adv_estimator: Annotated[SerializeAsAny[AdvantageEstimatorConfig], ADVANTAGE_ESTIMATORS] = Field(
        default_factory=ADVANTAGE_ESTIMATORS.new
    )
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    invalid_tool_call_advantage: float | None = None  # of replies with a call that no parser could read; None: theirs
    malformed_thinking_advantage: float | None = None  # of replies whose thinking tags do not open and close once
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    overlong_filtering: bool = False  # truncated rollouts: weight 0, still in the baseline
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)  # sequences above it get weight 0

    use_dynamic_sampling: bool = False  # drop groups whose rewards are all equal
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    batch_multiplier: float = Field(default=1.0, ge=1)  # prompts drawn at once, relative to num_prompts_per_step

    async_grpo: AsyncRolloutsConfig = AsyncRolloutsConfig()

    @property
    def background(self) -> AsyncRolloutsConfig:
        return self.async_grpo

    @model_validator(mode="before")
    @classmethod
    def _accept_flat_advantage_keys(cls, data: object) -> object:
        """NeMo-RL has these two beside `adv_estimator` and inside it."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        inner = data.get("adv_estimator")
        moved = {k: data.pop(k) for k in ("normalize_rewards", "use_leave_one_out_baseline") if k in data}
        if moved and (inner is None or isinstance(inner, dict)):
            data["adv_estimator"] = {**moved, **(inner or {})}
        return data


class DistillationConfig(RolloutTrainingConfig):
    """On-policy distillation (arXiv 2306.13649): the student samples, a teacher says what it would have said."""

    num_generations_per_prompt: int = Field(default=1, gt=0)
    topk_logits_k: int = Field(default=64, gt=0)  # of the teacher's most likely tokens, those that the loss compares
    off_policy: bool = False  # learn from the responses in the training data, in place of the student's samples
    val_teacher: bool = False  # measure the teachers too, once at the start, by the hf engine: for small models
    async_rollouts: AsyncRolloutsConfig = AsyncRolloutsConfig()  # the keys of grpo.async_grpo

    @property
    def background(self) -> AsyncRolloutsConfig:
        return self.async_rollouts
