"""The engine's half of a refit on a CPU: repeats recorded copies, and packs layers that vLLM leaves unpacked."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nemo_rl.distributed.float32 import allow_bfloat16_units
from nemo_rl.generation.vllm.cpu import layers  # its import makes vLLM use its layers
from nemo_rl.generation.vllm.cpu.adapter_layers import group_products
from nemo_rl.generation.vllm.cpu.reload_plan import ReloadPlan, ReloadRecorder, TensorLayout, layouts_of
from nemo_rl.generation.vllm.cpu.routes import RouteTable
from nemo_rl.generation.vllm.routes import PlainArray, to_plain
from nemo_rl.generation.vllm.worker import WeightLoadingExtension


class CpuWeightLoadingExtension(WeightLoadingExtension):
    """`WeightLoadingExtension` for a CPU engine."""

    _plan: ReloadPlan | None = None  # set once tensors have been loaded from host memory
    _unplanned: dict[str, TensorLayout] | None = None  # tensors last loaded from host memory, if they allow no plan
    _routes: RouteTable | None = None  # set on the first worker once `record_routes` was called

    def detach_from_terminal(self, trainer: int) -> tuple[int, int]:
        """Detach this process, which is the engine's alone, and let it compute in bfloat16 units."""
        allow_bfloat16_units()
        return super().detach_from_terminal(trainer)

    def use_request_streams(self) -> None:
        """Draw random numbers for seeded requests from `layers.RequestStreams`.

        vLLM's newer model runner has another sampler, which draws by counters of its own.
        """
        if not self.vllm_config.use_v2_model_runner:
            layers.use_request_streams(self.model_runner.sampler.topk_topp_sampler)

    def record_routes(self) -> None:
        """Record the experts of every token from now on, on the first worker: tensor-parallel ones route alike."""
        if self.rank == 0:
            self._routes = RouteTable(self.model_runner)

    def take_routes(self, taken: Sequence[tuple[str, int]], dropped: Sequence[str]) -> list[PlainArray]:
        """Return the routes of the first tokens of finished requests, and forget aborted ones (`RouteTable`)."""
        if self._routes is None:
            return []
        self._routes.drop(dropped)
        return [to_plain(rows) for rows in self._routes.take([(name, count) for name, count in taken])]

    def _keep_adapter(self, adapter: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._adapters is None:
            group_products(self.model_runner.lora_manager)
        super()._keep_adapter(adapter, tensors)

    def _load_from_host(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load whole tensors, which may be read twice; repeat the copies of the last load if the tensors are alike."""
        if self._plan is not None and self._plan.fits(tensors):
            self._repeat(self._plan, tensors)
            return
        layouts = layouts_of(tensors)
        if layouts == self._unplanned:
            self._load(iter(tensors.items()))
        else:
            self._load_recorded(tensors)
        self._unplanned = layouts if self._plan is None else None

    def _repeat(self, plan: ReloadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            plan.apply(tensors, self.model_config)
            self.repack_layers(self.model_runner.get_model())
        self.model_runner.reset_lora_state()

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._plan = None
        super()._load(weights)

    def _load_recorded(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._plan = None
        recorder: ReloadRecorder | None = None

        def load(model: Any) -> Set[str] | None:
            nonlocal recorder
            recorder = ReloadRecorder(model)
            with recorder:
                return model.load_weights(recorder.watch(tensors.items()))

        loaded = self._reload(load)
        assert recorder is not None
        self._plan = recorder.plan(loaded)

    def _finish_reload(self, model: torch.nn.Module) -> None:
        self.repack_layers(model)

    def repack_layers(self, model: torch.nn.Module) -> None:
        """Pack the layers that vLLM 0.32 multiplies in packed form but does not pack after a reload.

        These are output layers with tied embeddings, whose packed form stays the old one, and experts.
        """
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(layer, ParallelLMHead):
                method.process_weights_after_loading(layer)
            elif isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
                method.moe_kernel.fused_experts.process_weights_after_loading(layer)
