"""The products of adapted layers on a CPU, one pair per adapter of a step.

vLLM 0.32 copies A and B once per token, and gives a token without an adapter those of the last slot.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class GroupedProducts(PunicaWrapperCPU):
    """Adds x A^T B^T to the rows of each adapter; A and B are [slots, 1, ...], stacked per part of a packed layer."""

    _groups: tuple[tuple[int, torch.Tensor | None], ...] = ()  # slot and rows; None: all

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        used = slots.unique().tolist()
        self._groups = tuple(
            (slot, None if len(used) == 1 else (slots == slot).nonzero()[:, 0]) for slot in used if slot >= 0
        )

    def add_lora_linear(
        self,
        y: torch.Tensor,  # [tokens, out]
        x: torch.Tensor,  # [tokens, in]
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        for slot, rows in self._groups:
            own = x if rows is None else x[rows]
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                part, small = y[:, start : start + size], own @ a[slot, 0].T
                if rows is None:
                    part.addmm_(small, b[slot, 0].T, alpha=scale)
                else:
                    part.index_add_(0, rows, small @ b[slot, 0].T, alpha=scale)
                start += size


def group_products(manager: Any) -> None:
    """Let the adapted layers of a worker's LoRA manager compute so."""
    for products in manager._adapter_manager.punica_wrapper_mapping.values():
        products.__class__ = GroupedProducts
