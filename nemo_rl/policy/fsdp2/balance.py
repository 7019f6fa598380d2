"""The balance of a mixture's experts under FSDP2: losses of the routers, and a bias per expert that follows its load.

E experts, k choices per token, N tokens that all ranks route together in a micro-batch, padding excluded.
Hooks on the routers see what a layer chose, whether its experts are here or on other ranks. They attach the losses'
gradients to the router's scores, so that they flow in the layer's own backward pass, recomputed activations included.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.config.moe import MoEConfig
from nemo_rl.distributed.expert_routers import find_routers, kind_of, probabilities
from nemo_rl.errors import ConfigError
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout, context_group

BIAS = "e_score_correction_bias"  # DeepSeek-V3's buffer, added to the scores that choose


def routed_tokens(
    lengths: Sequence[int], width: int, *, is_packed: bool, is_empty: bool, device: torch.device
) -> torch.Tensor | None:
    """Return which tokens that the routers see of rows [B, width] are samples', [N] bool; None: all.

    Packed rows have no padding. The tokens of an empty micro-batch, which keeps a rank in step, are no sample's.
    """
    if is_empty:
        return torch.zeros(sum(lengths) if is_packed else len(lengths) * width, dtype=torch.bool, device=device)
    if is_packed:
        return None
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).flatten().to(device)


def freeze_routers(model: nn.Module) -> None:
    """Train no router, of whichever kind: the module beside `experts` (`policy.moe.freeze_router`).

    Raises:
        ConfigError: the model has none.
    """
    blocks = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    routers = [getattr(block, "gate", None) or getattr(block, "router", None) for block in blocks]
    for router in routers:
        if isinstance(router, nn.Module):
            router.requires_grad_(False)
    if not routers:
        raise ConfigError("policy.moe.freeze_router", True, f"{type(model).__name__} has no router; allowed: false")


class RouterBalance:
    """The balance losses of one rank's policy, and its experts' biases.

    Balance loss of a layer (arXiv 2101.03961, section 2.2): E sum_e f_e P_e, with f_e the share of the k N choices that
    expert e has and P_e its mean probability (of DeepSeek-V3: its share of the sigmoid scores). f_e has no gradient.
    z-loss (arXiv 2202.08906, equation 5): mean of logsumexp(logits)^2. Both are summed over the layers. A micro-batch
    counts by its share of the optimizer step's tokens; with several, f_e is each micro-batch's own.

    Bias (arXiv 2408.15664): after an optimizer step, bias_e += rate sign(mean load - load of e), over all its tokens.

    Example: 4 experts, k = 1, all tokens to expert 0 with probability 0.7: the balance loss is 4 * 1 * 0.7 = 2.8.

    Args:
        model: gets a hook per router; a hook that replaces choices must be there before.
        group: of the ranks that share the tokens of a step; None for one.
    """

    def __init__(
        self,
        model: nn.Module,
        section: MoEConfig,
        *,
        layout: RankLayout = SINGLE_RANK,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._section, self._layout, self._group = section, layout, group
        self._routers: list[Any] = self._find_routers(model)
        self._loads: dict[int, torch.Tensor] = {}  # choices of each expert on this rank since the last step, [E]
        self._shares: dict[int, torch.Tensor] = {}  # choices of each expert on all ranks in this micro-batch, [E]
        self._losses: dict[str, torch.Tensor] = {}  # this rank's part since the last step
        self._mask: torch.Tensor | None = None
        self._weight = 0.0  # the micro-batch's; 0 outside of one
        self._is_counting = False
        for index, router in enumerate(self._routers):
            observe = torch.compiler.disable(partial(self._observe, index))
            router.register_forward_hook(lambda _, __, output, observe=observe: observe(output))

    @classmethod
    def of(cls, model: nn.Module, section: MoEConfig, **where: Any) -> "RouterBalance | None":
        """Return the balance of a model with the arguments of the class; None if nothing balances it.

        Raises ConfigError for a model without a router.
        """
        if section.balances and not find_routers(model):
            raise ConfigError("policy.moe", section.model_dump(), f"{type(model).__name__} has no router")
        return cls(model, section, **where) if section.balances else None

    def weights(self, lengths: Sequence[Sequence[int]]) -> list[float]:
        """Return each micro-batch's share of the step's tokens over all ranks, from this rank's lengths in each."""
        own = [sum(part) for part in lengths]
        sums = [sum(counts) for counts in zip(*self._layout.all_gather_data_parallel(own), strict=True)]
        return [count / max(sum(sums), 1) for count in sums]

    @contextmanager
    def micro_batch(self, mask: torch.Tensor | None, weight: float) -> Iterator[None]:
        """Return a context around the forward and backward passes of a micro-batch.

        `mask` [N] bool tells which of the tokens that the routers see count; None: all. `weight` is one of `weights`.
        """
        self._mask, self._weight, self._is_counting = mask, weight, True
        self._shares = {}
        try:
            yield
        finally:
            self._mask, self._weight, self._is_counting = None, 0.0, False

    def end_forward(self) -> None:
        """Count no choices until the next micro-batch: the backward pass may run the layers once more."""
        self._is_counting = False

    def take_losses(self) -> dict[str, torch.Tensor]:
        """Return the parts of the losses of this rank's samples, before their coefficients, since the last call."""
        losses, self._losses = self._losses, {}
        if self._layout.context_parallel_size > 1:  # ranks with other tokens of these samples
            for name in sorted(losses):
                dist.all_reduce(losses[name], group=context_group(self._layout))
        return losses

    @torch.no_grad()
    def end_step(self, *, is_taken: bool) -> None:
        """Move the biases by the loads of the step, if it was taken, and forget the loads."""
        if is_taken and self._section.bias_update_rate and self._routers:
            loads = torch.stack([self._loads[index] for index in range(len(self._routers))]).double()
            if self._group is not None:
                dist.all_reduce(loads, group=self._group)
            signs = torch.sign(loads.mean(dim=1, keepdim=True) - loads)
            for router, direction in zip(self._routers, signs, strict=True):
                bias = self._bias(router)
                assert bias is not None
                bias += self._section.bias_update_rate * direction.to(bias.dtype)
        self._loads.clear()

    def _observe(self, index: int, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Attach the losses to the scores of one router, whose output is (logits [n, E], scores [n, k], ids [n, k])."""
        if self._weight == 0.0:
            return None
        logits, scores, ids = output
        if self._mask is not None:
            logits, ids = logits[self._mask], ids[self._mask]
        if self._is_counting:
            self._count(index, torch.bincount(ids.flatten(), minlength=logits.shape[1]))
        if not torch.is_grad_enabled() or not (self._section.aux_loss_coeff or self._section.z_loss_coeff):
            return None
        loss = self._loss(self._routers[index], logits.float(), self._shares[index], k=ids.shape[1])
        return output[0], _WithLoss.apply(scores, loss), output[2]  # type: ignore[return-value]

    def _count(self, index: int, counts: torch.Tensor) -> None:
        self._loads[index] = self._loads[index] + counts if index in self._loads else counts
        if self._group is not None and (self._section.aux_loss_coeff or self._section.z_loss_coeff):
            counts = counts.clone()
            dist.all_reduce(counts, group=self._group)
        self._shares[index] = counts

    def _loss(self, router: nn.Module, logits: torch.Tensor, counts: torch.Tensor, *, k: int) -> torch.Tensor:
        """Return this rank's part of the losses of a layer; `counts` [E] are those of all ranks."""
        num_tokens = counts.sum() / k
        share = counts / counts.sum()
        distribution = probabilities(logits, is_sigmoid=self._is_sigmoid(router))
        balance = len(counts) * (share * distribution.sum(dim=0)).sum() / num_tokens
        z = logits.logsumexp(dim=-1).square().sum() / num_tokens
        if self._is_counting:
            self._add(router_balance=balance, router_z=z)
        weighted = self._section.aux_loss_coeff * balance + self._section.z_loss_coeff * z
        return weighted * self._weight * self._layout.num_shards  # FSDP2 averages gradients over ranks

    def _find_routers(self, model: nn.Module) -> list[Any]:
        """Return the model's routers in the order of its layers."""
        return find_routers(model)

    def _is_sigmoid(self, router: nn.Module) -> bool:
        return kind_of(router).is_sigmoid

    def _bias(self, router: nn.Module) -> torch.Tensor | None:
        """Return the router's bias per expert; None for one that has none."""
        return dict(router.named_buffers(recurse=False)).get(BIAS)

    def _add(self, **losses: torch.Tensor) -> None:
        for name, loss in losses.items():
            value = loss.detach() * self._weight
            self._losses[name] = self._losses[name] + value if name in self._losses else value


class _WithLoss(torch.autograd.Function):
    """The scores themselves; in the backward pass the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.loss = loss.dtype, loss.device
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = ctx.loss
        return gradients[0], torch.ones((), dtype=dtype, device=device)
