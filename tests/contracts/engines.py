"""Shared by the contract tests of engines and refits: tiny models, a policy without training, exact log-probs."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.truncation import WHOLE, Truncation
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams

VOCAB_SIZE = 300
MAX_MODEL_LEN = 512
ResultT = TypeVar("ResultT")


def tiny_model(*, tied: bool, seed: int = 0, num_key_value_heads: int = 1) -> Qwen2ForCausalLM:
    """Make a random Qwen2 with a head size that vLLM's CPU attention supports and weights large enough to matter."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).float().eval()


def save_tiny_model(directory: Path, *, tied: bool) -> Path:
    tiny_model(tied=tied).save_pretrained(directory)
    return directory


def section(*, in_process: bool = False, **vllm_kwargs: Any) -> VllmGenerationConfig:
    cfg = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16, in_process=in_process)
    kwargs = {"worker_extension_cls": "tests.contracts.worker_extension.LoadingWithSkippableRepair", **vllm_kwargs}
    return VllmGenerationConfig(vllm_cfg=cfg, vllm_kwargs=kwargs)


def request(name: str, *, tokens: Sequence[int] = (5, 6, 7), seed: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, tuple(tokens), SamplingParams(**{"max_new_tokens": 12, **sampling}), seed, name)


async def answers(engine: Any, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Results by request id; each one is a Completion or a FailedRequest."""
    results: list[Completion | FailedRequest] = [result async for result in engine.generate(requests)]
    assert len(results) == len(requests)
    return {result.request_id: result for result in results}


@torch.no_grad()
def exact_logprobs(
    model: Any, prompt: Sequence[int], sampled: Sequence[int], temperature: float, truncation: Truncation = WHOLE
) -> torch.Tensor:
    """log_softmax(logits / temperature), truncated, of the sampled tokens: [number of sampled tokens]."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = truncation(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, ids[0, len(prompt) :])
    return logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]


class UntrainedPolicy:
    """A Hugging Face model as far as weight sync needs a policy; `published` may falsify what it publishes."""

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model
        self.temperature = temperature
        self.published: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        return use((name, self.published(name, tensor.detach())) for name, tensor in self.model.named_parameters())

    async def run_on_all_ranks(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> list[ResultT]:
        return [await self.run_with_weights(use)]

    async def logprobs(self, batch: TensorDict) -> torch.Tensor:
        token_ids: torch.Tensor = batch["token_ids"]
        attention = torch.arange(token_ids.shape[1])[None] < batch["lengths"][:, None]
        with torch.no_grad():
            logits = self.model(token_ids, attention_mask=attention.long()).logits / self.temperature
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros(len(token_ids), 1), logprobs], dim=-1)
