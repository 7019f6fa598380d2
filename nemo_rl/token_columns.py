"""Columns: what an engine decided for a token travels with the token, from its completion to the trainer's micro-batch.

A column is a named array whose first axis is tokens: the experts that a token went to, the set that it was drawn from.
Its dtype and the shape of a row are the engine's. An entry that nobody gave is the largest value of an unsigned dtype,
-1 of a signed one and NaN of a floating one (`missing_value`); the trainer decides for itself where a whole row is
missing. A further column is a further name: nothing between engine and trainer knows which there are.
"""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

ROUTED_EXPERTS = "routed_experts"  # [T, layers, k] of `id_dtype`: experts that computed the token as an input
SAMPLING_MASK = "sampling_mask"  # [T, width] int32: ids of the tokens that it was drawn from, padded with -1
MAX_SET_SIZE = 512  # recorded tokens per set: 2 KiB; larger sets are missing


def missing_value(dtype: np.dtype) -> float:
    """Return the entry that means "not given".

    Example: 255 for uint8, -1 for int32, NaN for float32.
    """
    if dtype.kind == "u":
        return int(np.iinfo(dtype).max)
    return -1 if dtype.kind == "i" else float("nan")


def id_dtype(count: int) -> np.dtype:
    """Return the smallest unsigned dtype for ids below `count` in which `missing_value` is none of them.

    Example: uint8 for 255 experts, uint16 for 256.
    """
    return next(np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32) if count <= np.iinfo(kind).max)


def sampling_mask_columns(sets: Sequence[np.ndarray | None], *, num_prompt_tokens: int) -> "TokenColumns":
    """Return the sets that consecutive tokens were drawn from, one of ids per token, as a column after the prompt.

    A set of more than MAX_SET_SIZE tokens is missing, as None is.
    """
    kept = [None if one is None or len(one) > MAX_SET_SIZE else one for one in sets]
    width = max((len(one) for one in kept if one is not None), default=0)
    if width == 0:
        return NO_COLUMNS
    table = np.full((num_prompt_tokens + len(kept), width), -1, np.int32)
    for row, one in enumerate(kept, num_prompt_tokens):
        if one is not None:
            table[row, : len(one)] = one
    return TokenColumns({SAMPLING_MASK: table})


class TokenColumns(Mapping[str, np.ndarray]):
    """Columns of the same consecutive tokens, by name. Their arrays are never written to.

    Example: `TokenColumns({"routed_experts": np.zeros((5, 2, 1), np.uint8)})` are the experts of five tokens.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Raise ValueError for arrays of different numbers of tokens."""
        self._arrays = dict(arrays or {})
        if len({len(array) for array in self._arrays.values()}) > 1:
            raise ValueError(f"columns of different numbers of tokens: {self}")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """Return the number of columns; an object without any is false."""
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenColumns):
            return NotImplemented
        return self.keys() == other.keys() and all(
            self[name].dtype == other[name].dtype
            and np.array_equal(self[name], other[name], equal_nan=_is_float(array))
            for name, array in self.items()
        )

    def __hash__(self) -> int:
        return hash(frozenset((name, array.shape) for name, array in self.items()))

    def __repr__(self) -> str:
        described = (f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.items())
        return f"TokenColumns({', '.join(described)})"

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens; 0 without a column."""
        return next((len(array) for array in self._arrays.values()), 0)

    def rows(self, start: int, end: int) -> "TokenColumns":
        """Return copies of the rows of tokens `start` to `end` (exclusive), without columns that miss all of them."""
        if not self:
            return self
        parts = {name: array[start:end] for name, array in self.items()}
        given = {name: part.copy() for name, part in parts.items() if not is_missing(part).all()}
        return TokenColumns(given) if given else NO_COLUMNS

    def completed(self, other: "TokenColumns") -> "TokenColumns":
        """Return these columns with missing rows, and missing columns, taken from `other` of the same tokens."""
        if not other or not self:
            return self or other
        count = self.num_tokens
        tables = {name: stack([self.get(name), other.get(name)], [count, count]) for name in {**self, **other}}
        return TokenColumns(
            {
                name: np.where(is_missing(table[:count]).reshape(_per_row(table)), table[count:], table[:count])
                for name, table in tables.items()
            }
        )


NO_COLUMNS = TokenColumns()


def concatenate_columns(parts: Sequence[TokenColumns], lengths: Sequence[int]) -> TokenColumns:
    """Return the columns of consecutive tokens, `lengths[i]` of part i; rows of a column that a part lacks are missing.

    Raises ValueError for a part with another number of tokens, and for a column whose parts do not match (`stack`).
    """
    names = {name: None for part in parts for name in part}
    if not names:
        return NO_COLUMNS
    return TokenColumns({name: stack([part.get(name) for part in parts], lengths) for name in names})


def stack(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray:
    """Return one column from parts of `lengths[i]` tokens, None where missing; the last axis is padded to the widest.

    Raises ValueError for parts of other lengths, dtypes or shapes of a row (but for the last axis).
    """
    given = [part for part in parts if part is not None]
    dtype, shape = given[0].dtype, [*given[0].shape[1:]]
    if shape:
        shape[-1] = max(part.shape[-1] for part in given)
    whole = np.full((sum(lengths), *shape), missing_value(dtype), dtype)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            if (len(part), part.dtype, [*part.shape[1:-1]], part.ndim) != (length, dtype, shape[:-1], whole.ndim):
                raise ValueError(f"{part.dtype}{list(part.shape)} in a column of {length} x {dtype}{shape}")
            whole[start : start + length][tuple(map(slice, part.shape))] = part
        start += length
    return whole


def encode_columns(columns: TokenColumns) -> dict[str, dict[str, Any]]:
    """Return columns as JSON holds them: dtype, shape and, compressed by zlib and in base64, the entries.

    Example: `{"routed_experts": {"dtype": "uint8", "shape": [5, 2, 1], "zlib": "eJxj..."}}`.
    """
    return {
        name: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "zlib": base64.b64encode(zlib.compress(np.ascontiguousarray(array).data, level=1)).decode(),
        }
        for name, array in columns.items()
    }


def decode_columns(encoded: Mapping[str, Mapping[str, Any]]) -> TokenColumns:
    """Invert `encode_columns`."""

    def decode(one: Mapping[str, Any]) -> np.ndarray:
        return np.frombuffer(zlib.decompress(base64.b64decode(one["zlib"])), one["dtype"]).reshape(one["shape"])

    return TokenColumns({name: decode(one) for name, one in encoded.items()}) if encoded else NO_COLUMNS


def is_missing(array: np.ndarray) -> np.ndarray:
    """Return which rows of a column were not given: [T] bool."""
    missing = np.isnan(array) if _is_float(array) else array == missing_value(array.dtype)
    return np.asarray(missing.all(axis=tuple(range(1, array.ndim))))


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


def _per_row(table: np.ndarray) -> tuple[int, ...]:
    return (-1, *(1,) * (table.ndim - 1))
