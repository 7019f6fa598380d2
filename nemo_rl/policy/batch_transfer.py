"""Batches on their way from the driver to the ranks, and the scored rows on their way back.

Arrays keep out of the pickled stream, so that Ray's object store holds their bytes once per node and readers map them.
Whole numbers that fit are sent as int32: token ids, lengths and indices always do.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorCollection, TensorDict, is_non_tensor

from nemo_rl import batch as keys
from nemo_rl.errors import PolicyError
from nemo_rl.types import TrainingBatch

INT32 = torch.iinfo(torch.int32)
BYTES_PER_TOKEN = 40  # ten entries of 4 bytes, more than any algorithm's batch has
BYTES_PER_CANDIDATE = 8  # a token id and its log-prob
BYTES_PER_SET_ENTRY = 4  # a token id


def bytes_of_step(num_samples: int, max_tokens: int, *, topk: int = 0, set_size: int = 0) -> int:
    """Return the peak bytes in the object store: a batch and the scores from which it was made.

    `set_size`: of the largest set that a token was drawn from, if sets are recorded.

    Example: 512 samples of 2,048 tokens with 64 likely tokens at each: 2 * 512 * 2048 * (40 + 64 * 8), 1.1 GiB.
    """
    per_token = BYTES_PER_TOKEN + BYTES_PER_CANDIDATE * topk + BYTES_PER_SET_ENTRY * set_size
    return 2 * num_samples * max_tokens * per_token


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Scores of the rows of a batch that one rank computed."""

    rows: np.ndarray  # [n] int32: indices into the batch
    values: tuple[np.ndarray, ...]  # [n, t, ...] each; t: tokens of the longest of these rows

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + sum(value.nbytes for value in self.values)


def collect_rows(scored: Iterable[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]) -> ScoredRows | None:
    """Join the (rows, values) of micro-batches, which may differ in their number of tokens; None without any."""
    parts = [(rows, tuple(value.cpu() for value in values)) for rows, values in scored]
    if not parts:
        return None
    num_rows, length = sum(len(rows) for rows, _ in parts), max(values[0].shape[1] for _, values in parts)
    joined = [torch.zeros((num_rows, length, *v.shape[2:]), dtype=_sent_dtype(v)) for v in parts[0][1]]
    start = 0
    for rows, values in parts:
        for whole, value in zip(joined, values, strict=True):
            whole[start : start + len(rows), : value.shape[1]] = value
        start += len(rows)
    rows = torch.cat([rows for rows, _ in parts]).to(torch.int32)
    return ScoredRows(rows.numpy(), tuple(value.numpy() for value in joined))


def merge_rows(parts: Iterable[ScoredRows | None], batch: TrainingBatch) -> list[torch.Tensor]:
    """Return each value for the whole batch, [B, T, ...] with 0 after a row's tokens, from the rows of all ranks.

    Raises:
        PolicyError: rows that no rank, or more than one, has scored.
    """
    given = [part for part in parts if part is not None]
    num_rows, length = batch[keys.TOKEN_IDS].shape
    found = np.sort(np.concatenate([part.rows for part in given])) if given else np.zeros(0, np.int32)
    if not np.array_equal(found, np.arange(num_rows)):
        raise PolicyError(f"the ranks scored {len(found)} rows ({len(np.unique(found))} different ones) of {num_rows}")
    merged: list[torch.Tensor] = []
    for index, value in enumerate(given[0].values):
        dtype = np.int64 if value.dtype == np.int32 else value.dtype
        whole = np.zeros((num_rows, length, *value.shape[2:]), dtype)
        for part in given:
            own = part.values[index]
            whole[part.rows, : own.shape[1]] = own
        merged.append(torch.from_numpy(whole))
    return merged


def merge_recorded(parts: Iterable[ScoredRows | None], batch: TrainingBatch) -> torch.Tensor:
    """Return the log-probs of the batch's N `recorded` rows from all ranks: [N, T]; NaN in missing rows."""
    num_rows, length = int((batch[keys.RECORDED] >= 0).sum()), batch[keys.TOKEN_IDS].shape[1]
    recorded = np.full((num_rows, length), np.nan, np.float32)
    for part in parts:
        if part is not None:
            recorded[part.rows] = 0
            recorded[part.rows, : part.values[0].shape[1]] = part.values[0]
    return torch.from_numpy(recorded)


class SentBatch:
    """A batch on its way to another process; unpickling returns the batch, read-only."""

    def __init__(self, batch: TrainingBatch) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (_to_arrays(self._batch), tuple(self._batch.batch_size))


def _to_arrays(batch: TensorCollection) -> dict[str, Any]:
    """Return each tensor as (array, dtype), and each part of nested ones in the same way."""
    arrays: dict[str, Any] = {}
    items: Iterable[tuple[str, Any]] = batch.items()
    for name, value in items:
        if is_non_tensor(value):  # pickled, its arrays beside the stream like all others
            arrays[name] = value.data
        elif isinstance(value, torch.Tensor):
            arrays[name] = (value.detach().cpu().to(_sent_dtype(value)).numpy(), value.dtype)
        else:
            arrays[name] = _to_arrays(value)
    return arrays


def _receive(arrays: Mapping[str, Any], batch_size: Sequence[int]) -> TrainingBatch:
    tensors: dict[str, Any] = {}
    for name, value in arrays.items():
        if isinstance(value, dict):
            tensors[name] = _receive(value, batch_size)
        elif isinstance(value, tuple):
            tensors[name] = _from_array(value[0]).to(value[1])
        else:
            tensors[name] = NonTensorData(value, batch_size=list(batch_size))
    return TensorDict(tensors, batch_size=list(batch_size))


def _sent_dtype(tensor: torch.Tensor) -> torch.dtype:
    if tensor.dtype != torch.int64 or (tensor.numel() and not _fits_int32(tensor)):
        return tensor.dtype
    return torch.int32


def _fits_int32(tensor: torch.Tensor) -> bool:
    smallest, largest = torch.aminmax(tensor)
    return INT32.min <= int(smallest) and int(largest) <= INT32.max


def _from_array(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the same memory, which is read-only in the object store."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
