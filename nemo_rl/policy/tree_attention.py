"""Attention over a tree of shared prefixes: a token sees the tokens of its path, so each is computed once.

The queries of a branch and the keys of its whole path are one small attention problem. Problems of nearly the same size
are gathered into one call with padding, so that many short branches take few calls, and a long branch is cut into
blocks of queries. The keys of a path are gathered again in the backward pass, so that none of the copies is kept.
H heads, N tokens of the tree's row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nemo_rl.policy.prefix_tree import PrefixTree

QUERY_BLOCK = 512  # queries of one problem whose keys begin before them
PAIRS_PER_CALL = 2**24  # of a query and a key, with padding, in one call of several problems


@dataclass(frozen=True, slots=True)
class _Problem:
    """The attention of consecutive queries, the last of which is the last key."""

    keys: np.ndarray  # [L] int64: positions in the row, in the order of the path
    num_queries: int

    @property
    def is_causal(self) -> bool:
        """Return whether every key is a query too."""
        return self.num_queries == len(self.keys)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """J attention problems of Q queries and L keys each, with padding."""

    queries: torch.Tensor  # [J * Q] int64: positions in the row
    keys: torch.Tensor  # [J * L] int64: positions in the row, in the order of the path
    depths: torch.Tensor  # [J, Q] int64: of the queries; a query sees the keys up to its depth
    num_keys: int  # L
    is_causal: bool  # queries and keys are the same
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)  # made once for all layers

    def mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the scores, [J, 1, Q, L]; None: causal is enough."""
        if self.is_causal and (sliding_window is None or self.num_keys <= sliding_window):
            return None
        if (sliding_window, dtype) not in self.masks:
            query, key = self.depths.unsqueeze(2), torch.arange(self.num_keys, device=self.depths.device)
            is_seen = key <= query
            if sliding_window is not None:
                is_seen &= key > query - sliding_window
            zeros = torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device)
            self.masks[sliding_window, dtype] = zeros.masked_fill_(~is_seen, -torch.inf).unsqueeze(1)
        return self.masks[sliding_window, dtype]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The distinct prefixes of right-padded rows [B, T], laid out as one row of N tokens."""

    sources: torch.Tensor  # [N] int64: into the flattened [B, T]
    positions: torch.Tensor  # [1, N] int64: of each token in its sequences
    row_positions: torch.Tensor  # [B, T] int64: of each token in the row; 0 for padding
    calls: tuple[AttentionCall, ...]
    results: torch.Tensor  # [N] int64: of each token among the concatenated queries of all calls

    @classmethod
    def of(cls, token_ids: torch.Tensor, lengths: Sequence[int]) -> "SharedPrefixes":
        """Return the tree of rows [B, T] with at least one token each, on their device."""
        device, tree = token_ids.device, PrefixTree.of(token_ids.cpu().numpy(), lengths)
        calls, results = _plan(tree, device)
        sources, positions, row_positions = (
            torch.from_numpy(array).to(device) for array in (tree.sources, tree.depths, tree.positions)
        )
        return cls(sources, positions.unsqueeze(0), row_positions, calls, torch.from_numpy(results).to(device))

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a model for [B, T] tokens."""
        return {
            "input_ids": token_ids.flatten()[self.sources].unsqueeze(0),
            "position_ids": self.positions,
            "pack": self,  # passed through to the attention
        }


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack: SharedPrefixes,
    sliding_window: int | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return causal attention along the paths of a tree: from [1, H, N, width] to [1, N, H, width]."""
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # [N, heads, width]
    parts = []
    for call in pack.calls:
        attend = partial(_attend, call, sliding_window, scaling)
        is_kept = call.is_causal or not torch.is_grad_enabled()
        parts.append(attend(*rows) if is_kept else checkpoint(attend, *rows, use_reentrant=False))
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
    """Return the calls that compute a tree, and where among their queries each token's result is: [N] int64."""
    together: dict[tuple[bool, int, int], list[_Problem]] = {}
    for problem in _problems(tree):
        sizes = problem.is_causal, _rounded(problem.num_queries), _rounded(len(problem.keys))
        together.setdefault(sizes, []).append(problem)
    calls, start = [], 0
    results = np.zeros(tree.num_tokens, np.int64)
    for (_, num_queries, num_keys), problems in together.items():
        number = max(1, PAIRS_PER_CALL // (num_queries * num_keys))
        for first in range(0, len(problems), number):
            part = problems[first : first + number]
            calls.append(_call(part, start, results, device))
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


def _call(problems: Sequence[_Problem], start: int, results: np.ndarray, device: torch.device) -> AttentionCall:
    """Return the call of some problems, and set where the results of their queries are, from `start` on."""
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
    return AttentionCall(*tensors, num_keys=num_keys, is_causal=problems[0].is_causal)


def _rounded(number: int) -> int:
    """Round up by at most a quarter, to at least 8; numbers with the same result are padded to each other."""
    step = 1 << max(number.bit_length() - 3, 3)
    return -(-number // step) * step
