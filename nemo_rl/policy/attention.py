"""Attention of packed sequences: each token sees its own sequence alone, and no [T, T] mask of the pack exists.

Transformers' models look their attention up by name; the one registered here computes a pack one sequence at a time,
or with PyTorch's kernel for variable lengths where the device has it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_rl.errors import ConfigError
from nemo_rl.policy.tree_attention import SharedPrefixes, tree_attention

PACKED_ATTENTION = "nemo_rl_within_sequences"
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
            "input_ids": token_ids[self.is_not_padding].unsqueeze(0),
            "position_ids": self.positions,
            "pack": self,  # passed through to the attention
        }

    def packed_positions(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the positions in the pack of the M true entries of [B, T], none of which is padding: [M] int64."""
        return mask[self.is_not_padding].nonzero().squeeze(1)


def check_packed_attention(model: PreTrainedModel, key: str) -> None:
    """Raise ConfigError for `key` where packed sequences would not have the outputs that they have alone.

    Changes the model's attention to the one that takes a `PackedSequences`.
    """
    kind, usual = model.config.model_type, model.config._attn_implementation
    if usual != "sdpa":
        raise ConfigError(key, True, f"models of type {kind!r} do not compute attention through sdpa; allowed: false")
    if "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        raise ConfigError(key, True, f"models of type {kind!r} attend within chunks of a row; allowed: false")
    sequences = [torch.arange(n, device=model.device) % model.config.get_text_config().vocab_size for n in (5, 3)]
    with torch.no_grad(), _short_windows(model):
        alone = torch.cat([model(input_ids=s.unsqueeze(0), use_cache=False).logits[0] for s in sequences])
        model.set_attn_implementation(PACKED_ATTENTION)
        pack = PackedSequences.of((5, 3), 5, model.device)
        rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        together = model(**pack.model_inputs(rows), use_cache=False).logits[0]
    if not torch.allclose(together.float(), alone.float(), rtol=1e-4, atol=1e-4):
        raise ConfigError(key, True, f"models of type {kind!r} mix the sequences of a pack; allowed: false")


def check_shared_prefixes(model: PreTrainedModel, key: str) -> None:
    """Raise ConfigError for `key` where tokens of a tree would not have the outputs that they have in their sequences.

    The model's attention is already that of packed sequences (`check_packed_attention`).
    """
    config = model.config.get_text_config()
    kind, allowed = model.config.model_type, ("full_attention", "sliding_attention")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(allowed))
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
    pack: PackedSequences | SharedPrefixes,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention that is causal within each sequence, or along each path of a tree, as transformers calls it.

    From [1, heads, N, width] to [1, N, heads, width].
    """
    if isinstance(pack, SharedPrefixes):
        return tree_attention(query, key, value, pack, sliding_window, options.get("scaling")), None
    if has_varlen_kernel(query, value):
        return varlen_attention(query, key, value, pack, sliding_window, options.get("scaling")), None
    parts = zip(*(states.split(pack.lengths, dim=2) for states in (query, key, value)), strict=True)
    results = []
    for q, k, v in parts:
        mask = _window_mask(q.shape[2], sliding_window, q.device)
        results.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
    return torch.cat(results, dim=1), None


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
