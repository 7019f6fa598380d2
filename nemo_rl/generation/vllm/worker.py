"""The engine's half of a refit: it runs in vLLM's workers, as their `worker_extension_cls`."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_rl.distributed.processes import end_with
from nemo_rl.distributed.tensor_transfer import TensorStream, member_name, receive_tensors
from nemo_rl.generation.vllm.adapter_store import AdapterStore
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.weight_manifests import WeightEntry, WeightManifest

PR_SET_PDEATHSIG = 1  # prctl(2)
BASE_LAYER = ".base_layer."  # part of the names of layers with adapters; loaders leave it out
PlainEntry = tuple[str, str, list[int], int]  # a WeightEntry in types that vLLM's RPC can carry


def to_weight_entries(plain: list[PlainEntry]) -> tuple[WeightEntry, ...]:
    return tuple(WeightEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in plain)


def expert_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers with experts, first layer first."""
    found = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(found, key=lambda layer: layer.layer_id)


class WeightLoadingExtension:
    """Methods that vLLM mixes into its worker, called by `collective_rpc`; on a CPU its subclass in cpu/worker.py.

    What is loaded are the model's weights, or with an `adapter` other than 0 those of the adapter of that number.
    """

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int  # index among the engine's workers
    _stream: TensorStream | None = None
    _adapters: AdapterStore | None = None  # set once an adapter was loaded

    def detach_from_terminal(self, trainer: int) -> tuple[int, int]:
        """Leave Ctrl-C in a terminal to the trainer, which ends the engine; exit if the trainer is killed.

        `trainer` is the process that started the engine: the parent of this one, or of the engine's core, whose
        executor started this worker. The core exits with it too. Returns the ids of this process and of its parent.
        """
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            end_with(trainer)
        return os.getpid(), os.getppid()

    def describe_experts(self) -> tuple[list[int], int]:
        """Return the numbers of the layers with experts, in their order, and the number of experts of a layer."""
        layers = expert_layers(self.model_runner.get_model())
        return [layer.layer_id for layer in layers], max(
            (layer.router.global_num_experts for layer in layers), default=0
        )

    def load_weight_file(self, path: str, entries: list[PlainEntry], adapter: int = 0) -> None:
        """Load the tensors of a weight file, under their Hugging Face names, into the model."""
        self.load_tensors(tuple(map_weights(WeightManifest(path, to_weight_entries(entries)))), adapter)

    def load_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]], adapter: int = 0) -> None:
        """Load tensors of this process, as `load_weight_file` does."""
        if adapter:
            self._keep_adapter(adapter, tensors)
        else:
            self._load_from_host(dict(tensors))

    def load_device_weights(self, token: str, timeout_s: float, adapter: int = 0) -> None:
        """Load tensors that the policy rank on this worker's device hands over."""
        self._load_to_the_end(receive_tensors(token, device=self.device, timeout_s=timeout_s), adapter)

    def drop_adapters(self, numbers: Sequence[int]) -> None:
        """Forget adapters that no request uses."""
        assert self._adapters is not None
        self._adapters.drop(numbers)

    def _keep_adapter(self, adapter: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._adapters is None:
            self._adapters = AdapterStore(self.model_runner)
        self._adapters.keep(adapter, tensors)

    def load_weight_stream(
        self,
        host: str,
        port: int,
        group: int,
        members: list[str],
        engine: str,
        backend: str,
        timeout_s: float,
        adapter: int = 0,
    ) -> None:
        """Load tensors from a broadcast; join its group if necessary."""
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
        self._load_to_the_end(self._stream.receive(), adapter)

    def _load_to_the_end(self, received: Iterator[tuple[str, torch.Tensor]], adapter: int) -> None:
        try:
            if adapter:
                self._keep_adapter(adapter, received)
            else:
                self._load(received)
        finally:
            for _ in received:  # the sender and all other receivers wait for this worker
                pass

    def _load_from_host(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load(iter(tensors.items()))

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._reload(lambda model: model.load_weights(weights))

    def _reload(self, load: Callable[[Any], Set[str] | None]) -> Set[str] | None:
        """Load by vLLM's layerwise reload: every tensor keeps its address, which captured CUDA graphs rely on.

        `load` calls the model's loaders and returns the names of the loaded parameters; None: unknown.
        """
        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            expected = {name.replace(BASE_LAYER, ".") for name, _ in model.named_parameters()}
            initialize_layerwise_reload(model)
            loaded = load(model)
            finalize_layerwise_reload(model, self.model_config)
            self._finish_reload(model)
        if missing := sorted(expected - (loaded or expected)):
            raise ValueError(f"the policy gave no weights for {', '.join(missing[:5])} ({len(missing)} in all)")
        self.model_runner.reset_lora_state()
        return loaded

    def _finish_reload(self, model: torch.nn.Module) -> None:
        torch.accelerator.synchronize()
