"""Replay of recorded experts at Megatron's routers (`policy.router_replay`).

A token goes to the experts that it went to in the engine, with the live weights of the router, which so has a gradient.
megatron-core 0.16.1 has a replay of its own, whose instances are global to the process and whose backward pass pops a
queue in the order of the forward passes. Here each router is asked through the same interface, `get_replay_topk`, and
the rows of a micro-batch come back where a layer is recomputed, in whatever order stages compute.
N tokens of a micro-batch in Megatron's order, L layers with experts, k experts per token.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from nemo_rl.errors import PolicyError
from nemo_rl.policy.attention import PackedSequences
from nemo_rl.policy.megatron.experts import find_routers
from nemo_rl.policy.megatron.mixtures import Mixture
from nemo_rl.token_columns import ROUTED_EXPERTS

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RecordedRoutes:
    """The experts of a layer that tokens of the current micro-batch are sent to; a router's `router_replay`."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None  # [N, k] int64, below 0 where missing; None: all tokens are routed live

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
        if self.rows is None:
            return live_scores, live
        ids = torch.where((self.rows >= 0).all(1, keepdim=True), self.rows, live)
        return scores.gather(1, ids), ids


class StageReplay:
    """Replay at all routers of a stage.

    Args:
        stage: its routers must have been made; frozen copies of the model are not replayed.
        mixture: the experts of the whole model.
    """

    def __init__(self, stage: nn.Module, mixture: Mixture) -> None:
        layers = [index for index, has_experts in enumerate(mixture.has_experts) if has_experts]
        self._num_layers, self._topk = len(layers), mixture.topk
        self._routes: dict[int, RecordedRoutes] = {}  # keyed by the index among the layers with experts
        for router in find_routers(stage):
            assert router.layer_number is not None
            routes = self._routes[layers.index(router.layer_number - 1)] = RecordedRoutes()
            router.router_replay = routes  # pyright: ignore[reportAttributeAccessIssue]

    def begin(self, columns: Mapping[str, torch.Tensor] | None, pack: PackedSequences | None) -> None:
        """Set the rows of the next forward pass, from the columns [B, T, ...] of its micro-batch.

        Raises PolicyError for routes of another model.
        """
        recorded = None if columns is None else columns.get(ROUTED_EXPERTS)
        if recorded is None:
            self._set(dict.fromkeys(self._routes))
            return
        if recorded.shape[2:] != (self._num_layers, self._topk):
            given, own = tuple(recorded.shape[2:]), (self._num_layers, self._topk)
            raise PolicyError(f"policy.router_replay: the engine's routes are of {given} layers and experts, not {own}")
        missing = -1 if recorded.dtype.is_signed else torch.iinfo(recorded.dtype).max
        rows = recorded.long()  # torch indexes few unsigned types
        rows = rows.transpose(0, 1).flatten(0, 1) if pack is None else rows[pack.is_not_padding]
        rows = rows.masked_fill(rows == missing, -1)
        self._set({index: rows[:, index] for index in self._routes})

    def recall(self) -> AbstractContextManager[None]:
        """Return a context with the rows of this call, to recompute a layer."""
        return self._restored(self._rows())

    def _rows(self) -> dict[int, Any]:
        return {index: routes.rows for index, routes in self._routes.items()}

    def _set(self, rows: Mapping[int, torch.Tensor | None]) -> None:
        for index, routes in self._routes.items():
            routes.rows = rows[index]

    @contextmanager
    def _restored(self, rows: Mapping[int, torch.Tensor | None]) -> Iterator[None]:
        now = self._rows()
        self._set(rows)
        try:
            yield
        finally:
            self._set(now)
