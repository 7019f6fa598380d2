"""Tiny random models, batches and losses that the policy's tests share."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.optimizers import make_optimizer, make_scheduler

ResultT = TypeVar("ResultT")

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large enough for log-probs that differ from each other
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EVEN = {**SIZES, "vocab_size": VOCABULARY + 1}  # which two ranks divide evenly; make_batch never draws the last token


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**EVEN, head_dim=8, tie_word_embeddings=True))


def gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, sliding_window=4))


def cohere() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": qwen2,
    "llama": llama,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "cohere": cohere,
    "granite": granite,
    "gpt2": gpt2,
}


def qwen3_moe() -> PreTrainedModel:
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 8,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EVEN, **experts, tie_word_embeddings=False))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def deepseek_v3() -> PreTrainedModel:
    """Return a model with a dense layer, a shared expert, 2 groups of 4 experts, and biases that change choices."""
    experts: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
    }
    groups: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
    ranks: dict[str, Any] = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    sizes = SIZES | {"num_key_value_heads": 4}
    config = DeepseekV3Config(**sizes, **experts, **groups, **ranks, first_k_dense_replace=1, rope_interleave=True)
    model = DeepseekV3ForCausalLM(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.linspace(-0.1, 0.1, len(bias)))
    return model


def gpt_oss() -> PreTrainedModel:
    """Return a model with attention sinks, a window of 4 tokens in its first layer, biased experts and router, and
    gates that are often clamped."""
    experts: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
    sizes = SIZES | {"head_dim": 8, "sliding_window": 4, "max_position_embeddings": 4096}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **experts))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


STACKED_MODELS = {"gpt_oss": gpt_oss}  # whose files hold the experts of a layer as one tensor
EXPERT_MODELS = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "deepseek_v3": deepseek_v3}


def saved_model(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    path = directory / name
    (MODELS | EXPERT_MODELS | STACKED_MODELS)[name]().save_pretrained(path)
    return path


def make_batch(lengths: list[int], *, group_size: int = 2, seed: int = 1) -> TensorDict:
    """Random tokens; the first two of each sample are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    columns = torch.arange(shape[1])
    token_ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    inside = columns < torch.tensor(lengths).unsqueeze(1)
    rows = torch.arange(len(lengths))
    return TensorDict(
        {
            "token_ids": token_ids * inside,
            "token_mask": (inside & (columns >= 2)).float(),
            "lengths": torch.tensor(lengths),
            "sample_mask": torch.ones(len(lengths)),
            "trajectory_id": rows,
            "group_id": rows // group_size,
            "advantages": torch.randn(shape, generator=generator),
            "reward_components": TensorDict({"r": torch.ones(len(lengths))}, batch_size=[len(lengths)]),
        },
        batch_size=[len(lengths)],
    )


class WeightedNLL:
    """sum(-advantage * log-prob * mask) / number of valid tokens."""

    required_keys = frozenset({"advantages"})
    required_scores = RequiredScores()

    def __call__(
        self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        logprobs = scores.logprobs
        mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
        loss = -(batch["advantages"] * logprobs * mask).sum() / normalizer.num_valid_tokens
        return loss, {
            "mean_logprob": Metric((logprobs * mask).sum() / normalizer.num_valid_tokens),
            "lowest": Metric(logprobs.min(), "min"),
            "num_micro_batches": Metric(torch.ones(())),
        }


class OfAllScores:
    """Log-probs of some candidates, the entropy and the most likely tokens, each with a gradient of its own."""

    required_keys = frozenset({"candidate_ids"})
    required_scores = RequiredScores(candidates="candidate_ids", entropy=True, topk=3)

    def __call__(
        self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        assert scores.candidates is not None
        assert scores.entropy is not None
        assert scores.topk is not None
        weight = (batch["token_mask"] * batch["sample_mask"].unsqueeze(-1) / normalizer.num_valid_tokens).unsqueeze(-1)
        parts = {
            "candidates": (scores.candidates * weight).sum(),
            "entropy": (scores.entropy.unsqueeze(-1) * weight).sum(),
            "most_likely": (scores.topk.logprobs * weight * torch.tensor([0.3, 0.2, 0.1])).sum(),
        }
        loss = 0.1 * parts["candidates"] - 0.5 * parts["entropy"] + parts["most_likely"]
        return loss, {name: Metric(value) for name, value in parts.items()}


class Exploding(WeightedNLL):
    """A loss whose gradient is not finite."""

    def __call__(
        self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        loss, metrics = super().__call__(scores, batch, normalizer)
        return loss * float("inf"), metrics


def plain_logprobs(
    model: PreTrainedModel, batch: TensorDict, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None
) -> torch.Tensor:
    """What Hugging Face gives with an attention mask and whole logits, one sample at a time: [B, T].

    A token with a recorded set is scored on it in place of the model's own truncation.
    """
    result = torch.zeros(batch["token_ids"].shape)
    for row, length in enumerate(batch["lengths"].tolist()):
        ids = batch["token_ids"][row : row + 1, :length]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        whole = logits[0, :-1] / temperature
        logits = without_unlikely(whole, ids[0, 1:, None], top_p, top_k)
        if "columns" in batch and "sampling_mask" in batch["columns"]:
            logits = torch.stack(
                [
                    own if max(recorded) < 0 else _only(every, [token for token in recorded if token >= 0])
                    for own, every, recorded in zip(
                        logits, whole, batch["columns", "sampling_mask"][row, 1:length].tolist(), strict=True
                    )
                ]
            )
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        result = result.index_put((torch.tensor(row), torch.arange(1, length)), logprobs)
    return result * batch["token_mask"]


def _only(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf).index_put((torch.tensor(tokens),), logits[tokens])


def with_sampling_mask(batch: TensorDict, vocab_size: int) -> TensorDict:
    """Return the batch with the sets that two of three tokens were drawn from: 1 to 4 tokens, with the token itself."""
    generator = torch.Generator().manual_seed(5)
    size = tuple(batch["token_ids"].shape)
    sets = torch.randint(vocab_size, (*size, 4), generator=generator, dtype=torch.int32)
    sets = sets.where(torch.arange(4) < torch.randint(1, 5, (*size, 1), generator=generator), -1)
    sets[..., 0] = batch["token_ids"]
    sets[torch.rand(size, generator=generator) < 1 / 3] = -1
    columns = TensorDict({"sampling_mask": sets}, batch_size=batch.batch_size)
    return batch.clone().update({"columns": columns})


def without_unlikely(logits: torch.Tensor, targets: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    """Truncate [N, V] logits as Hugging Face does, but for the targets [N, 1]."""
    left = logits if top_k is None else TopKLogitsWarper(top_k)(targets, logits)  # type: ignore[arg-type]
    left = left if top_p == 1 else TopPLogitsWarper(top_p)(targets, left)  # type: ignore[arg-type]
    return left.scatter(1, targets, logits.gather(1, targets))


def learning_rates(config: PolicyConfig, num_steps: int) -> list[float]:
    """Return the learning rate of each of the first steps of the configured optimizer and schedule."""
    optimizer = make_optimizer(config, [torch.nn.Parameter(torch.ones(2))])
    scheduler = make_scheduler(config, optimizer)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


class ThreadShard:
    """A `VocabularyShard` whose ranks are threads."""

    def __init__(self, first: int, rank: int, barrier: threading.Barrier, board: dict[int, torch.Tensor]) -> None:
        self.first, self._rank, self._barrier, self._board = first, rank, barrier, board

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        self._board[self._rank] = values
        self._barrier.wait(timeout=30)
        parts = [self._board[rank].clone() for rank in range(self._barrier.parties)]
        self._barrier.wait(timeout=30)
        return parts

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(values)).sum(0)


def over_shards(function: Callable[..., ResultT], logits: torch.Tensor, sizes: Sequence[int]) -> list[ResultT]:
    """Return `function(part, shard)` of each rank, the logits [N, V] split by columns; the ranks are threads."""
    barrier, board = threading.Barrier(len(sizes)), dict[int, torch.Tensor]()
    firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    shards = [ThreadShard(first, rank, barrier, board) for rank, first in enumerate(firsts)]
    with ThreadPoolExecutor(len(sizes)) as threads:
        return list(threads.map(function, logits.split(tuple(sizes), dim=1), shards))


def make_sharing_batch(lengths: list[int], *, group_size: int = 4, seed: int = 1) -> TensorDict:
    """Return `make_batch` in which the rows of a group share a prompt, and some of them sampled tokens too.

    Row i of a group has the tokens of its first row in the first 3, 7 or 2 columns, or in all of them.
    """
    batch = make_batch(lengths, group_size=group_size, seed=seed)
    token_ids = batch["token_ids"]
    for row, length in enumerate(lengths):
        leader = row - row % group_size
        shared = min((3, 7, 2, length)[row % 4], length, lengths[leader])
        token_ids[row, :shared] = token_ids[leader, :shared]
    token_ids[:, 0] = 4  # as a chat template begins
    return batch
