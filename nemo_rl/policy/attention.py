"""Attention of packed sequences, and of trees of the prefixes that they share: no [T, T] mask of a pack exists.

Transformers' models look their attention up by name. The one registered here lets each token of a pack see its own
sequence alone, and computes one sequence at a time, or with PyTorch's kernel for variable lengths if the device has
it. In a tree (prefix_tree.py) a token sees the tokens of its path, so that each is computed once. The queries of a
branch and the keys of its whole path are one small attention problem: problems of nearly the same size are gathered
into one call with padding, so that many short branches take few calls, and a long branch is cut into blocks of queries.
The keys of long paths are gathered again in the backward pass, so that none of the copies is kept.
H heads, N tokens of the tree's row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_rl.distributed.float32 import attention_inputs
from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import text_decoder
from nemo_rl.policy.prefix_tree import PrefixTree
from nemo_rl.policy.token_layout import ScoredShare

PACKED_ATTENTION = "nemo_rl_within_sequences"
QUERY_BLOCK = 512  # queries of one problem whose keys begin before them
PAIRS_PER_CALL = 2**24  # pairs of a query and a key, with padding, in one call of several problems
KEPT_PAIRS = 2**26  # pairs in a tree's masks that are made once for all layers: 128 MiB in bfloat16
KEPT_KEYS_PER_TOKEN = 4  # gathered for the paths of a tree, up to which the backward pass finds them in memory
SINK_MODEL_TYPES = ("gpt_oss",)  # whose heads each have a sink, a score that takes probability and adds nothing
PROBE_WINDOW = 2  # tokens: shorter than the probes' sequences


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Positions of the sequences of right-padded rows [B, T] concatenated into one row of N tokens."""

    lengths: tuple[int, ...]  # [B]
    bounds: torch.Tensor  # [B + 1] int32: start of each, then N
    is_not_padding: torch.Tensor  # [B, T] bool
    positions: torch.Tensor  # [1, N] int64: of each token in its sequence

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> "PackedSequences":
        """Return the pack of rows of `width` columns, each with at least one token."""
        sizes = torch.tensor(lengths)
        columns = torch.arange(width)
        is_not_padding = columns < sizes.unsqueeze(1)
        positions = columns.expand(len(lengths), width)[is_not_padding].unsqueeze(0)
        bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
        return cls(tuple(lengths), bounds.to(device), is_not_padding.to(device), positions.to(device))

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a model for [B, T] tokens."""
        return {
            "input_ids": self.lay_out(token_ids),
            "position_ids": self.positions,
            "pack": self,  # passed through to the attention
        }

    def lay_out(self, column: torch.Tensor) -> torch.Tensor:
        """Return a column [B, T, ...] in the order of the packed tokens: [1, N, ...]."""
        return column[self.is_not_padding].unsqueeze(0)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [N, ...] of the packed tokens as a column [B, T, ...], 0 in padding."""
        column = values.new_zeros(*self.is_not_padding.shape, *values.shape[1:])
        column[self.is_not_padding] = values
        return column

    def packed_positions(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the positions in the pack of the M true entries of [B, T], none of which is padding: [M] int64."""
        return mask[self.is_not_padding].nonzero().squeeze(1)

    def share(self, needed: torch.Tensor) -> ScoredShare:
        return ScoredShare(self.packed_positions(needed) - 1)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let the model's decoder compute attention within the sequences of a pack; a vision tower keeps its own."""
    text_decoder(model).set_attn_implementation(PACKED_ATTENTION)


def check_packed_attention(model: PreTrainedModel, key: str) -> None:
    """Raise ConfigError for `key` if packed sequences would have other outputs than alone.

    Changes the model's attention to the one that takes a `PackedSequences`.
    """
    if (problem := packing_problem(model)) is not None:
        raise ConfigError(key, True, f"{problem}; allowed: false")


def packing_problem(model: PreTrainedModel) -> str | None:
    """Return why packed sequences would have other outputs than alone; None if they have the same.

    Changes the model's attention to the one that takes a `PackedSequences`.
    """
    kind, usual = model.config.model_type, model.config._attn_implementation
    if usual != "sdpa" and kind not in SINK_MODEL_TYPES:
        return f"models of type {kind!r} do not compute attention through sdpa"
    if "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return f"models of type {kind!r} attend within chunks of a row"
    sequences = [torch.arange(n, device=model.device) % model.config.get_text_config().vocab_size for n in (5, 3)]
    with torch.no_grad(), _short_windows(model):
        alone = torch.cat([model(input_ids=s.unsqueeze(0), use_cache=False).logits[0] for s in sequences])
        use_packed_attention(model)
        pack = PackedSequences.of((5, 3), 5, model.device)
        rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        together = model(**pack.model_inputs(rows), use_cache=False).logits[0]
    is_same = torch.allclose(together.float(), alone.float(), rtol=1e-4, atol=1e-4)
    return None if is_same else f"models of type {kind!r} mix the sequences of a pack"


def check_shared_prefixes(model: PreTrainedModel, key: str) -> None:
    """Raise ConfigError for `key` if tokens of a tree would have other outputs than in their sequences.

    The model's attention is already that of packed sequences (`check_packed_attention`).
    """
    config = model.config.get_text_config()
    kind, allowed = model.config.model_type, ("full_attention", "sliding_attention")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(allowed))
    if kind in SINK_MODEL_TYPES:
        others = ["attention sinks"]
    if others:
        problem = f"models of type {kind!r} have layers of {', '.join(others)}, for which prefixes are not shared"
        raise ConfigError(key, True, f"{problem}; allowed: false")
    sequences = [(0, 1, 2, 3, 4), (0, 1, 2, 5), (0, 1), (6, 7), (0, 1, 2, 5, 3, 1)]
    rows = [torch.tensor(tokens, device=model.device) % config.vocab_size for tokens in sequences]
    lengths = [len(row) for row in rows]
    with torch.no_grad(), _short_windows(model):
        alone = [model(**_alone(row), use_cache=False).logits[0] for row in rows]
        token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        pack = SharedPrefixes.of(token_ids, lengths)
        together = model(**pack.model_inputs(token_ids), use_cache=False).logits[0]
    for logits, positions, length in zip(alone, pack.row_positions, lengths, strict=True):
        difference = (together[positions[:length]].float() - logits.float()).abs().max().item()
        if not difference <= 1e-4 * max(1.0, logits.abs().max().item()):  # NaN too
            problem = f"models of type {kind!r} compute a shared prefix otherwise than in its sequence alone"
            raise ConfigError(key, True, f"{problem} (logits differ by {difference:.2g}); allowed: false")


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make the windows of sliding attention PROBE_WINDOW tokens in the block, so that short sequences show whether
    the attention honours them: models may pass the window to it, or put it into a mask that it is not given."""
    holders = [model.config, model.config.get_text_config(), *model.modules()]
    found = {id(holder): holder for holder in holders if type(getattr(holder, "sliding_window", None)) is int}
    before = [(holder, holder.sliding_window) for holder in found.values()]
    try:
        for holder, _ in before:
            holder.sliding_window = PROBE_WINDOW
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


def _alone(token_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a model with packed attention for one sequence."""
    return PackedSequences.of((len(token_ids),), len(token_ids), token_ids.device).model_inputs(token_ids.unsqueeze(0))


@torch.compiler.disable  # lengths differ in every pack, and each would be compiled again
def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack: "PackedSequences | SharedPrefixes",
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention that is causal within each sequence, or along each path of a tree, as transformers calls it.

    From [1, heads, N, width] to [1, N, heads, width]. `s_aux` [heads] are sinks.
    """
    dtype = value.dtype
    query, key, value = attention_inputs(query, key, value)
    if isinstance(pack, SharedPrefixes):
        return tree_attention(query, key, value, pack, sliding_window, options.get("scaling")).to(dtype), None
    if s_aux is None and has_varlen_kernel(query, value):
        return varlen_attention(query, key, value, pack, sliding_window, options.get("scaling")), None
    parts = zip(*(states.split(pack.lengths, dim=2) for states in (query, key, value)), strict=True)
    results = []
    for q, k, v in parts:
        mask = _window_mask(q.shape[2], sliding_window, q.device)
        if s_aux is not None:
            k, v, mask = _add_sinks(q, k, v, mask, s_aux)
        results.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
    return torch.cat(results, dim=1).to(dtype), None


def _add_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values with one that is zero after them, and the mask [1, H, T, T + 1], which is its score.

    `mask` [T, T] bool tells which keys a query sees; None: those before it, and its own.
    """
    heads, length = query.shape[1:3]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
    columns = scores.expand(1, heads, -1, -1), sinks.to(query.dtype).view(1, -1, 1, 1).expand(-1, -1, length, -1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat(columns, dim=-1)


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the [length, length] mask of a sequence that is longer than the window; None: causal is enough."""
    if sliding_window is None or length <= sliding_window:
        return None
    all_pairs = torch.ones(length, length, dtype=torch.bool, device=device)
    return all_pairs.tril() & all_pairs.triu(1 - sliding_window)


def has_varlen_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the device has PyTorch's kernel for variable lengths."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: PackedSequences,
    sliding_window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return flash attention within each sequence: from [1, heads, N, width] to [1, N, heads, width]."""
    longest = max(pack.lengths)
    result = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        pack.bounds,
        pack.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(result, torch.Tensor)
    return result.unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)


@dataclass(frozen=True, slots=True)
class _Problem:
    """The attention of consecutive queries, the last of which is the last key."""

    keys: np.ndarray  # [L] int64: positions in the row, in the order of the path
    num_queries: int

    @property
    def is_causal(self) -> bool:
        """Return whether every key is a query too."""
        return self.num_queries == len(self.keys)


@dataclass(slots=True)
class MaskBudget:
    """The rest of KEPT_PAIRS for the masks of a tree."""

    num_pairs: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """J attention problems of Q queries and L keys each, with padding."""

    queries: torch.Tensor  # [J * Q] int64: positions in the row
    keys: torch.Tensor  # [J * L] int64: positions in the row, in the order of the path
    depths: torch.Tensor  # [J, Q] int64: of the queries; a query sees the keys up to its depth
    num_keys: int  # L
    is_causal: bool  # queries and keys are the same
    budget: MaskBudget  # shared by all calls of the tree
    kept_masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def needs_mask(self, sliding_window: int | None) -> bool:
        """Return whether the kernel's own causal mask is not enough."""
        return not self.is_causal or (sliding_window is not None and self.num_keys > sliding_window)

    def keeps_mask(self, sliding_window: int | None, dtype: torch.dtype) -> bool:
        """Return whether the mask is kept for all layers, as it is while it fits the budget when first needed.

        Else each layer makes its own, and makes it again in the backward pass.
        """
        name = sliding_window, dtype
        if name not in self.kept_masks:
            num_pairs = self.depths.numel() * self.num_keys
            fits = num_pairs <= self.budget.num_pairs
            self.budget.num_pairs -= num_pairs if fits else 0
            self.kept_masks[name] = self._make_mask(sliding_window, dtype) if fits else None
        return self.kept_masks[name] is not None

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask added to the scores, [J, 1, Q, L]; None if the causal one is enough."""
        if not self.needs_mask(sliding_window):
            return None
        if self.keeps_mask(sliding_window, dtype):
            return self.kept_masks[sliding_window, dtype]
        return self._make_mask(sliding_window, dtype)

    def _make_mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        query, key = self.depths.unsqueeze(2), torch.arange(self.num_keys, device=self.depths.device)
        is_seen = key <= query
        if sliding_window is not None:
            is_seen &= key > query - sliding_window
        zeros = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
        return zeros.masked_fill_(~is_seen, -torch.inf).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The distinct prefixes of right-padded rows [B, T], laid out as one row of N tokens."""

    sources: torch.Tensor  # [N] int64: into the flattened [B, T]
    positions: torch.Tensor  # [1, N] int64: of each token in its sequences
    row_positions: torch.Tensor  # [B, T] int64: of each token in the row; 0 for padding
    calls: tuple[AttentionCall, ...]
    results: torch.Tensor  # [N] int64: of each token among the concatenated queries of all calls

    @classmethod
    def of(
        cls, token_ids: torch.Tensor, lengths: Sequence[int], routes: torch.Tensor | None = None
    ) -> "SharedPrefixes":
        """Return the tree of rows [B, T] with at least one token each, on their device.

        Rows share a token only if their `routes` [B, T, L, k] to experts, if any, are the same.
        """
        device, own = token_ids.device, None if routes is None else routes.cpu().numpy()
        tree = PrefixTree.of(token_ids.cpu().numpy(), lengths, own)
        calls, results = _plan(tree, device)
        sources, positions, row_positions = (
            torch.from_numpy(array).to(device) for array in (tree.sources, tree.depths, tree.positions)
        )
        return cls(sources, positions.unsqueeze(0), row_positions, calls, torch.from_numpy(results).to(device))

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a model for [B, T] tokens."""
        return {
            "input_ids": self.lay_out(token_ids),
            "position_ids": self.positions,
            "pack": self,  # passed through to the attention
        }

    def lay_out(self, column: torch.Tensor) -> torch.Tensor:
        """Return a column [B, T, ...] in the order of the tree's tokens, from their `sources`: [1, N, ...]."""
        return column.flatten(0, 1)[self.sources].unsqueeze(0)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [N, ...] of the tree's tokens as a column [B, T, ...], with any value in padding."""
        return values[self.row_positions]


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: SharedPrefixes,
    sliding_window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return causal attention along the paths of a tree: from [1, H, N, width] to [1, N, H, width].

    The keys of all paths, and a call's mask, are kept for the backward pass if they are few, else made again in it.
    """
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # [N, heads, width]
    are_few = sum(len(call.keys) for call in pack.calls) <= KEPT_KEYS_PER_TOKEN * len(pack.sources)
    parts = []
    for call in pack.calls:
        attend = partial(_attend, call, sliding_window, scaling)
        is_mask_kept = not call.needs_mask(sliding_window) or call.keeps_mask(sliding_window, query.dtype)
        is_kept = is_mask_kept and (are_few or call.is_causal)
        is_saved = is_kept or not torch.is_grad_enabled()
        parts.append(attend(*rows) if is_saved else checkpoint(attend, *rows, use_reentrant=False))
    return torch.cat(parts).index_select(0, pack.results).unsqueeze(0)


def _attend(
    call: AttentionCall,
    sliding_window: int | None,
    scaling: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of one call's queries, [J * Q, H, width], from the tree's row [N, heads, width]."""
    q, k, v = (
        states.index_select(0, at).unflatten(0, (len(call.depths), -1)).transpose(1, 2)
        for states, at in zip((query, key, value), (call.queries, call.keys, call.keys), strict=True)
    )
    if (groups := query.shape[1] // key.shape[1]) > 1:  # heads that share keys and values
        k, v = (states.repeat_interleave(groups, dim=1) for states in (k, v))
    mask = call.mask(sliding_window, query.dtype)
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return result.transpose(1, 2).flatten(0, 1)


def _plan(tree: PrefixTree, device: torch.device) -> tuple[tuple[AttentionCall, ...], np.ndarray]:
    """Return the calls that compute a tree, and the index among their queries of each token's result: [N] int64."""
    together: dict[tuple[bool, int, int], list[_Problem]] = {}
    for problem in _problems(tree):
        sizes = problem.is_causal, _rounded(problem.num_queries), _rounded(len(problem.keys))
        together.setdefault(sizes, []).append(problem)
    calls, start, budget = [], 0, MaskBudget(KEPT_PAIRS)
    results = np.zeros(tree.num_tokens, np.int64)
    for (_, num_queries, num_keys), problems in together.items():
        number = max(1, PAIRS_PER_CALL // (num_queries * num_keys))
        for first in range(0, len(problems), number):
            calls.append(_call(problems[first : first + number], start, results, device, budget))
            start += len(calls[-1].queries)
    return tuple(calls), results


def _problems(tree: PrefixTree) -> Iterator[_Problem]:
    for branch in tree.branches:
        path = tree.path(branch)
        if branch.start == 0:
            yield _Problem(path, branch.length)
            continue
        for start in range(branch.start, len(path), QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, len(path))
            yield _Problem(path[:end], end - start)


def _call(
    problems: Sequence[_Problem], start: int, results: np.ndarray, device: torch.device, budget: MaskBudget
) -> AttentionCall:
    """Return the call of some problems, and set the indices of their queries' results, from `start` on."""
    num_queries = max(problem.num_queries for problem in problems)
    num_keys = max(len(problem.keys) for problem in problems)
    queries, depths = (np.zeros((len(problems), num_queries), np.int64) for _ in range(2))
    keys = np.zeros((len(problems), num_keys), np.int64)
    for index, problem in enumerate(problems):
        size, length = problem.num_queries, len(problem.keys)
        own = problem.keys[length - size :]
        queries[index, :size] = own
        depths[index, :size] = np.arange(length - size, length)
        keys[index, :length] = problem.keys
        results[own] = np.arange(size) + start + index * num_queries
    tensors = (torch.from_numpy(array).to(device) for array in (queries.ravel(), keys.ravel(), depths))
    return AttentionCall(*tensors, num_keys=num_keys, is_causal=problems[0].is_causal, budget=budget)


def _rounded(number: int) -> int:
    """Round up by at most a quarter, to at least 32; numbers with the same result are padded to each other.

    A call of few pairs takes as long as its operations take to start, so small problems share one.
    """
    step = 1 << max(number.bit_length() - 3, 5)
    return -(-number // step) * step
