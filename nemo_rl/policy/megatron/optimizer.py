"""The float32 weights that an optimizer steps, and their gradients' norm over all ranks of a copy of the model."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.policy.megatron import parallel


class MainWeights:
    """A float32 copy of every weight that is computed with in bfloat16; float32 weights are their own.

    The optimizer knows these alone. Gradients come from the buffers in which Megatron adds them up.
    """

    def __init__(self, module: nn.Module, *, is_counted: Callable[[nn.Parameter], bool]) -> None:
        """`is_counted`: whether the norm counts it here, of the ranks of a copy that hold the same."""
        self._computed = [p for p in module.parameters() if p.requires_grad]
        self._main = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._computed]
        self._counted = [main for p, main in zip(self._computed, self._main, strict=True) if is_counted(p)]
        self._of = {id(p): main for p, main in zip(self._computed, self._main, strict=True)}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._of[id(parameter)]

    def groups(self, *, with_decay_of_all: bool) -> list[dict[str, Any]]:
        """For the optimizer: those that are decayed and, in a group of their own, biases and norms."""
        if with_decay_of_all:
            return [{"params": self._main}]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._main if p.ndim > 1]},
            {"params": [p for p in self._main if p.ndim == 1], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def take_gradients(self) -> None:
        """From the buffers; float32 ones are not copied."""
        for parameter, main in zip(self._computed, self._main, strict=True):
            main.grad = parameter.main_grad.float()  # pyright: ignore[reportAttributeAccessIssue]

    def drop_gradients(self) -> None:
        for main in self._main:
            main.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped weights to those that are computed with."""
        for parameter, main in zip(self._computed, self._main, strict=True):
            if main is not parameter:
                parameter.copy_(main)

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> float:
        """The norm of the whole model's gradient, before it is scaled to at most `max_norm`; None: measured only."""
        norms = [main.grad.norm() for main in self._counted if main.grad is not None]
        square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
        square = square.to(self._computed[0].device)
        dist.all_reduce(square, group=parallel.copy_group())
        norm = math.sqrt(float(square)) if math.isfinite(float(square)) else float(square)
        if max_norm is not None and math.isfinite(norm):
            scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            for main in self._main:
                if main.grad is not None and scale < 1.0:
                    main.grad.mul_(scale)
        return norm

    def move(self, device: torch.device) -> None:
        """Those that are not computed with: the others move with their module."""
        for parameter, main in zip(self._computed, self._main, strict=True):
            if main is not parameter:
                main.data = main.data.to(device)
