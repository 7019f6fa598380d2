"""Attention of a layer by torch's own kernels, which a CPU and CUDA both have: the core between Megatron's projections.

In the place of Megatron's unfused attention, which holds [B, heads, T, T], and of TransformerEngine's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    """Causal attention with grouped queries over sequences that are padded to the right, or packed behind each other.

    Made by Megatron's attention layer, hence the arguments; the softmax scale is 1 / sqrt(head width).
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[T, B, heads, D] and twice [T, B, groups, D] to [T, B, heads * D].

        Nothing is masked but what comes later: padding is to the right, where nobody looks.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.permute(2, 0, 1, 3).flatten(2)
