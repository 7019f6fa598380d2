"""The experts that a CPU engine routes tokens to, one row per slot of its KV cache.

vLLM 0.32 returns routes itself only from its newer model runner, which needs Triton (`enable_return_routed_experts`).
Here each router's capture hook leaves the ids of a forward pass, and the pass's slot mapping says whose they are. A row
lives exactly as long as the keys and values that were computed with it: chunked prefill, prefix-cache hits, preemption
and a cache that is kept through an update need no case of their own.
S slots, L layers with experts, k experts per token.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nemo_rl.column_arrays import id_dtype, missing_value
from nemo_rl.generation.vllm.worker import expert_layers


class RouteTable:
    """Records the routes of a model runner; a request is known by the name that the front end gave it.

    Memory: S * L * k bytes for up to 255 experts, and the rows of finished requests that were not taken yet. The front
    end takes or drops every request, so these stay as few as its answers in flight.
    """

    def __init__(self, runner: Any) -> None:
        """Start to record; raises ValueError for a model whose routes cannot be kept by slot."""
        layers = expert_layers(runner.get_model())
        routers = [layer.router for layer in layers]
        if not routers or not all(isinstance(router, BaseRouter) for router in routers):
            raise ValueError("the model has no experts whose router can be observed")
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            raise ValueError("some layers keep keys and values for a part of the context only")
        dtype = id_dtype(max(router.global_num_experts for router in routers))
        shape = runner.kv_cache_config.num_blocks, specs[0].block_size, len(layers), routers[0].top_k
        self._blocks = np.full(shape, missing_value(dtype), dtype)  # [blocks, slots of a block, L, k]
        self._slots = self._blocks.reshape(-1, *shape[2:])  # the same memory, [S, L, k]
        self._step: list[torch.Tensor | None] = [None] * len(layers)  # the last forward pass's: [tokens, k] int32
        self._finished: dict[str, np.ndarray] = {}  # whose blocks may have been written again
        self._settled: set[str] = set()  # vLLM's names of requests that were taken or dropped while the runner has them
        self._runner = runner
        self._execute = runner.execute_model
        for index, router in enumerate(routers):
            router.set_capture_fn(partial(self._step.__setitem__, index))
        runner.execute_model = self._execute_and_record

    def take(self, names: Sequence[tuple[str, int]]) -> list[np.ndarray]:
        """Return the rows of the first `count` tokens of each (name, count): [count, L, k], fewer if not computed."""
        running = self._running()
        return [self._take(name, count, running.get(name)) for name, count in names]

    def drop(self, names: Iterable[str]) -> None:
        """Forget requests that are no longer awaited."""
        running = self._running()
        for name in names:
            self._finished.pop(name, None)
            if name in running:
                self._settled.add(running[name])

    def _take(self, name: str, count: int, running: str | None) -> np.ndarray:
        if name in self._finished:
            return self._finished.pop(name)[:count]
        if running is None:
            return self._slots[:0]
        self._settled.add(running)
        return self._rows(running)[:count]

    def _running(self) -> dict[str, str]:
        """Return vLLM's name of each request that the runner has, by the front end's."""
        return {name.rpartition("-")[0]: name for name in self._runner.requests}

    def _rows(self, running: str) -> np.ndarray:
        """Return copies of the rows of all slots of a request, in the order of its tokens."""
        blocks = self._blocks[self._runner.requests[running].block_ids[0]]
        return blocks.reshape(-1, *self._slots.shape[1:])

    def _execute_and_record(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for name in scheduled.finished_req_ids:  # their blocks may be written in this step
            if name in self._settled:
                self._settled.discard(name)
            elif name in self._runner.requests:
                self._finished[name.rpartition("-")[0]] = self._rows(name)
        result = self._execute(scheduled, *args, **kwargs)
        if count := scheduled.total_num_scheduled_tokens:
            slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[:count].numpy()
            for layer, ids in enumerate(self._step):
                if ids is not None:
                    self._slots[slots, layer] = ids[:count].numpy()
        return result
