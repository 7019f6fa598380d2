"""The engine's half of a refit: it runs in vLLM's workers, as their `worker_extension_cls`."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nemo_rl.distributed.float32 import allow_bfloat16_units
from nemo_rl.distributed.machine import end_with
from nemo_rl.distributed.tensor_transfer import TensorStream, member_name, receive_tensors
from nemo_rl.generation.vllm import cpu_layers  # vLLM makes its layers
from nemo_rl.generation.vllm.reload_plan import ReloadPlan, ReloadRecorder, TensorLayout, layouts_of
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.interfaces import WeightEntry, WeightManifest

PR_SET_PDEATHSIG = 1  # prctl(2)
PlainEntry = tuple[str, str, list[int], int]  # what the engine's calls can carry


def to_weight_entries(plain: list[PlainEntry]) -> tuple[WeightEntry, ...]:
    return tuple(WeightEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in plain)


class WeightLoadingExtension:
    """Methods that vLLM mixes into its worker; called by `collective_rpc("load_weight_file", ...)`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int  # among the engine's workers
    _stream: TensorStream | None = None
    _plan: ReloadPlan | None = None  # on a CPU, once tensors have been loaded from host memory
    _unplanned: dict[str, TensorLayout] | None = None  # the tensors last loaded so, where there can be no plan

    def detach_from_terminal(self, trainer: int) -> tuple[int, int]:
        """Leave Ctrl-C in a terminal to the trainer, which ends the engine; die with a trainer that is killed.

        `trainer` is the process that started the engine: the parent of this one, or of the engine's core whose executor
        started this worker. The core ends with it too. Returns the ids of this process and of its parent.
        """
        allow_bfloat16_units()  # of a process that is the engine's alone
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            end_with(trainer)
        return os.getpid(), os.getppid()

    def use_request_streams(self) -> None:
        """Draw for requests with a seed as `cpu_layers.RequestStreams` does, on a CPU.

        vLLM's newer model runner has another sampler, which draws by counters of its own.
        """
        if current_platform.is_cpu() and not self.vllm_config.use_v2_model_runner:
            cpu_layers.use_request_streams(self.model_runner.sampler.topk_topp_sampler)

    def load_weight_file(self, path: str, entries: list[PlainEntry]) -> None:
        """Load the tensors of a weight file, under their Hugging Face names, into the model."""
        self._load_from_host(dict(map_weights(WeightManifest(path, to_weight_entries(entries)))))

    def load_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load tensors of this process, as `load_weight_file` does."""
        self._load_from_host(dict(tensors))

    def load_device_weights(self, token: str, timeout_s: float) -> None:
        """Load tensors that the policy rank on this worker's device hands over."""
        self._load_to_the_end(receive_tensors(token, device=self.device, timeout_s=timeout_s))

    def load_weight_stream(
        self, host: str, port: int, group: int, members: list[str], engine: str, backend: str, timeout_s: float
    ) -> None:
        """Load tensors from a broadcast; join its group where that has not been done."""
        if self._stream is None or self._stream.group != group:
            self._stream = TensorStream(
                host,
                port,
                group=group,
                members=members,
                name=member_name(engine, self.rank),
                backend=backend,
                timeout_s=timeout_s,
                device=self.device,
            )
        self._load_to_the_end(self._stream.receive())

    def _load_to_the_end(self, received: Iterator[tuple[str, torch.Tensor]]) -> None:
        try:
            self._load(received)
        finally:
            for _ in received:  # the sender, and all who receive the same, wait for this worker
                pass

    def _load_from_host(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load whole tensors, which may be read twice; on a CPU repeat the copies of the last load of such tensors."""
        if not current_platform.is_cpu():
            self._load(iter(tensors.items()))
            return
        if self._plan is not None and self._plan.fits(tensors):
            self._repeat(self._plan, tensors)
            return
        layouts = layouts_of(tensors)
        self._load(iter(tensors.items()), is_recorded=layouts != self._unplanned)
        self._unplanned = layouts if self._plan is None else None

    def _repeat(self, plan: ReloadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            plan.apply(tensors, self.model_config)
            self.repack_layers(self.model_runner.get_model())
        self.model_runner.reset_lora_state()

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], *, is_recorded: bool = False) -> None:
        """Load by vLLM's layerwise reload: every tensor keeps its address, which captured CUDA graphs rely on."""
        model = self.model_runner.get_model()
        self._plan = None
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            expected = {name for name, _ in model.named_parameters()}
            initialize_layerwise_reload(model)
            recorder = ReloadRecorder(model) if is_recorded else None
            with recorder or nullcontext():
                loaded = model.load_weights(recorder.watch(weights) if recorder else weights)
            finalize_layerwise_reload(model, self.model_config)
            self.repack_layers(model)
        if missing := sorted(expected - (loaded or expected)):
            raise ValueError(f"the policy gave no weights for {', '.join(missing[:5])} ({len(missing)} in all)")
        if recorder is not None:
            self._plan = recorder.plan(loaded)
        self.model_runner.reset_lora_state()
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def repack_layers(self, model: torch.nn.Module) -> None:
        """Pack, on a CPU, the layers that vLLM 0.32 multiplies in packed form but does not pack after a reload.

        These are output layers with tied embeddings, whose packed form stays the old one, and experts.
        """
        if not current_platform.is_cpu():
            return
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(layer, ParallelLMHead):
                method.process_weights_after_loading(layer)
            elif isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
                method.moe_kernel.fused_experts.process_weights_after_loading(layer)
