"""The output layer of vLLM's CPU engine with float32 logits; vLLM makes it in place of its own in workers that import
this module."""

from typing import cast

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from nemo_rl.distributed.float32_product import float32_product


@LogitsProcessor.register_oot
class Float32LogitsProcessor(LogitsProcessor):
    """vLLM's logits; on a CPU with `head_dtype: float32`, vLLM 0.32 casts the whole weight for every step."""

    def _apply_head(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        weight = cast(torch.Tensor, lm_head.weight)
        is_exact = hidden_states.dtype == weight.dtype == torch.bfloat16
        is_plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod) and embedding_bias is None
        if self.head_dtype == torch.float32 and hidden_states.device.type == "cpu" and is_exact and is_plain:
            return float32_product(hidden_states, weight)
        return super()._apply_head(lm_head, hidden_states, embedding_bias)
