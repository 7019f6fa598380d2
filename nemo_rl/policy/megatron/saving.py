"""An optimizer's state under Hugging Face's names, as FSDP2's checkpoints have it: each backend reads the other's.

What an optimizer keeps for a weight is either of the weight's shape, and mapped as the weight is, or one number.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.optimizer import MainWeights
from nemo_rl.policy.megatron.weights import StageWeights
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.saving import load_state

_PREFIX = "model."  # where `CausalLogprobs` has the Hugging Face model


class OptimizerState:
    """What one optimizer keeps for the weights of a stage."""

    def __init__(self, optimizer: Optimizer, main: MainWeights, weights: StageWeights, layout: RankLayout) -> None:
        self._optimizer = optimizer
        self._main = main
        self._weights = weights
        self._layout = layout

    def whole(self) -> dict[str, Any]:
        """On one rank of each stage the state of its weights, on the CPU; the others help to gather it."""
        self._begin()
        is_writer = parallel.tensor_rank() == 0 and self._layout.data_parallel_rank == 0
        state: dict[str, dict[str, torch.Tensor]] = {}
        for kind in self._kinds():
            for name, tensor in self._weights.own(partial(self._tensor, kind)):
                if is_writer:
                    state.setdefault(_PREFIX + name, {})[kind] = tensor.to("cpu", copy=True)
        for name, parameter in self._weights.sources_of_held():
            if is_writer:
                state.setdefault(_PREFIX + name, {}).update(self._numbers(parameter))
        group = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        return {"state": state, "param_groups": [{**group, "params": [_PREFIX + n for n in self._weights.names]}]}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take over what either backend has saved, on any layout; raises CheckpointError."""
        self._begin()
        asked: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._weights.sources_of_held():
            shape = self._weights.shapes[name]
            asked[_PREFIX + name] = {kind: torch.empty(shape) for kind in self._kinds()} | self._numbers(parameter)
        lr = float(self._optimizer.param_groups[0]["lr"])
        found = load_state({"state": asked, "param_groups": [{"lr": lr}]}, folder)
        for kind in self._kinds():
            tensors = {name: found["state"][_PREFIX + name][kind] for name, _ in self._weights.sources_of_held()}
            self._weights.load(tensors, partial(self._tensor, kind))
        for name, parameter in self._weights.sources_of_held():
            for kind in self._numbers(parameter):
                self._kept(parameter)[kind].copy_(found["state"][_PREFIX + name][kind])
        for group in self._optimizer.param_groups:
            group["lr"] = found["param_groups"][0]["lr"]

    def _kept(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._optimizer.state[self._main.of(parameter)]

    def _tensor(self, kind: str, parameter: nn.Parameter) -> torch.Tensor:
        return self._kept(parameter)[kind]

    def _kinds(self) -> list[str]:
        """Of the tensors that have the shape of their weight; the same for all weights."""
        first, kept = next(iter(self._optimizer.state.items()), (torch.empty(0), {}))
        return [kind for kind, value in kept.items() if torch.is_tensor(value) and value.shape == first.shape]

    def _numbers(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        kinds = set(self._kinds())
        kept = self._kept(parameter)
        return {k: v.clone() for k, v in kept.items() if torch.is_tensor(v) and k not in kinds}

    def _begin(self) -> None:
        """Let an optimizer that has not stepped make its state: a step of nothing, that is then not counted."""
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
