"""`loss_fn`: policy-gradient losses, and that of distillation, under NeMo-RL's names. Formulas: docs/losses.md."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.section import Section


class LossConfig(Section):
    reference_policy_kl_penalty: float = Field(default=0.0, ge=0)
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    use_on_policy_kl_approximation: bool = False
    use_kl_in_reward: bool = False

    ratio_clip_min: float = Field(default=0.2, ge=0)
    ratio_clip_max: float = Field(default=0.2, ge=0)
    ratio_clip_c: float | None = Field(default=None, gt=1)  # dual clip
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False  # GSPO
    use_cispo: bool = False
    disable_ppo_ratio: bool = False  # REINFORCE, RLOO
    force_on_policy_ratio: bool = False

    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)

    positive_example_nll_weight: float = Field(default=0.0, ge=0)  # VAPO


class CrossTokenizerConfig(Section):
    """A teacher whose tokens are others than the student's (docs/cross_tokenizer.md)."""

    enabled: bool = False
    matching: Literal["prefix", "identical"] = "prefix"  # by the bytes that tokens begin with; identical: GOLD and ULD
    unmatched_weight: float = Field(default=1.0, ge=0)  # identical: of the sorted L1 distance beside the divergence


class DistillationLossConfig(Section):
    """A divergence of the student's next-token distributions from the teacher's, over its most likely tokens."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)  # mixed: of forward; reverse has the rest
    zero_outside_topk: bool = False  # the teacher gives no probability to other tokens; else both are renormalised
    cross_tokenizer: CrossTokenizerConfig = CrossTokenizerConfig()
