import inspect
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from nemo_rl.errors import ConfigError
from nemo_rl.loss_types import RequiredScores
from nemo_rl.policy import attention
from nemo_rl.policy.attention import PackedSequences, check_packed_attention, check_shared_prefixes
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.test_logprobs import LargestTensor
from tests.unit.policy.tiny import MODELS, SIZES, STACKED_MODELS, make_batch

LENGTHS = [9, 5, 12, 3]
KEY = "policy.sequence_packing.enabled"


def test_pack_of_three_rows() -> None:
    pack = PackedSequences.of((3, 1, 2), 4, torch.device("cpu"))
    token_ids = torch.tensor([[7, 8, 9, 0], [5, 0, 0, 0], [3, 4, 0, 0]])
    inputs = pack.model_inputs(token_ids)
    assert inputs["input_ids"].tolist() == [[7, 8, 9, 5, 3, 4]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert pack.bounds.tolist() == [0, 3, 4, 6]
    needed = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    assert pack.packed_positions(needed).tolist() == [2, 5]


def scores_and_gradients(model: PreTrainedModel, *, packing_key: str | None, **options: Any) -> tuple[Any, ...]:
    batch = make_batch(LENGTHS)
    module = CausalLogprobs(model, temperature=0.7, chunk_size=options.pop("chunk_size", 4), packing_key=packing_key)
    if options.pop("recomputed", False):
        recompute_activations(decoder_layers(model))
    wanted = RequiredScores(candidates="c", entropy=True, topk=3)
    candidates = torch.tensor([3, -1, 7]).expand(len(LENGTHS), max(LENGTHS), 3)
    lengths = batch["lengths"].tolist()
    scores = module(batch["token_ids"], batch["token_mask"] > 0, wanted, candidates, lengths)
    assert scores.candidates is not None
    assert scores.entropy is not None
    assert scores.topk is not None
    ((scores.logprobs * batch["advantages"]).sum() + scores.candidates.mean() + scores.entropy.mean()).backward()
    gradients = [p.grad for p in model.parameters()]
    return scores.logprobs, scores.candidates, scores.entropy, scores.topk.logprobs, gradients


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in [*MODELS, "gpt_oss"]),
        ("qwen3", {"recomputed": True}),
        ("gemma2", {"chunk_size": None}),
    ],
)
def test_packed_scores_and_gradients_are_the_padded_ones(name: str, options: dict[str, Any]) -> None:
    """Of gemma2 too, whose windows of 4 tokens are shorter than a sequence, and of gpt-oss with its sinks."""
    results = []
    for packing_key in (None, KEY):
        torch.manual_seed(0)
        results.append(scores_and_gradients((MODELS | STACKED_MODELS)[name](), packing_key=packing_key, **options))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)


def documented_varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute what torch documents of `varlen_attn`, from all pairs of tokens of each sequence."""
    bound = inspect.signature(varlen_attn).bind(query, key, value, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    starts, ends = given["cu_seq_q"].tolist()[:-1], given["cu_seq_q"].tolist()[1:]
    assert given["cu_seq_q"].dtype == torch.int32
    assert given["cu_seq_k"].tolist() == given["cu_seq_q"].tolist()
    assert given["max_q"] == given["max_k"] == max(end - start for start, end in zip(starts, ends, strict=True))
    assert given["enable_gqa"]
    left, right = given["window_size"]
    scale = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    results = []
    for start, end in zip(starts, ends, strict=True):
        of_sequence = (states[start:end].transpose(0, 1) for states in (query, key, value))
        q, k, v = (states.repeat_interleave(query.shape[1] // states.shape[0], dim=0) for states in of_sequence)
        distance = torch.arange(end - start).unsqueeze(1) - torch.arange(end - start)  # from key to query
        is_seen = (distance >= -right) & ((distance <= left) | (left < 0))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~is_seen, -torch.inf)
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "granite", "gpt2"])
def test_kernel_for_variable_lengths_gives_what_the_plain_loop_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of heads, gemma2's windows of 4 tokens, and scales that are not those of the width."""
    results = []
    for has_kernel in (False, True):
        monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value, has=has_kernel: has)
        monkeypatch.setattr(attention, "varlen_attn", documented_varlen_attn)
        torch.manual_seed(0)
        results.append(scores_and_gradients(MODELS[name](), packing_key=KEY))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)


def test_attention_of_a_pack_never_holds_all_pairs_of_tokens() -> None:
    """128 sequences of 16 tokens: scores of all pairs would be 4 heads x 2048 x 2048."""
    module = CausalLogprobs(MODELS["qwen2"](), temperature=1.0, chunk_size=32, packing_key=KEY)
    token_ids = torch.ones(128, 16, dtype=torch.int64)
    with LargestTensor() as seen:
        module(token_ids, torch.ones_like(token_ids, dtype=torch.bool), lengths=[16] * 128).logprobs.sum().backward()
    assert seen.numel <= 2048 * 48  # the width of the MLP


def test_packing_is_refused_where_attention_is_the_models_own() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.set_attn_implementation("eager")
    with pytest.raises(
        ConfigError, match=r"policy\.sequence_packing\.enabled = True: models of type 'llama' do not compute"
    ):
        CausalLogprobs(model, temperature=1.0, chunk_size=None, packing_key=KEY)


def test_prefixes_are_not_shared_where_attention_has_sinks() -> None:
    with pytest.raises(
        ConfigError, match=r"share_prefixes = True: models of type 'gpt_oss' have layers of attention sinks"
    ):
        check_shared_prefixes(STACKED_MODELS["gpt_oss"](), "policy.sequence_packing.share_prefixes")


def test_packing_is_refused_where_sequences_are_mixed() -> None:
    model = MambaForCausalLM(
        MambaConfig(vocab_size=37, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    )
    with pytest.raises(ConfigError, match=r"policy\.sequence_packing\.enabled = True: models of type 'mamba'"):
        CausalLogprobs(model, temperature=1.0, chunk_size=None, packing_key=KEY)


def test_a_window_that_is_in_the_mask_alone_is_refused_however_long_it_is() -> None:
    """Qwen 2 MoE does not pass its window to the attention, so a pack would attend to all earlier tokens."""
    sizes = {
        **SIZES,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    model = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**sizes, layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=4096)
    )
    with pytest.raises(ConfigError, match="mix the sequences of a pack"):
        CausalLogprobs(model, temperature=1.0, chunk_size=None, packing_key=KEY)
    assert model.config.sliding_window == 4096


class Leaky(LlamaForCausalLM):
    """Scales the logits of packed sequences by 1 + `relative`, and adds `leak`."""

    leak, relative = 0.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if "pack" in kwargs:
            output.logits = output.logits * (1 + self.relative) + self.leak
        return output


@pytest.mark.parametrize(
    ("leak", "relative", "is_refused"),
    [(5e-5, 0, False), (3e-4, 0, True), (-3e-4, 0, True), (math.nan, 0, True), (0, 5e-5, False), (0, 1e-2, True)],
)
def test_packing_is_refused_above_a_difference_that_rounding_may_have(
    leak: float, relative: float, is_refused: bool
) -> None:
    torch.manual_seed(0)
    model = Leaky(LlamaConfig(**{**SIZES, "initializer_range": 0.02}))  # logits below 1
    model.leak, model.relative = leak, relative
    with pytest.raises(ConfigError, match="mix the sequences") if is_refused else nullcontext():
        check_packed_attention(model, KEY)
