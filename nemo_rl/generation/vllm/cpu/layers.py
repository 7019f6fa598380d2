"""vLLM's CPU layers with float32 logits, routers and residual stream, and cheap random numbers per seeded request.

In a worker that imports this module vLLM makes these layers instead of its own; `use_request_streams` changes the
sampler.
"""

from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from nemo_rl.distributed.float32 import float32_product


@LogitsProcessor.register_oot
class Float32LogitsProcessor(LogitsProcessor):
    """vLLM's logits; with `head_dtype: float32` vLLM 0.32 casts the whole weight for every step on a CPU."""

    def _apply_head(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        is_plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod) and embedding_bias is None
        if self.head_dtype == torch.float32 and is_plain:
            weight = cast(torch.Tensor, lm_head.weight)  # a quantised head may lack it
            if hidden_states.dtype == weight.dtype == torch.bfloat16:
                return float32_product(hidden_states, weight)
        return super()._apply_head(lm_head, hidden_states, embedding_bias)


@RMSNorm.register_oot
class Float32ResidualRMSNorm(RMSNorm):
    """vLLM's norm; the sum that it returns for the next norm stays float32, as in the policy.

    vLLM 0.32 rounds it to the model's dtype. Other norm classes, e.g. Gemma's, stay as they are.
    """

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual [..., H] in the weights' dtype, and the sum; without a residual that of x."""
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        total = x.float() if residual is None else residual.float() + x
        scale = total.pow(2).mean(-1, keepdim=True).add_(self.variance_epsilon).rsqrt_()
        normed = (total * scale).mul_(self.weight).to(self.weight.dtype)
        return normed if residual is None else (normed, total)

    forward_cpu = forward_native  # vLLM calls forward_native if it compiles, else forward_cpu


@GateLinear.register_oot
class Float32GateLinear(GateLinear):
    """vLLM's router of experts, with weights and logits in float32, as in the policy.

    vLLM 0.32 rounds both to the model's dtype, unless the model asks otherwise.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "params_dtype": torch.float32, "out_dtype": torch.float32})

    def set_out_dtype(self, out_dtype: torch.dtype) -> None:
        """Do nothing: it is float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.nn.Parameter | None]:
        return super().forward(x.float())


class RequestStreams:
    """A random number per token of a request, a function of the request's seed and the token's position alone.

    vLLM 0.32 draws it from a torch generator per request, which takes 7 us each. Here the numbers of a step are
    computed together, by SplitMix64 (Steele, Lea and Flood 2014): mix(mix(seed) + n * gamma).
    """

    GAMMA = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()  # [seed, tokens so far]
        self._by_row: dict[int, tuple[torch.Generator, list[int]]] = {}  # a cache by row, since rows rarely change

    def next_seeds(self, generators: dict[int, torch.Generator], batch_size: int) -> torch.Tensor:
        """Return the next 31-bit number of each request in a batch: [B] int64.

        `generators` belong to the seeded requests, by row; other rows draw from torch's global generator.
        """
        seeds = torch.randint(0, 2**31, (batch_size,))
        positions = [self._advance(row, generator) for row, generator in generators.items()]
        keys, counts = np.array(positions, np.uint64).reshape(-1, 2).T
        mixed = _mix(_mix(keys) + counts * self.GAMMA) >> np.uint64(33)
        seeds[list(generators)] = torch.from_numpy(mixed.astype(np.int64))
        return seeds

    def _advance(self, row: int, generator: torch.Generator) -> list[int]:
        """Return the seed of a request and the number of its tokens, this one included."""
        known = self._by_row.get(row)
        if known is None or known[0] is not generator:
            position = self._positions.setdefault(generator, [generator.initial_seed() % 2**64, 0])
            known = self._by_row[row] = generator, position
        known[1][1] += 1
        return known[1]


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 finalizer of each value, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def use_request_streams(sampler: TopKTopPSampler) -> None:
    """Let the sampler take the noise of seeded requests from `RequestStreams`."""
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
