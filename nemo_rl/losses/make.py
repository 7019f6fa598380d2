"""Losses from their sections: the entries of policy-gradient losses, and those made of a user's own class.

Loads no torch until a loss is made, since entries are imported whenever a configuration is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from nemo_rl import batch as keys
from nemo_rl.config.entry_checks import check_policy_gradient
from nemo_rl.config.kinds import Entry, entry_from_callable
from nemo_rl.config.loss import LossConfig, PolicyGradientLossConfig
from nemo_rl.config.registries import LOSSES

if TYPE_CHECKING:
    import torch

    from nemo_rl.interfaces import LossFn

ConfigT = TypeVar("ConfigT", bound=PolicyGradientLossConfig)


@dataclass(frozen=True, slots=True)
class LossContext:
    """Facts of a run that a loss may need beside its section."""

    is_on_policy: bool = True  # responses are the policy's samples, with log-probs of the engine
    topk: int = 0  # tokens of the teacher's that distillation compares
    student_unmatched: "torch.Tensor | None" = (
        None  # [V] bool: tokens without a counterpart in the teacher's vocabulary
    )


def make_loss(section: LossConfig, context: LossContext | None = None) -> "LossFn":
    return LOSSES.entry(section.type, key="loss_fn.type").make(section, context or LossContext())


def policy_gradient_entry(
    section: type[ConfigT],
    term: Callable[..., "torch.Tensor"],
    *,
    check: Callable[[str, ConfigT, Any], None] | None = None,
    unread: Sequence[str] = (),
) -> Entry[ConfigT]:
    """Return the entry of a policy-gradient loss: all that it has of its own is its section and its `term`.

    `term(tokens, section)` gives the loss of each token before weights, [B, T], of `PolicyTokens`. `unread` are
    shared keys that the term ignores: setting them is refused. Without importing torch, tensors have methods.

    Example: `REINFORCE = policy_gradient_entry(REINFORCEConfig, lambda t, section: -t.advantages * t.current)`
    """

    def check_section(key: str, own: ConfigT, config: Any) -> None:
        check_policy_gradient(key, own, config, unread=unread)
        if check is not None:
            check(key, own, config)

    def make(own: ConfigT, context: LossContext) -> "LossFn":
        from nemo_rl.losses.policy_gradient import PolicyGradientLoss  # loads torch

        return PolicyGradientLoss(own, term)

    return Entry(section, make=make, check=check_section)


class CustomLossConfig(LossConfig):
    """`loss_fn.type: package.module:Name`: a class, or a function that returns a loss, called with `kwargs`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class or function

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss reads the reference's log-probs."""
        return keys.REFERENCE_LOGPROBS in make_loss(self).required_keys


def adapt_loss(key: str, path: str, target: Any) -> Entry[CustomLossConfig]:
    """Return the entry of a user's own class or function; raises ConfigError for `key` if it is neither."""
    from nemo_rl.interfaces import LossFn  # here: most configurations need no protocol

    return entry_from_callable(CustomLossConfig, LossFn, key=key, path=path, target=target)
