"""The engine's half of a refit with mutations and records for tests; vLLM's worker imports this module."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from nemo_rl.generation.vllm.cpu.worker import CpuWeightLoadingExtension


class LoadingWithSkippableRepair(CpuWeightLoadingExtension):
    """Loads as the product does, or forgets the output layer, as vLLM's own reload does on a CPU."""

    repairs_output_layers = True

    def repair_output_layers(self, repairs: bool) -> None:
        self.repairs_output_layers = repairs

    def has_plan(self) -> bool:
        return self._plan is not None

    def repack_layers(self, model: torch.nn.Module) -> None:
        if self.repairs_output_layers:
            super().repack_layers(model)


class LoadingFromItsRank(CpuWeightLoadingExtension):
    """Loads as the product does; the token names a device for each worker, since on a CPU all have the same one."""

    _names: tuple[str, ...] = ()

    def load_device_weights(self, token: str, timeout_s: float) -> None:
        super().load_device_weights(f"{token}{self.rank}", timeout_s)

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        names: list[str] = []

        def recorded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        super()._load(recorded())
        self._names = tuple(names)

    def received_names(self) -> list[str]:
        """Return the names of the last weights, in the order of their arrival."""
        return list(self._names)

    def digest_weights(self) -> str:
        """Return a hash of the worker's own parts of the weights."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.model_runner.get_model().state_dict().items()):
            found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class CountingPreemptions(LoadingWithSkippableRepair):
    """Records routes as the product does, and counts preempted requests."""

    num_preemptions = 0

    def record_routes(self) -> None:
        execute = self.model_runner.execute_model

        def counting(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_preemptions += len(scheduled.preempted_req_ids or ())
            return execute(scheduled, *args, **kwargs)

        self.model_runner.execute_model = counting
        super().record_routes()

    def route_state(self) -> tuple[int, int]:
        """Return the number of preemptions, and of requests whose routes are kept beside the table."""
        assert self._routes is not None
        return self.num_preemptions, len(self._routes._finished) + len(self._routes._settled)
