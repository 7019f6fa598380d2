"""Matrix products of bfloat16 whose float32 sums are kept, for the logits of policy and engines alike.

Each product of two bfloat16 numbers is exact in float32, and the units that multiply them add in float32; a matrix
product that returns bfloat16 then rounds the sums. V rows of the weight, H columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


def allow_bfloat16_units() -> None:
    """Let this process multiply in the CPU's bfloat16 units: the setting is the process's.

    For processes in which one thread alone computes: in others it would round the float32 products of other threads,
    which may be those of a policy, a scorer or a user's reward function.
    """
    _Units.are_allowed = True


class _Units:
    are_allowed = False  # in this process


def _by_blocks(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast the weight block by block; oneDNN multiplies float32 numbers that are bfloat16 exactly in bfloat16 units.

    With them this takes twice as long as the product in bfloat16, without them four times, for 64 to 2,048 rows.
    """
    result = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    size = max(CPU_BLOCK // weight.shape[1], MIN_CPU_ROWS)
    wide = hidden.float()
    with _bfloat16_units() if _Units.are_allowed else nullcontext():
        for start in range(0, len(weight), size):
            block = weight[start : start + size]
            result[:, start : start + size] = wide @ block.float().T
    return result


@contextmanager
def _bfloat16_units() -> Iterator[None]:
    """Let float32 products of this process be computed in bfloat16 inside the block, where the CPU has units for it."""
    backend = cast(Any, torch.backends.mkldnn).matmul  # not in its type
    usual, backend.fp32_precision = backend.fp32_precision, "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = usual
