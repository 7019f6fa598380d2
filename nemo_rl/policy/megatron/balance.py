"""The balance of experts on a stage of Megatron's: the losses and biases of `RouterBalance` at Megatron's routers.

Tokens are in Megatron's order: time first, then samples. Stages work on several micro-batches at a time, so what a
router needs of one is set for its forward pass, and once more if a layer is recomputed.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.policy.fsdp2.balance import RouterBalance
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.experts import find_routers

LOSSES = ("router_balance", "router_z")


def routed_tokens(lengths: Sequence[int], width: int, *, is_packed: bool, is_empty: bool) -> torch.Tensor | None:
    """Return which tokens that the routers see are samples', [N] bool; None: all, as of packed samples.

    Example: lengths 1 and 2 of width 2: (True, True, False, True).
    """
    if is_empty:
        return torch.zeros(sum(lengths) if is_packed else len(lengths) * width, dtype=torch.bool)
    if is_packed:
        return None
    return (torch.arange(width).unsqueeze(1) < torch.tensor(lengths)).flatten()


class StageBalance(RouterBalance):
    """`RouterBalance` of a stage; one without routers takes part in what all ranks do together."""

    def recall(self) -> AbstractContextManager[None]:
        """Return a context in which routers know of the micro-batch of this call, to recompute a layer."""
        return self._restored((self._mask, self._weight, self._shares))

    def take_losses(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of the losses of all stages since the last call; all ranks call it together."""
        if not (self._section.aux_loss_coeff or self._section.z_loss_coeff):
            return {}
        own = super().take_losses()
        zero = torch.zeros((), device=next(iter(own.values())).device if own else parallel.device())
        values = torch.stack([own.get(name, zero) for name in LOSSES])
        dist.all_reduce(values, group=parallel.pipeline_group())
        return dict(zip(LOSSES, values, strict=True))

    @contextmanager
    def _restored(self, state: tuple[Any, ...]) -> Iterator[None]:
        now = (self._mask, self._weight, self._shares), self._is_counting
        (self._mask, self._weight, self._shares), self._is_counting = state, False
        try:
            yield
        finally:
            (self._mask, self._weight, self._shares), self._is_counting = now

    def _observe(self, index: int, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Attach the losses to one router's weights of experts, whose output is those and the choices: [N, E] each."""
        probs, choices = output
        if self._weight == 0.0:
            return None
        ids = choices.nonzero()[:, 1].view(len(choices), -1)
        seen = super()._observe(index, (self._routers[index].logits, probs, ids))
        return None if seen is None else (seen[1], choices)

    def _loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._loss(*args, **kwargs) / self._layout.num_shards  # Megatron sums gradients over ranks

    def _find_routers(self, model: torch.nn.Module) -> list[Any]:
        return [*find_routers(model)]

    def _is_sigmoid(self, router: torch.nn.Module) -> bool:
        return router.is_sigmoid  # type: ignore[return-value]

    def _bias(self, router: torch.nn.Module) -> torch.Tensor | None:
        return router.expert_bias  # type: ignore[return-value]
