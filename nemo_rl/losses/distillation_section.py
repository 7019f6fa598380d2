"""The section and check of `loss_fn.type: distillation`; the losses are in divergences.py."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.loss import CrossTokenizerConfig, LossConfig
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.errors import ConfigError


class DistillationLossConfig(LossConfig):
    """A divergence of the student's next-token distributions from the teacher's, over its most likely tokens."""

    type: str = "distillation"
    # forward: KL(teacher || student), reverse: KL(student || teacher), mixed: both
    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)  # mixed: weight of forward; reverse has the rest
    zero_outside_topk: bool = False  # the teacher gives no probability to other tokens; else both are renormalised
    cross_tokenizer: CrossTokenizerConfig = CrossTokenizerConfig.with_defaults()

    @property
    def forward_weight(self) -> float:
        """Return the weight of the forward divergence; the reverse one has the rest."""
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]

    @property
    def token_matching(self) -> CrossTokenizerConfig | None:
        """Return how tokens of a teacher's own tokenizer are matched, if that is enabled."""
        return self.cross_tokenizer if self.cross_tokenizer.enabled else None


def check_distillation_loss(key: str, section: DistillationLossConfig, config: Any) -> None:
    """Raise ConfigError for options that exclude each other, and without teachers to compare with."""
    if not isinstance(config, DistillationRunConfig):
        raise ConfigError(f"{key}.type", section.type, "compares with a teacher: for examples/run_distillation.py only")
    if section.cross_tokenizer.enabled and section.zero_outside_topk:
        raise ConfigError(
            f"{key}.zero_outside_topk",
            True,
            f"{key}.cross_tokenizer compares probabilities as they are; allowed: false",
        )


DISTILLATION = Entry(
    DistillationLossConfig,
    make=factory_at("nemo_rl.losses.divergences:make_distillation_loss"),
    check=check_distillation_loss,
)
