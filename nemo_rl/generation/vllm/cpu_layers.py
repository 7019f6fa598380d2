"""Layers of vLLM's CPU engine with float32 logits and a float32 residual stream, and cheap seeds of single requests.

vLLM makes the layers in place of its own in workers that import this module; `use_request_streams` changes the sampler.
"""

from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from nemo_rl.distributed.float32 import float32_product


@LogitsProcessor.register_oot
class Float32LogitsProcessor(LogitsProcessor):
    """vLLM's logits; on a CPU with `head_dtype: float32`, vLLM 0.32 casts the whole weight for every step."""

    def _apply_head(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        is_plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod) and embedding_bias is None
        if self.head_dtype == torch.float32 and hidden_states.device.type == "cpu" and is_plain:
            weight = cast(torch.Tensor, lm_head.weight)  # a quantised head may have none
            if hidden_states.dtype == weight.dtype == torch.bfloat16:
                return float32_product(hidden_states, weight)
        return super()._apply_head(lm_head, hidden_states, embedding_bias)


class Float32ResidualRMSNorm(RMSNorm):
    """vLLM's norm; the sum that it returns for the next norm stays float32, as in the policy. Used on a CPU alone.

    vLLM 0.32 rounds it to the model's dtype. Other classes of norms, e.g. Gemma's, are left as they are.
    """

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual [..., H] in the dtype of x and the sum; without a residual the norm of x."""
        if residual is None:
            normed = cast(torch.Tensor, super().forward_native(x))
            return normed.to(self.weight.dtype) if x.dtype == torch.float32 else normed
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        total = residual.float() + x
        scale = total.pow(2).mean(-1, keepdim=True).add_(self.variance_epsilon).rsqrt_()
        return (total * scale).mul_(self.weight).to(x.dtype), total

    forward_cpu = forward_native  # vLLM takes the first where it compiles, else this


if current_platform.is_cpu():
    RMSNorm.register_oot(Float32ResidualRMSNorm)


class RequestStreams:
    """A number for each token of each request, which depends on the request's seed and the token's position alone.

    vLLM 0.32 draws it from the request's own generator of torch, request by request, which takes 7 us each. Here the
    numbers of a step are computed together, by SplitMix64 (Steele, Lea and Flood 2014): mix(mix(seed) + n * gamma).
    """

    GAMMA = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()  # [seed, tokens so far]
        self._of_rows: dict[int, tuple[torch.Generator, list[int]]] = {}  # the same, faster: rows change seldom

    def next_seeds(self, generators: dict[int, torch.Generator], batch_size: int) -> torch.Tensor:
        """Return the next number, of 31 bits, of each request of a batch: [B] int64.

        `generators` are those of the requests with a seed, by row; other rows draw from torch's global generator.
        """
        seeds = torch.randint(0, 2**31, (batch_size,))
        positions = [self._advance(row, generator) for row, generator in generators.items()]
        keys, counts = np.array(positions, np.uint64).reshape(-1, 2).T
        mixed = _mix(_mix(keys) + counts * self.GAMMA) >> np.uint64(33)
        seeds[list(generators)] = torch.from_numpy(mixed.astype(np.int64))
        return seeds

    def _advance(self, row: int, generator: torch.Generator) -> list[int]:
        """Return the seed of a request and the number of its tokens, this one included."""
        known = self._of_rows.get(row)
        if known is None or known[0] is not generator:
            position = self._positions.setdefault(generator, [generator.initial_seed() % 2**64, 0])
            known = self._of_rows[row] = generator, position
        known[1][1] += 1
        return known[1]


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 of each value, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def use_request_streams(sampler: TopKTopPSampler) -> None:
    """Let a sampler of a CPU engine take the noise of requests with a seed from `RequestStreams`."""
    streams, usual = RequestStreams(), sampler.forward

    def forward(
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not generators or sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
            return usual(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        seeds = streams.next_seeds(generators, len(logits))
        chosen = cast(Any, torch.ops)._C.fused_gumbel_argmax(logits.float(), seeds)
        return chosen, logits.log_softmax(-1, dtype=torch.float32)

    sampler.forward = forward
