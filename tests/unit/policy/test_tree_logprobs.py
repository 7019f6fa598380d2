"""Scores and gradients of sequences that share prefixes are those of each sequence computed whole."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from nemo_rl.errors import ConfigError
from nemo_rl.loss_types import RequiredScores
from nemo_rl.policy import attention
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.tree_logprobs import SharedPrefixLogprobs, TreeQueries
from nemo_rl.policy.truncation import Truncation
from tests.unit.policy.test_logprobs import LargestTensor
from tests.unit.policy.tiny import MODELS, SIZES, make_batch, make_sharing_batch, with_sampling_mask

LENGTHS = [9, 5, 12, 3, 12, 9, 7, 12]
KEYS: dict[str, Any] = {
    "packing_key": "policy.sequence_packing.enabled",
    "sharing_key": "policy.sequence_packing.share_prefixes",
}


def scores_and_gradients(model: PreTrainedModel, *, shares: bool, **options: Any) -> tuple[Any, ...]:
    batch = make_sharing_batch(LENGTHS)
    settings: dict[str, Any] = {"temperature": 0.7, "chunk_size": options.pop("chunk_size", 4)}
    module = SharedPrefixLogprobs(model, **settings, **KEYS) if shares else CausalLogprobs(model, **settings)
    module.truncation = options.pop("truncation", module.truncation)
    if options.pop("recomputed", False):
        recompute_activations(decoder_layers(model))
    wanted = RequiredScores(candidates="c", entropy=True, topk=3)
    candidates = torch.tensor([3, -1, 7]).expand(len(LENGTHS), max(LENGTHS), 3)
    if options.pop("own_candidates", False):
        candidates = torch.randint(0, 37, candidates.shape, generator=torch.Generator().manual_seed(3))
    lengths = batch["lengths"].tolist()
    columns = dict(with_sampling_mask(batch, 37)["columns"].items()) if options.pop("columns", False) else None
    scores = module(batch["token_ids"], batch["token_mask"] > 0, wanted, candidates, lengths, columns)
    assert scores.candidates is not None
    assert scores.entropy is not None
    assert scores.topk is not None
    weight = batch["advantages"] / batch["token_mask"].sum()
    of_candidates = (scores.candidates * weight.unsqueeze(-1)).sum()
    ((scores.logprobs * weight).sum() + of_candidates + (scores.entropy * weight).sum()).backward()
    gradients = [p.grad for p in model.parameters()]
    differs = scores.sampling_mask_differs
    return scores.logprobs, scores.candidates, scores.entropy, scores.topk.logprobs, differs, gradients


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        ("qwen3", {"recomputed": True}),
        ("gemma2", {"chunk_size": None}),
        ("llama", {"own_candidates": True}),
        ("llama", {"own_candidates": True, "chunk_size": 1}),
        ("llama", {"truncation": Truncation(top_p=0.8, top_k=9)}),
        ("llama", {"truncation": Truncation(top_p=0.8, top_k=9), "columns": True}),
        ("llama", {"truncation": Truncation(top_p=0.8), "columns": True, "own_candidates": True, "chunk_size": 1}),
    ],
)
def test_scores_and_gradients_are_those_without_sharing(name: str, options: dict[str, Any]) -> None:
    """Of gemma2 too, whose windows of 4 tokens are shorter than a sequence."""
    results = []
    for shares in (False, True):
        torch.manual_seed(0)
        results.append(scores_and_gradients(MODELS[name](), shares=shares, **options))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limits", [{"QUERY_BLOCK": 2}, {"PAIRS_PER_CALL": 1}, {"KEPT_PAIRS": 0}])
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_blocks_and_calls_of_attention_do_not_change_it(
    name: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for shares in (False, True):
        torch.manual_seed(0)
        for limit, value in limits.items():
            monkeypatch.setattr(attention, limit, value)
        results.append(scores_and_gradients(MODELS[name](), shares=shares))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [0, 100, 10_000])
def test_kept_masks_of_a_tree_are_bounded(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of 8 tokens after 24, 12 and 5 others, each a call of its own."""
    monkeypatch.setattr(attention, "KEPT_PAIRS", limit)
    monkeypatch.setattr(attention, "PAIRS_PER_CALL", 1)
    rows = torch.arange(32).repeat(4, 1)
    for row, start in enumerate((24, 12, 5), start=1):
        rows[row, start:] += 100 * row
    pack = attention.SharedPrefixes.of(rows, [32, 32, 20, 13])
    branches = [call for call in pack.calls if not call.is_causal]
    assert len(branches) == 3
    assert all(call.mask(None, torch.float32) is not None for call in branches)
    kept = count_kept(pack)
    assert kept <= limit
    assert (kept == 0) == (limit < 10_000)


def count_kept(pack: attention.SharedPrefixes) -> int:
    return sum(mask.numel() for call in pack.calls for mask in call.kept_masks.values() if mask is not None)


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (32 * 32 - 1, 0), (32 * 32, 32 * 32), (10_000, 2 * 32 * 32)])
def test_masks_of_windows_in_a_first_branch_are_bounded(limit: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of 32 tokens: causal alone needs no mask, a window of 4 and one of 5 need one each."""
    monkeypatch.setattr(attention, "KEPT_PAIRS", limit)
    monkeypatch.setattr(
        attention, "checkpoint", lambda *args, **options: (again.append(args[0]), args[0](*args[1:]))[1]
    )
    again: list[Any] = []
    pack = attention.SharedPrefixes.of(torch.arange(32).unsqueeze(0), [32])
    states = [torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3)]
    for window in (None, 4, 5, 4, 5):
        attention.tree_attention(states[0], states[1], states[2], pack, window)
    assert count_kept(pack) == kept
    assert len(again) == (4 if kept == 0 else 2 if kept == 32 * 32 else 0)


@pytest.mark.parametrize(("limit", "is_gathered_again"), [(0, True), (1000, False)])
def test_keys_of_paths_are_kept_while_they_are_few(
    limit: int, is_gathered_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[bool] = []

    def counting(function: Any, *arguments: Any, **options: Any) -> Any:
        gathered.append(True)
        return checkpoint(function, *arguments, **options)

    monkeypatch.setattr(attention, "checkpoint", counting)
    monkeypatch.setattr(attention, "KEPT_KEYS_PER_TOKEN", limit)
    results = []
    for shares in (False, True):
        torch.manual_seed(0)
        results.append(scores_and_gradients(MODELS["qwen2"](), shares=shares))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert bool(gathered) is is_gathered_again


def test_head_is_computed_once_for_each_position_that_predicts() -> None:
    """Rows (1, 2, 7), (1, 2, 8), (1, 2, 7): position 1 predicts 7 and 8, and 0 is not asked."""
    row_positions = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 2]])
    needed = torch.tensor([[False, False, True]] * 3)
    queries = TreeQueries.of(row_positions, needed, None)
    assert queries.predictors.tolist() == [1]
    assert queries.entries.tolist() == [0, 1]
    assert queries.further.tolist() == [0]
    assert queries.of_entry.tolist() == [0, 1, 0]


def test_model_and_head_see_each_distinct_prefix_once() -> None:
    torch.manual_seed(0)
    module = SharedPrefixLogprobs(MODELS["llama"](), temperature=1.0, chunk_size=4, **KEYS)
    rows: dict[str, list[int]] = {"embedded": [], "logits": []}
    embeddings, head = module.model.get_input_embeddings(), module.model.get_output_embeddings()
    assert isinstance(embeddings, torch.nn.Module)
    assert isinstance(head, torch.nn.Module)
    embeddings.register_forward_hook(lambda _, inputs, output: rows["embedded"].append(inputs[0].numel()))
    head.register_forward_hook(lambda _, inputs, output: rows["logits"].append(len(inputs[0])))
    batch = make_sharing_batch(LENGTHS)
    lengths = batch["lengths"].tolist()
    with torch.no_grad():
        module(batch["token_ids"], batch["token_mask"] > 0, lengths=lengths)
    tokens = [row[:length] for row, length in zip(batch["token_ids"].tolist(), lengths, strict=True)]
    prefixes = {tuple(row[:end]) for row in tokens for end in range(1, len(row) + 1)}
    predicting = {tuple(row[:end]) for row in tokens for end in range(2, len(row))}
    assert rows["embedded"] == [len(prefixes)]
    assert len(prefixes) < sum(lengths) / 1.5
    assert sum(rows["logits"]) == len(predicting)
    assert max(rows["logits"]) <= 4


def test_attention_of_a_tree_never_holds_all_pairs_of_tokens() -> None:
    """128 sequences of 16 tokens, 8 of them shared: scores of all pairs would be 4 heads x 1032 x 1032."""
    module = SharedPrefixLogprobs(MODELS["qwen2"](), temperature=1.0, chunk_size=32, **KEYS)
    token_ids = torch.randint(3, 37, (128, 16), generator=torch.Generator().manual_seed(0))
    token_ids[:, :8] = 5
    with LargestTensor() as seen:
        module(token_ids, torch.ones_like(token_ids, dtype=torch.bool), lengths=[16] * 128).logprobs.sum().backward()
    assert seen.numel <= 2048 * 48  # the width of the MLP


def test_gathered_keys_are_not_kept_for_the_backward_pass() -> None:
    """32 sequences of 64 shared tokens and one of their own: keys of all paths would be 32 x 65 x 16 numbers."""
    module = SharedPrefixLogprobs(MODELS["qwen2"](), temperature=1.0, chunk_size=32, **KEYS)
    token_ids = torch.full((32, 65), 5)
    token_ids[:, 64] = torch.arange(3, 35)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        module(token_ids, torch.ones_like(token_ids, dtype=torch.bool), lengths=[65] * 32).logprobs.sum().backward()
    assert max(kept) < 32 * 65 * 16


def test_nothing_needed_has_gradients_of_zero() -> None:
    module = SharedPrefixLogprobs(MODELS["llama"](), temperature=1.0, chunk_size=4, **KEYS)
    batch = make_batch([2])
    module(batch["token_ids"], batch["token_mask"] > 0, lengths=[2]).logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_sharing_is_refused_where_a_layer_keeps_a_state() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match=r"share_prefixes = True: models of type 'llama' have layers of linear_att"):
        SharedPrefixLogprobs(model, temperature=1.0, chunk_size=None, **KEYS)


def test_sharing_is_refused_where_outputs_depend_on_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attention ignores the path: here one that sees only the keys of a branch's own tokens."""
    monkeypatch.setattr(attention.PrefixTree, "path", lambda tree, branch: tree.positions[0, : branch.length])
    with pytest.raises(ConfigError, match="models of type 'qwen2' compute a shared prefix otherwise"):
        SharedPrefixLogprobs(MODELS["qwen2"](), temperature=1.0, chunk_size=None, **KEYS)


def test_models_that_cannot_be_packed_cannot_share() -> None:
    model = MambaForCausalLM(
        MambaConfig(vocab_size=37, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    )
    with pytest.raises(ConfigError, match=r"policy\.sequence_packing\.enabled = True: models of type 'mamba'"):
        SharedPrefixLogprobs(model, temperature=1.0, chunk_size=None, **KEYS)
