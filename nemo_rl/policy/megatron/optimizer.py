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

from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.weights import StageWeights
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.saving import load_state


class MainWeights:
    """A float32 copy of every bfloat16 weight; a float32 weight is its own main weight.

    The optimizer steps these. Gradients come from the buffers in which Megatron accumulates them.
    """

    def __init__(self, module: nn.Module, *, counts_in_norm: Callable[[nn.Parameter], bool]) -> None:
        """Copy the weights; `counts_in_norm` says whether this rank counts a replicated weight in the norm."""
        self._model_parameters = [p for p in module.parameters() if p.requires_grad]
        self._main = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._model_parameters
        ]
        self._counted = [main for p, main in zip(self._model_parameters, self._main, strict=True) if counts_in_norm(p)]
        self._main_by_id = {id(p): main for p, main in zip(self._model_parameters, self._main, strict=True)}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the main weight of a parameter."""
        return self._main_by_id[id(parameter)]

    def groups(self, *, with_decay_of_all: bool) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups: decayed weights, and biases and norms."""
        if with_decay_of_all:
            return [{"params": self._main}]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._main if p.ndim > 1]},
            {"params": [p for p in self._main if p.ndim == 1], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def copy_gradients_from_buffers(self) -> None:
        """Set the gradients from Megatron's buffers; float32 buffers are not copied."""
        for parameter, main in zip(self._model_parameters, self._main, strict=True):
            main.grad = parameter.main_grad.float()  # pyright: ignore[reportAttributeAccessIssue]

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        for main in self._main:
            main.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the stepped weights to the model, in its dtype."""
        for parameter, main in zip(self._model_parameters, self._main, strict=True):
            if main is not parameter:
                parameter.copy_(main)

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> float:
        """Scale the gradient to a norm of at most `max_norm` and return its norm before; None: only measure it."""
        norms = [main.grad.norm() for main in self._counted if main.grad is not None]
        square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        square = square.to(self._model_parameters[0].device)
        dist.all_reduce(square, group=parallel.model_parallel_group())
        norm = math.sqrt(float(square)) if math.isfinite(float(square)) else float(square)
        if max_norm is not None and math.isfinite(norm):
            scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            for main in self._main:
                if main.grad is not None and scale < 1.0:
                    main.grad.mul_(scale)
        return norm

    def move(self, device: torch.device) -> None:
        """Move the copies; weights that are their own main weights move with their module."""
        for parameter, main in zip(self._model_parameters, self._main, strict=True):
            if main is not parameter:
                main.data = main.data.to(device)


_PREFIX = "model."  # of parameter names in `CausalLogprobs`


class OptimizerState:
    """The optimizer's state for the weights of a stage."""

    def __init__(self, optimizer: Optimizer, main: MainWeights, weights: StageWeights, layout: RankLayout) -> None:
        self._optimizer = optimizer
        self._main = main
        self._weights = weights
        self._layout = layout

    def whole(self) -> dict[str, Any]:
        """Return the whole state of a stage's weights on the CPU of one of its ranks; the others help to gather it."""
        self._initialize_state()
        is_writer = parallel.tensor_rank() == 0 and self._layout.data_parallel_rank == 0
        state: dict[str, dict[str, torch.Tensor]] = {}
        for kind in self._tensor_state_names():
            for name, tensor in self._weights.own(partial(self._state_tensor, kind)):
                if is_writer:
                    state.setdefault(_PREFIX + name, {})[kind] = tensor.to("cpu", copy=True)
        for name, parameter in self._weights.held_parameters_by_source():
            if is_writer:
                state.setdefault(_PREFIX + name, {}).update(self._scalar_state(parameter))
        group = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        return {"state": state, "param_groups": [{**group, "params": [_PREFIX + n for n in self._weights.names]}]}

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load a state that either backend saved on any layout; raises CheckpointError."""
        self._initialize_state()
        asked: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._weights.held_parameters_by_source():
            shape = self._weights.shapes[name]
            asked[_PREFIX + name] = {
                kind: torch.empty(shape) for kind in self._tensor_state_names()
            } | self._scalar_state(parameter)
        lr = float(self._optimizer.param_groups[0]["lr"])
        found = load_state({"state": asked, "param_groups": [{"lr": lr}]}, directory)
        for kind in self._tensor_state_names():
            tensors = {
                name: found["state"][_PREFIX + name][kind] for name, _ in self._weights.held_parameters_by_source()
            }
            self._weights.load(tensors, partial(self._state_tensor, kind))
        for name, parameter in self._weights.held_parameters_by_source():
            for kind in self._scalar_state(parameter):
                self._state_of(parameter)[kind].copy_(found["state"][_PREFIX + name][kind])
        for group in self._optimizer.param_groups:
            group["lr"] = found["param_groups"][0]["lr"]

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._optimizer.state[self._main.of(parameter)]

    def _state_tensor(self, kind: str, parameter: nn.Parameter) -> torch.Tensor:
        return self._state_of(parameter)[kind]

    def _tensor_state_names(self) -> list[str]:
        """Return the names of state tensors that have the shape of their weight; the same for all weights."""
        first, kept = next(iter(self._optimizer.state.items()), (torch.empty(0), {}))
        return [kind for kind, value in kept.items() if torch.is_tensor(value) and value.shape == first.shape]

    def _scalar_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
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
