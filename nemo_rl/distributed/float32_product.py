"""Matrix products of bfloat16 whose float32 sums are kept, for the logits of policy and engines alike.

Each product of two bfloat16 numbers is exact in float32, and the units that multiply them add in float32; a matrix
product that returns bfloat16 then rounds the sums. V rows of the weight, H columns.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

CPU_BLOCK = 2**20  # numbers of the weight that are cast at once: they stay in a core's cache
MIN_CPU_ROWS = 256


def float32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden [..., H] @ weight [V, H].T of bfloat16 tensors in float32, [..., V]; it has no derivative."""
    rows = hidden.flatten(0, -2)
    if rows.device.type == "cpu":  # where torch 2.13 has no such product
        product = _by_blocks(rows, weight)
    else:
        product = torch.mm(rows, weight.T, out_dtype=torch.float32)
    return product.unflatten(0, hidden.shape[:-1])


def _by_blocks(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast the weight block by block, and let oneDNN multiply float32 numbers that are bfloat16 in its bfloat16 units.

    Against the product in bfloat16 this takes 1.2 times as long for 512 rows and twice for 16; casting the whole weight
    and multiplying in float32 takes 2.5 and 7 times.
    """
    result = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    size = max(CPU_BLOCK // weight.shape[1], MIN_CPU_ROWS)
    wide = hidden.float()
    with _bfloat16_units():
        for start in range(0, len(weight), size):
            block = weight[start : start + size]
            result[:, start : start + size] = wide @ block.float().T
    return result


class _UnitsState:
    """The process's setting is one for all threads: the first that needs it changes it, the last puts it back."""

    lock = threading.Lock()
    num_users = 0
    usual = "none"


@contextmanager
def _bfloat16_units() -> Iterator[None]:
    """Let float32 products of this process be computed in bfloat16 inside the block, where the CPU has units for it.

    Another thread's products of numbers that are not bfloat16 would be rounded meanwhile; an engine on a thread of the
    trainer's process takes turns with it.
    """
    state, backend = _UnitsState, cast(Any, torch.backends.mkldnn).matmul  # not in its type
    with state.lock:
        if not state.num_users:
            state.usual, backend.fp32_precision = backend.fp32_precision, "bf16"
        state.num_users += 1
    try:
        yield
    finally:
        with state.lock:
            state.num_users -= 1
            if not state.num_users:
                backend.fp32_precision = state.usual
