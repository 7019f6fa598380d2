"""Base sections of `loss_fn`: what every loss answers, and the keys that all policy-gradient losses share.

Each loss has its own section, check and factory in nemo_rl/losses/. Formulas: docs/losses.md.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.config.kinds import Section


class CrossTokenizerConfig(Section):
    """A teacher whose tokenizer differs from the student's (docs/distillation.md)."""

    enabled: bool = False  # compare distributions over two vocabularies; false: teacher and student share one
    matching: Literal["prefix", "identical"] = "prefix"  # by the bytes that tokens begin with; identical: GOLD and ULD
    unmatched_weight: float = Field(default=1.0, ge=0)  # identical: weight of the sorted L1 distance


class LossConfig(Section):
    """Base of all sections of `loss_fn`; other packages ask a loss through these properties, never by its name."""

    type: str  # "ppo", "distillation", ..., or the dotted path of a loss of one's own

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss, or a KL that it adds to the reward, reads a frozen reference policy."""
        return False

    @property
    def uses_prev_logprobs(self) -> bool:
        """Return whether a batch of several optimizer steps needs `prev_logprobs`; without them lp_prev is lp."""
        return False

    @property
    def tolerates_stale_samples(self) -> bool:
        """Return whether samples of older weights may be trained on."""
        return True

    @property
    def reward_kl(self) -> "PolicyGradientLossConfig | None":
        """Return the KL penalty that advantage estimators subtract from the reward, if there is one."""
        return None

    @property
    def token_matching(self) -> CrossTokenizerConfig | None:
        """Return how tokens of a teacher's own tokenizer are matched; None: it shares the student's."""
        return None


class PolicyGradientLossConfig(LossConfig):
    """Keys of all policy-gradient losses; NeMo-RL's recipes set them whatever the loss is."""

    is_sequence_level: ClassVar[bool] = False  # all tokens of a sequence share one ratio and one sampling weight
    weights_term: ClassVar[bool] = True  # the sampling weights multiply the term; false: the term reads them itself

    reference_policy_kl_penalty: float = Field(default=0.0, ge=0)  # weight of the KL to the reference policy; 0: none
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"  # its estimator
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)  # bound of the log-ratio; None: none
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)  # bound of a token's estimate; None: none
    use_on_policy_kl_approximation: bool = False  # weight it by exp(lp - lp_gen)
    reference_policy_kl_gradient: Literal["score_function", "pathwise", "k2"] = "score_function"  # docs/losses.md
    use_kl_in_reward: bool = False  # subtract it from the reward, not from the loss

    ratio_against: Literal["prev", "generation"] = "prev"  # the log-probs that the ratio divides by: lp_prev, lp_gen
    ratio_clip_min: float = Field(default=0.2, ge=0)  # the ratio is clipped below 1 - this
    ratio_clip_max: float = Field(default=0.2, ge=0)  # the ratio is clipped above 1 + this
    ratio_clip_c: float | None = Field(default=None, gt=1)  # dual clip
    token_level_loss: bool = True  # average over tokens; false: over sequences first
    trajectory_token_divisor: float | None = Field(default=None, gt=0)  # None: each trajectory's number of tokens
    force_on_policy_ratio: bool = False  # take the ratio as 1, with its gradient

    log_ratio_penalty: float = Field(default=0.0, ge=0)  # weight of the squared log-ratio of each token
    off_policy_mask_threshold: float | None = None  # mean lp_gen - lp above which a sequence with A < 0 is dropped
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)  # share of the tokens, by entropy, whose terms count
    entropy_coef: float = Field(default=0.0, ge=0)  # weight of the entropy bonus

    use_importance_sampling_correction: bool = False  # weight policy terms by exp(lp_prev - lp_gen)
    truncated_importance_sampling_type: (  # their truncation
        Literal["tis", "icepop", "seq-mask-tis", "sequence_mask", "sequence_truncate"] | None
    ) = None
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)  # their upper bound
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)  # their lower bound

    positive_example_nll_weight: float = Field(default=0.0, ge=0)  # VAPO

    @property
    def needs_reference(self) -> bool:
        """Return whether a KL to the reference policy has a weight."""
        return self.reference_policy_kl_penalty > 0

    @property
    def uses_prev_logprobs(self) -> bool:
        """Return whether the ratio is against `prev_logprobs`."""
        return not self.force_on_policy_ratio and self.ratio_against == "prev"

    @property
    def tolerates_stale_samples(self) -> bool:
        """Return whether the ratio, or importance weights, correct for the weights that samples come from."""
        return self.use_importance_sampling_correction or self.ratio_against == "generation"

    @property
    def reward_kl(self) -> "PolicyGradientLossConfig | None":
        """Return this section if its KL belongs to the reward."""
        return self if self.use_kl_in_reward and self.reference_policy_kl_penalty > 0 else None
