"""Routing in the policy: replay of the experts that the engine took, and metrics of their balance.

In bfloat16 a trainer sends some tokens to other experts than the engine did, which is the largest part of the
difference of their log-probs. Under replay the recorded experts compute a token, weighted by the live scores of the
router, which so keeps its gradient (Rollout Routing Replay, arXiv 2510.11370). It acts on routers alone, by forward
hooks on the modules that transformers calls `mlp.gate`: experts may be sharded in any way, and activation checkpointing
runs the hooks again while the rows of its micro-batch are still set.
N tokens of a micro-batch as the model computes them, L layers with experts, E experts, k per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import nn

from nemo_rl.column_arrays import id_dtype
from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.distributed.expert_routers import RouterOutput, find_routers, kind_of, probabilities
from nemo_rl.errors import PolicyError
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.token_layout import TokenLayout
from nemo_rl.token_columns import ROUTED_EXPERTS

LOAD_PERCENTILES = (0, 10, 50, 90)  # percentiles of the experts' load, in metrics


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """Sums over the tokens that a sampled token depends on; those of micro-batches and ranks add up."""

    load: torch.Tensor  # [L, E] float64: tokens that an expert computed
    entropy: torch.Tensor  # [L] float64: of the routers' distributions, in nats
    tokens: torch.Tensor  # [4] float64: all, without a route, of other experts than recorded, of others if routed live

    def __add__(self, other: "RoutingCounts") -> "RoutingCounts":
        return RoutingCounts(self.load + other.load, self.entropy + other.entropy, self.tokens + other.tokens)

    def cpu(self) -> "RoutingCounts":
        """Return the counts on the CPU; waits for the device."""
        return RoutingCounts(self.load.cpu(), self.entropy.cpu(), self.tokens.cpu())

    def metrics(self, *, with_routes: bool) -> dict[str, float]:
        """Return the metrics `moe/...` (metric_names.py) of at least one token."""
        count, missing, others, live_others = self.tokens.tolist()
        over_mean = (self.load / self.load.mean(1, keepdim=True)).flatten()
        percentiles = over_mean.quantile(over_mean.new_tensor(LOAD_PERCENTILES) / 100).tolist()
        balance = {
            "moe/load_max_over_mean": float(over_mean.max()),
            **{f"moe/load_p{n}_over_mean": value for n, value in zip(LOAD_PERCENTILES, percentiles, strict=True)},
            "moe/unused_experts": float((self.load == 0).sum()),
            "moe/router_entropy": float(self.entropy.mean()) / count,
        }
        if not with_routes:
            return balance
        replay = {"missing_routes": missing, "other_experts": others, "live_other_experts": live_others}
        return balance | {f"moe/{name}": value / count for name, value in replay.items()}


class ExpertRouting:
    """Observes the routers of a model in passes with gradients, and makes them replay routes.

    Args:
        model: a mixture of experts whose routers `find_routers` knows.
        config: whether tokens go to recorded experts, or are only compared with them.
    """

    def __init__(self, model: nn.Module, config: RouterReplayConfig) -> None:
        routers = find_routers(model)
        self._shape = len(routers), max(router.num_experts for router in routers)
        self._config = config
        self._routes: torch.Tensor | None = None  # [N, L, k] int64, below 0 if missing
        self._counted: torch.Tensor | None = None  # [N] bool
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # load [E], entropy of this micro-batch
        self._is_other: torch.Tensor | None = None  # [2, N] bool: used and live experts that differ from the recorded
        self._totals: RoutingCounts | None = None  # since the metrics were taken
        self._layout: TokenLayout | None = None
        self._live: dict[int, torch.Tensor] = {}  # [N, k] by layer, of a pass that records
        for index, router in enumerate(routers):
            router.register_forward_hook(torch.compiler.disable(partial(self._route, index)))

    def begin(self, needed: torch.Tensor, columns: Mapping[str, torch.Tensor] | None, layout: TokenLayout) -> None:
        """Set the rows of the next forward pass, which are valid until the next call.

        `needed` [B, T] are the tokens whose log-probs are read. Tokens without a route are routed live. Raises
        PolicyError for routes of another model.
        """
        self._finish()
        self._layout, self._live = layout, {}
        self._counted = layout.lay_out(precede_needed(needed)).flatten()
        self._routes = None
        if self._config.enabled and columns is not None and ROUTED_EXPERTS in columns:
            recorded = layout.lay_out(columns[ROUTED_EXPERTS]).flatten(0, 1)
            if recorded.shape[1] != self._shape[0]:
                problem = f"the engine recorded experts of {recorded.shape[1]} layers, the policy has {self._shape[0]}"
                raise PolicyError(f"policy.router_replay: {problem}")
            routes = recorded.long()
            self._routes = routes.masked_fill(routes >= self._shape[1], -1)  # the missing value, or another model's

    def take_live(self) -> torch.Tensor | None:
        """Return the experts of the last pass without gradients as a column [B, T, L, k]; None if none are recorded."""
        if not self._live or self._layout is None:
            return None
        layers = torch.stack([self._live[index] for index in range(self._shape[0])], dim=1)
        self._live = {}
        dtype = getattr(torch, id_dtype(self._shape[1]).name)
        return self._layout.spread(layers.int()).to(dtype)  # torch moves no rows of its larger unsigned types

    def take_metrics(self, layout: RankLayout) -> dict[str, float]:
        """Return the metrics of all passes with gradients since the last call, over all ranks; all ranks call it."""
        self._finish()
        own, self._totals = self._totals, None
        parts = layout.all_gather_shards(None if own is None else own.cpu())
        given = [part for part in parts if part is not None and part.tokens[0] > 0]
        return reduce(add, given).metrics(with_routes=self._config.enabled) if given else {}

    def _route(self, index: int, router: nn.Module, inputs: Any, output: RouterOutput) -> RouterOutput:
        logits, scores, live = output
        if self._counted is None:  # a pass that was not announced
            return output
        ids, recorded = live, None
        if self._routes is not None:
            given = self._routes[:, index]
            if given.shape != live.shape:
                problem = f"the engine recorded {given.shape[1]} experts per token, the policy uses {live.shape[1]}"
                raise PolicyError(f"policy.router_replay: {problem}")
            recorded = torch.where((given >= 0).all(-1, keepdim=True), given, live)
        if recorded is not None and self._config.replays:
            ids, scores = recorded, kind_of(router).scores(router, logits, recorded).to(scores.dtype)
        if torch.is_grad_enabled():
            self._observe(index, router, logits.detach(), live, ids, recorded)
        elif self._config.records_own:
            self._live[index] = ids
        return logits, scores, ids

    @torch.no_grad()
    def _observe(
        self,
        index: int,
        router: nn.Module,
        logits: torch.Tensor,
        live: torch.Tensor,
        ids: torch.Tensor,
        recorded: torch.Tensor | None,
    ) -> None:
        """Keep what a layer did; the recomputation of a layer gives the same once more."""
        assert self._counted is not None
        weight = self._counted.double()
        load = weight.new_zeros(logits.shape[1]).index_add_(0, ids.flatten(), weight.repeat_interleave(ids.shape[1]))
        distribution = probabilities(logits, is_sigmoid=kind_of(router).is_sigmoid)
        entropy = torch.special.entr(distribution).sum(-1)
        self._layers[index] = load, (entropy * weight).sum()
        if recorded is not None:
            others = torch.stack([differs(ids, recorded), differs(live, recorded)])
            self._is_other = others if self._is_other is None else self._is_other | others

    def _finish(self) -> None:
        """Add the counts of the last pass with gradients to the totals."""
        if not self._layers or self._counted is None:
            return
        load, entropy = zip(*(self._layers[index] for index in range(self._shape[0])), strict=True)
        tokens = torch.zeros(4, dtype=torch.float64, device=self._counted.device)
        tokens[0] = self._counted.sum()
        if self._routes is None or self._is_other is None:
            tokens[1] = tokens[0]
        else:
            tokens[1] = ((self._routes < 0).flatten(1).any(1) & self._counted).sum()
            tokens[2:] = (self._is_other & self._counted).sum(1)
        counts = RoutingCounts(torch.stack(load), torch.stack(entropy), tokens)
        self._totals = counts if self._totals is None else self._totals + counts
        self._layers, self._is_other = {}, None


def precede_needed(needed: torch.Tensor) -> torch.Tensor:
    """Return which tokens [B, T] precede one of the `needed` tokens [B, T] of their row."""
    return needed.flip(1).cumsum(1).flip(1) - needed.long() > 0


def differs(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return which tokens [N] have other experts, in whatever order: [N, k] each."""
    return (ids.sort(-1).values != others.sort(-1).values).any(-1)


def make_routing(model: nn.Module, config: RouterReplayConfig) -> ExpertRouting | None:
    """Return the routing of a model that is trained; None for one without routers of a known kind."""
    return ExpertRouting(model, config) if find_routers(model) else None
