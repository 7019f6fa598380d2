"""What lets Megatron-core run without CUDA: all of it, for a process that is one rank on a CPU.

Megatron-core asks torch.cuda for its device and names "cuda" in a few calls. On a machine without CUDA nothing else can
use those functions, so they are answered with the CPU for the life of the process. Settings of the model that a CPU
needs are in settings.py, under the same condition.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@lru_cache(maxsize=1)
def answer_for_cuda() -> None:
    """Let torch.cuda's current device be the CPU, and moving to it and waiting for it mean nothing."""
    module: Any = torch.cuda
    module.current_device = _cpu
    module.synchronize = _nothing
    tensor: Any = torch.Tensor
    tensor.cuda = _itself


class _CudaIsTheCpu(TorchFunctionMode):
    """Makes tensors on the CPU where "cuda" is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


@contextmanager
def calls_of_megatron(device: torch.device) -> Iterator[None]:
    """Around Megatron's own functions, whose pipeline schedules name "cuda"; nothing on CUDA."""
    if device.type == "cuda":
        yield
        return
    with _CudaIsTheCpu():
        yield


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor
