"""Attention of a layer by torch's own kernels, which a CPU and CUDA both have: the core between Megatron's projections.

In the place of Megatron's unfused attention, which holds [B, heads, T, T], and of TransformerEngine's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nemo_rl.policy.attention import Pack, by_kernel, has_kernel


class CausalAttention(nn.Module):
    """Causal attention with grouped queries over sequences that are padded to the right, or packed behind each other.

    Made and called by Megatron's attention layer, hence the arguments; the softmax scale is 1 / sqrt(head width).
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Pack | None, **_: Any
    ) -> torch.Tensor:
        """[T, B, heads, D] and twice [T, B, groups, D] to [T, B, heads * D].

        What is handed through as a mask is a pack, or nothing: then only what comes later is masked, since padding is
        to the right, where nobody looks.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, heads, T, D]
        if attention_mask is None:
            return _causal(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if has_kernel(q, v):
            return by_kernel(q, k, v, attention_mask).transpose(0, 1).flatten(2)
        parts = zip(*(states.split(attention_mask.lengths, dim=2) for states in (q, k, v)), strict=True)
        return torch.cat([_causal(*part) for part in parts], dim=2).permute(2, 0, 1, 3).flatten(2)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
