"""Routing in a stage of Megatron's: replay of recorded experts, records of its own, and metrics of their balance.

A token goes to the experts that it went to in the engine, or in the policy's log-prob pass, with the live weights of
the router, which so has a gradient.
megatron-core 0.16.1 has a replay of its own, whose instances are global to the process and whose backward pass pops a
queue in the order of the forward passes. Here each router is asked through the same interface, `get_replay_topk`, and
the rows of a micro-batch come back if a layer is recomputed, in whatever order stages compute.
N tokens of a micro-batch in Megatron's order, L layers with experts, E experts, k per token.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.column_arrays import id_dtype
from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.distributed.expert_routers import probabilities
from nemo_rl.errors import PolicyError
from nemo_rl.policy.attention import PackedSequences
from nemo_rl.policy.context_parallel import SlicedSequences
from nemo_rl.policy.expert_routing import RoutingCounts, differs, precede_needed
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.experts import ExpertRouter, find_routers
from nemo_rl.policy.megatron.mixtures import Mixture
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.token_columns import ROUTED_EXPERTS

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Observe = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]


class RouterRoutes:
    """The experts of a layer that tokens of the current micro-batch are sent to; a router's `router_replay`.

    Args:
        replays: tokens go to recorded experts; else the two are only compared.
        observe: is told the used and the live experts, and the recorded ones if there are any: [N, k] each.
    """

    def __init__(self, observe: Observe, *, replays: bool) -> None:
        self.rows: torch.Tensor | None = None  # [N, k] int64, below 0 if missing; None: all tokens are routed live
        self._observe, self._replays = observe, replays

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts, [N, k] each, of [N, E] scores: recorded ones, and live ones of missing rows."""
        assert default_compute_topk is not None
        live_scores, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = None if self.rows is None else torch.where((self.rows >= 0).all(1, keepdim=True), self.rows, live)
        if recorded is None or not self._replays:
            self._observe(live, live, recorded)
            return live_scores, live
        self._observe(recorded, live, recorded)
        return scores.gather(1, recorded), recorded


@dataclass(frozen=True, slots=True)
class RoutedPass:
    """The tokens of a micro-batch's forward pass with gradients."""

    counted: torch.Tensor  # [N] bool: a sampled token depends on it
    is_missing: torch.Tensor  # [N] bool: it has no recorded experts
    is_other: torch.Tensor  # [2, N] bool: in a layer of this stage the used, and the live, experts are not the recorded


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """The experts of a micro-batch's forward pass without gradients."""

    num_tokens: int
    width: int  # T
    pack: PackedSequences | SlicedSequences | None
    layers: dict[int, torch.Tensor] = field(default_factory=dict)  # [N, k] of this stage's, by index


class StageRouting:
    """The routers of a stage, which all must have been made; those of frozen copies of the model are left alone.

    Args:
        stage: whose routers are observed, and replay routes.
        mixture: the experts of the whole model.
        config: whether tokens go to recorded experts, or are only compared with them, and who records.
    """

    def __init__(self, stage: nn.Module, mixture: Mixture, config: RouterReplayConfig) -> None:
        layers = [index for index, has_experts in enumerate(mixture.has_experts) if has_experts]
        self._shape, self._topk, self._config = (len(layers), mixture.num_experts), mixture.topk, config
        self._dtype: torch.dtype = getattr(torch, id_dtype(mixture.num_experts).name)
        self._device = next(stage.parameters()).device
        self._routes: dict[int, RouterRoutes] = {}  # keyed by the index among the layers with experts
        self._passes: list[RoutedPass] = []  # since the metrics were taken
        self._records: list[RecordedPass] = []  # since they were taken
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # load [E] and entropy of these, by layer
        self._is_observing = False
        for router in find_routers(stage):
            assert router.layer_number is not None
            assert isinstance(router, ExpertRouter)
            self._add(router, layers.index(router.layer_number - 1))

    def begin(
        self,
        needed: torch.Tensor,
        columns: Mapping[str, torch.Tensor] | None,
        pack: PackedSequences | SlicedSequences | None,
    ) -> None:
        """Set the rows of the next forward pass, from the columns [B, T, ...] of its micro-batch.

        `needed` [B, T] are the tokens whose log-probs are read. Raises PolicyError for routes of another model.
        """
        counted = _lay_out(precede_needed(needed), pack)
        recorded = None if columns is None or not self._config.enabled else columns.get(ROUTED_EXPERTS)
        rows = None if recorded is None else self._read(recorded, pack)
        self._set({index: None if rows is None else rows[:, index] for index in self._routes})
        self._is_observing = torch.is_grad_enabled()
        if self._is_observing:
            is_missing = torch.ones_like(counted) if rows is None else (rows < 0).flatten(1).any(1)
            is_other = torch.zeros(2, len(counted), dtype=torch.bool, device=counted.device)
            self._passes.append(RoutedPass(counted, is_missing, is_other))
        elif self._config.records_own:
            self._records.append(RecordedPass(len(counted), needed.shape[1], pack))

    def take_records(self) -> list[torch.Tensor]:
        """Return the experts of each pass without gradients since the last call, as columns [B, T, L, k] on the CPU.

        Empty unless the policy records its own. All ranks call it: each stage knows the experts of its own layers.
        """
        records, self._records = self._records, []
        return [self._to_column(record) for record in records]

    def _to_column(self, record: RecordedPass) -> torch.Tensor:
        ids = torch.zeros(record.num_tokens, self._shape[0], self._topk, dtype=torch.int32, device=self._device)
        for index, layer in record.layers.items():
            ids[:, index] = layer
        dist.all_reduce(ids, group=parallel.pipeline_group())
        return _spread(ids, record.width, record.pack).cpu().to(self._dtype)

    def recall(self) -> AbstractContextManager[None]:
        """Return a context with the rows of this call, to recompute a layer."""
        return self._restored({index: routes.rows for index, routes in self._routes.items()})

    def take_metrics(self, layout: RankLayout) -> dict[str, float]:
        """Return the metrics of all passes with gradients since the last call, over all ranks; all ranks call it."""
        own = self._take_counts() if self._passes else None
        given = [part for part in layout.all_gather_shards(own) if part is not None and part.tokens[0] > 0]
        return reduce(add, given).metrics(with_routes=self._config.enabled) if given else {}

    def _take_counts(self) -> RoutingCounts:
        """Return the counts of all stages on the CPU; they have computed the same micro-batches, in the same order."""
        is_other = torch.cat([one.is_other for one in self._passes], dim=1).to(torch.uint8)
        counted = torch.cat([one.counted for one in self._passes])
        is_missing = torch.cat([one.is_missing for one in self._passes])
        load = torch.zeros(self._shape, dtype=torch.float64, device=counted.device)
        entropy = load.new_zeros(self._shape[0])
        for index, (own_load, own_entropy) in self._sums.items():
            load[index], entropy[index] = own_load, own_entropy
        dist.all_reduce(is_other, dist.ReduceOp.MAX, group=parallel.pipeline_group())
        for sums in (load, entropy):
            dist.all_reduce(sums, group=parallel.pipeline_group())
        others = (is_other.bool() & counted).sum(1)
        tokens = torch.stack([counted.sum(), (is_missing & counted).sum(), *others]).double()
        self._passes, self._sums = [], {}
        return RoutingCounts(load, entropy, tokens).cpu()

    def _add(self, router: ExpertRouter, index: int) -> None:
        def observe(used: torch.Tensor, live: torch.Tensor, recorded: torch.Tensor | None) -> None:
            if self._is_observing:
                self._observe(router, index, used, live, recorded)
            elif self._records:
                self._records[-1].layers[index] = used.to(self._dtype)

        self._routes[index] = routes = RouterRoutes(observe, replays=self._config.replays)
        router.router_replay = routes  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def _observe(
        self, router: ExpertRouter, index: int, used: torch.Tensor, live: torch.Tensor, recorded: torch.Tensor | None
    ) -> None:
        assert router.logits is not None
        this = self._passes[-1]
        weight = this.counted.double()
        load = weight.new_zeros(self._shape[1]).index_add_(0, used.flatten(), weight.repeat_interleave(used.shape[1]))
        distribution = probabilities(router.logits.detach(), is_sigmoid=router.is_sigmoid)
        entropy = (torch.special.entr(distribution).sum(-1) * weight).sum()
        if index in self._sums:
            load, entropy = load + self._sums[index][0], entropy + self._sums[index][1]
        self._sums[index] = load, entropy
        if recorded is not None:
            this.is_other.logical_or_(torch.stack([differs(used, recorded), differs(live, recorded)]))

    def _read(self, recorded: torch.Tensor, pack: PackedSequences | SlicedSequences | None) -> torch.Tensor:
        """Return routes [N, L, k] int64, below 0 if missing."""
        own = self._shape[0], self._topk
        if recorded.shape[2:] != own:
            given = tuple(recorded.shape[2:])
            raise PolicyError(f"policy.router_replay: the engine's routes are of {given} layers and experts, not {own}")
        missing = -1 if recorded.dtype.is_signed else torch.iinfo(recorded.dtype).max
        rows = _lay_out(recorded.long(), pack)  # torch indexes few unsigned types
        return rows.masked_fill(rows == missing, -1)

    def _set(self, rows: Mapping[int, torch.Tensor | None]) -> None:
        for index, routes in self._routes.items():
            routes.rows = rows[index]

    @contextmanager
    def _restored(self, rows: Mapping[int, torch.Tensor | None]) -> Iterator[None]:
        now, was_observing = {index: routes.rows for index, routes in self._routes.items()}, self._is_observing
        self._set(rows)
        self._is_observing = False
        try:
            yield
        finally:
            self._set(now)
            self._is_observing = was_observing


def _spread(values: torch.Tensor, width: int, pack: PackedSequences | SlicedSequences | None) -> torch.Tensor:
    """Return values [N, ...] in Megatron's order as a column [B, T, ...], with any value in padding."""
    return values.unflatten(0, (width, -1)).transpose(0, 1) if pack is None else pack.spread(values)


def _lay_out(column: torch.Tensor, pack: PackedSequences | SlicedSequences | None) -> torch.Tensor:
    """Return a column [B, T, ...] in Megatron's order, time first: [N, ...]."""
    return column.transpose(0, 1).flatten(0, 1) if pack is None else pack.lay_out(column)[0]
