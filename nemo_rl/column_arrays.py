"""The arrays of token columns (token_columns.py): which entries are missing, and how parts are joined."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def missing_value(dtype: np.dtype) -> float:
    """Return the entry that means "not given".

    Example: 255 for uint8, -1 for int32, NaN for float32.
    """
    if dtype.kind == "u":
        return int(np.iinfo(dtype).max)
    return -1 if dtype.kind == "i" else float("nan")


def id_dtype(count: int) -> np.dtype:
    """Return the smallest unsigned dtype for ids below `count` in which `missing_value` is not one of them.

    Example: uint8 for 255 experts, uint16 for 256.
    """
    return next(np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32) if count <= np.iinfo(kind).max)


def stack(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray:
    """Return one column from parts of `lengths[i]` tokens, None if missing; the last axis is padded to the widest.

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


def complete(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return a column with its missing rows taken from another one of the same tokens."""
    return np.where(is_missing(own).reshape(-1, *(1,) * (own.ndim - 1)), other, own)


def pad_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """Return a column of `count` tokens whose first rows are given; the others are missing."""
    return stack([rows, None], [len(rows), count - len(rows)])


def pad_ids(rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return rows of ids as one array, padded with -1 to the longest: [rows, width] int32; None is an empty row."""
    table = np.full((len(rows), max((len(row) for row in rows if row is not None), default=0)), -1, np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            table[index, : len(row)] = row
    return table


def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays have the same dtype, shape and entries; NaN equals NaN."""
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=_is_float(one))


def encode(array: np.ndarray) -> dict[str, Any]:
    """Return an array as JSON holds it: dtype, shape and, compressed by zlib and in base64, the entries."""
    entries = zlib.compress(np.ascontiguousarray(array).data, level=1)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": base64.b64encode(entries).decode()}


def decode(encoded: Mapping[str, Any]) -> np.ndarray:
    """Invert `encode`."""
    entries = zlib.decompress(base64.b64decode(encoded["zlib"]))
    return np.frombuffer(entries, encoded["dtype"]).reshape(encoded["shape"])


def is_missing(array: np.ndarray) -> np.ndarray:
    """Return which rows of a column were not given: [T] bool."""
    missing = np.isnan(array) if _is_float(array) else array == missing_value(array.dtype)
    return np.asarray(missing.all(axis=tuple(range(1, array.ndim))))


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"
