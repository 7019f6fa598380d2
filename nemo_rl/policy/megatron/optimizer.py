"""The float32 main weights of Megatron's optimizer, their gradient norm, and the optimizer's saved state."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nemo_rl.policy.hf_model import LoadedTensors
from nemo_rl.policy.host_copies import HostCopies
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.weights import StageWeights
from nemo_rl.policy.optimizers import parameter_groups
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.saving import load_state

_PREFIX = "model."  # begins the names of parameters in `CausalLogprobs`


class MainWeights:
    """A float32 copy of every bfloat16 weight; a float32 weight is its own main weight.

    The optimizer steps these. Gradients come from the buffers in which Megatron accumulates them. Once divided, a main
    weight is the part of a weight that this data-parallel rank steps: a range of its entries, which may be empty.
    """

    def __init__(self, module: nn.Module, *, counts_in_norm: Callable[[nn.Parameter], bool]) -> None:
        """Copy the trained weights; `counts_in_norm` says which ones this rank counts for its copy of the model."""
        self._model_parameters = [p for p in module.parameters() if p.requires_grad]
        self._main = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._model_parameters
        ]
        self._is_counted = [counts_in_norm(p) for p in self._model_parameters]
        self._distributed: Any = None  # megatron.core's DistributedDataParallel, once divided
        self._ranges: dict[int, slice] = {}  # keyed by id(parameter)
        self._index_main()

    def divide(self, distributed: Any) -> None:
        """Keep the part of each weight that falls into this rank's part of Megatron's buckets.

        `distributed` has buffers for a distributed optimizer, whose gradients are reduced to that part alone.
        """
        for buffer in [*distributed.buffers, *distributed.expert_parallel_buffers]:
            for parameter, (start, end, bucket) in buffer.param_index_map.items():
                group = parallel.data_group_of(parameter)
                rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
                first, last = buffer.bucket_indices[bucket]
                part = (last - first) // num_ranks
                low = min(max(first + rank * part, start), end)
                high = min(max(first + (rank + 1) * part, start), end)
                self._ranges[id(parameter)] = slice(low - start, high - start)
        self._distributed = distributed
        parts = (self.part(p, main) for p, main in zip(self._model_parameters, self._main, strict=True))
        self._main = [nn.Parameter(part.detach().clone()) for part in parts]
        self._index_main()

    @property
    def is_divided(self) -> bool:
        """Return whether this rank has a part of each weight only."""
        return self._distributed is not None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the main weight of a parameter; a frozen weight or buffer is its own."""
        return self._main_by_id.get(id(parameter), parameter)

    def part(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that has the parameter's shape: all of it, or a range of its entries."""
        part = self._ranges.get(id(parameter))
        return tensor if part is None else tensor.reshape(-1)[part]

    def whole(self, parameter: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
        """Return the tensor of the parameter's shape that all data-parallel ranks have parts of; all call it together.

        Without a `part` it is the main weight.
        """
        part = self.of(parameter).detach() if part is None else part
        if id(parameter) not in self._ranges:
            return part
        result = part.new_zeros(parameter.shape)
        result.view(-1)[self._ranges[id(parameter)]] = part
        dist.all_reduce(result, group=parallel.data_group_of(parameter))
        return result

    @torch.no_grad()
    def store(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Overwrite the main weight with its part of a tensor of the parameter's shape."""
        self.of(parameter).copy_(self.part(parameter, tensor))

    def tensors(self) -> list[torch.Tensor]:
        """Return the main weights; some are parameters of the module."""
        return [main.detach() for main in self._main]

    def groups(self, *, decay_norm_and_bias: bool) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, by the dimensions of the whole weights."""
        pairs = ((p.ndim, main) for p, main in zip(self._model_parameters, self._main, strict=True))
        return parameter_groups(pairs, decay_norm_and_bias=decay_norm_and_bias)

    def copy_gradients_from_buffers(self) -> None:
        """Set the gradients from Megatron's buffers; float32 buffers are not copied."""
        for parameter, main in zip(self._model_parameters, self._main, strict=True):
            main.grad = self.part(parameter, parameter.main_grad).float()  # pyright: ignore[reportAttributeAccessIssue]

    def clear_gradients(self) -> None:
        for main in self._main:
            main.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the stepped weights to the model, in its dtype; once divided, the data-parallel ranks exchange parts."""
        for parameter, main in zip(self._model_parameters, self._main, strict=True):
            if main is not parameter:
                self.part(parameter, parameter.detach()).copy_(main)
        if self._distributed is not None:
            self._distributed.start_param_sync()

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> float:
        """Scale the gradient to a norm of at most `max_norm` and return its norm before; None: only measure it."""
        gradients = [main.grad for main, counts in zip(self._main, self._counts(), strict=True) if counts]
        norms = [gradient.norm() for gradient in gradients if gradient is not None]
        square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        square = square.to(self._model_parameters[0].device)
        dist.all_reduce(square)  # over all ranks, each weight counted by one of those that hold it
        norm = math.sqrt(float(square)) if math.isfinite(float(square)) else float(square)
        if max_norm is not None and math.isfinite(norm):
            scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            for main in self._main:
                if main.grad is not None and scale < 1.0:
                    main.grad.mul_(scale)
        return norm

    def _counts(self) -> list[bool]:
        """Return which main weights this rank counts; once divided, every data-parallel rank counts its part."""
        is_first = [self.is_divided or dist.get_rank(parallel.data_group_of(p)) == 0 for p in self._model_parameters]
        return [counted and first for counted, first in zip(self._is_counted, is_first, strict=True)]

    def _index_main(self) -> None:
        self._main_by_id = {id(p): main for p, main in zip(self._model_parameters, self._main, strict=True)}


class OptimizerState:
    """The optimizer's state for the weights of a stage."""

    def __init__(self, optimizer: Optimizer, main: MainWeights, weights: StageWeights, layout: RankLayout) -> None:
        self._optimizer = optimizer
        self._main = main
        self._weights = weights
        self._layout = layout

    def whole(self, memory: HostCopies) -> dict[str, Any]:
        """Return the whole state of a stage's weights in `memory` of one of its ranks; the others help to gather it."""
        self._initialize_state()
        is_writer = parallel.tensor_rank() == 0 and dist.get_rank(parallel.data_group()) == 0
        state: dict[str, dict[str, torch.Tensor]] = {}
        for kind in self._tensor_state_names():
            for name, tensor in self._weights.own(partial(self._whole_state, kind)):
                if is_writer:
                    state.setdefault(_PREFIX + name, {})[kind] = memory.copy(tensor)
        for name, parameters in self._weights.trained_by_source():
            if is_writer:
                state.setdefault(_PREFIX + name, {}).update(self._scalar_state(parameters[0]))
        memory.wait()
        group = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        return {
            "state": state,
            "param_groups": [{**group, "params": [_PREFIX + name for name in self._weights.trained_names]}],
        }

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load a state that either backend saved on any layout; raises CheckpointError."""
        self._initialize_state()
        asked: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameters in self._weights.trained_by_source():
            shape = self._weights.shapes[name]
            asked[_PREFIX + name] = {
                kind: torch.empty(shape) for kind in self._tensor_state_names()
            } | self._scalar_state(parameters[0])
        lr = float(self._optimizer.param_groups[0]["lr"])
        found = load_state({"state": asked, "param_groups": [{"lr": lr}]}, directory)
        for kind in self._tensor_state_names():
            tensors = {name: found["state"][_PREFIX + name][kind] for name, _ in self._weights.trained_by_source()}
            self._weights.load(LoadedTensors(tensors), partial(self._store_state, kind), trained=True)
        for name, parameters in self._weights.trained_by_source():
            for parameter in parameters:
                for kind in self._scalar_state(parameter):
                    self._state_of(parameter)[kind].copy_(found["state"][_PREFIX + name][kind])
        for group in self._optimizer.param_groups:
            group["lr"] = found["param_groups"][0]["lr"]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._optimizer.state[self._main.of(parameter)]

    def _whole_state(self, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        return self._main.whole(parameter, self._state_of(parameter)[kind])

    def _store_state(self, kind: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self._state_of(parameter)[kind].copy_(self._main.part(parameter, tensor))

    def _tensor_state_names(self) -> list[str]:
        """Return the names of state tensors that have the shape of their weight; the same for all weights."""
        first, kept = next(iter(self._optimizer.state.items()), (torch.empty(0), {}))
        return [kind for kind, value in kept.items() if torch.is_tensor(value) and value.shape == first.shape]

    def _scalar_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        kinds = set(self._tensor_state_names())
        kept = self._state_of(parameter)
        return {k: v.clone() for k, v in kept.items() if torch.is_tensor(v) and k not in kinds}

    def _initialize_state(self) -> None:
        """Make the state of an optimizer that has not stepped, by a step with zero gradients that is then undone."""
        if self._optimizer.state:
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for kept in self._optimizer.state.values():
            for value in kept.values():
                if torch.is_tensor(value):
                    value.zero_()
