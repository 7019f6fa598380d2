"""Columns: what an engine decided for a token travels with the token, from its completion to the trainer's micro-batch.

A column is a named array whose first axis is tokens: the experts that a token went to, the set that it was drawn from.
Its dtype and the shape of a row are the engine's. A missing entry is the largest value of an unsigned dtype,
-1 of a signed one and NaN of a floating one (`column_arrays.missing_value`); the trainer decides for itself if a
whole row is missing. A further column is a further name: nothing between engine and trainer knows which there are.

The arrays are NumPy's, which is imported with the first of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ROUTED_EXPERTS = "routed_experts"  # [T, layers, k] of `column_arrays.id_dtype`: experts that computed the token
SAMPLING_MASK = "sampling_mask"  # [T, width] int32: ids of the tokens that it was drawn from, padded with -1
MAX_SET_SIZE = 512  # recorded tokens per set: 2 KiB; larger sets are missing


def routed_experts_columns(routes: "np.ndarray", num_tokens: int) -> "TokenColumns":
    """Return the column of `num_tokens` tokens from their first rows [n, L, k]; what follows is missing.

    The last sampled token is never computed, so that it has no row. A request that a stop string ended may have more
    rows than tokens.
    """
    from nemo_rl.column_arrays import pad_rows

    return TokenColumns({ROUTED_EXPERTS: pad_rows(routes[: num_tokens - 1], num_tokens)})


def sampling_mask_columns(sets: "Sequence[np.ndarray | None]", *, num_prompt_tokens: int) -> "TokenColumns":
    """Return the sets that consecutive tokens were drawn from, one of ids per token, as a column after the prompt.

    A set of more than MAX_SET_SIZE tokens is missing, as None is.
    """
    from nemo_rl.column_arrays import pad_ids

    kept = [None if one is None or len(one) > MAX_SET_SIZE else one for one in sets]
    if not any(one is not None and len(one) for one in kept):
        return NO_COLUMNS
    return TokenColumns({SAMPLING_MASK: pad_ids([None] * num_prompt_tokens + kept)})


class TokenColumns(Mapping[str, "np.ndarray"]):
    """Columns of the same consecutive tokens, by name. Their arrays are never written to.

    Example: `TokenColumns({"routed_experts": np.zeros((5, 2, 1), np.uint8)})` are the experts of five tokens.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: "Mapping[str, np.ndarray] | None" = None) -> None:
        """Raise ValueError for arrays of different numbers of tokens."""
        self._arrays = dict(arrays or {})
        if len({len(array) for array in self._arrays.values()}) > 1:
            raise ValueError(f"columns of different numbers of tokens: {self}")

    def __getitem__(self, name: str) -> "np.ndarray":
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        """Return the number of columns; an object without any is false."""
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenColumns):
            return NotImplemented
        if not self or not other:
            return len(self) == len(other)
        from nemo_rl.column_arrays import are_equal

        return self.keys() == other.keys() and all(are_equal(array, other[name]) for name, array in self.items())

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
        from nemo_rl.column_arrays import is_missing

        parts = {name: array[start:end] for name, array in self.items()}
        given = {name: part.copy() for name, part in parts.items() if not is_missing(part).all()}
        return TokenColumns(given) if given else NO_COLUMNS

    def completed(self, other: "TokenColumns") -> "TokenColumns":
        """Return these columns with missing rows, and missing columns, taken from `other` of the same tokens."""
        if not other or not self:
            return self or other
        from nemo_rl.column_arrays import complete, stack

        count = self.num_tokens
        tables = {name: stack([self.get(name), other.get(name)], [count, count]) for name in {**self, **other}}
        return TokenColumns({name: complete(table[:count], table[count:]) for name, table in tables.items()})


NO_COLUMNS = TokenColumns()


def concatenate_columns(parts: Sequence[TokenColumns], lengths: Sequence[int]) -> TokenColumns:
    """Return the columns of consecutive tokens, `lengths[i]` of part i; rows of a column that a part lacks are missing.

    Raises ValueError for a part with another number of tokens, and for a column whose parts do not match (`stack`).
    """
    names = {name: None for part in parts for name in part}
    if not names:
        return NO_COLUMNS
    from nemo_rl.column_arrays import stack

    return TokenColumns({name: stack([part.get(name) for part in parts], lengths) for name in names})


def encode_columns(columns: TokenColumns) -> dict[str, dict[str, Any]]:
    """Return columns as JSON holds them.

    Example: `{"routed_experts": {"dtype": "uint8", "shape": [5, 2, 1], "zlib": "eJxj..."}}`.
    """
    if not columns:
        return {}
    from nemo_rl.column_arrays import encode

    return {name: encode(array) for name, array in columns.items()}


def decode_columns(encoded: Mapping[str, Mapping[str, Any]]) -> TokenColumns:
    """Invert `encode_columns`."""
    if not encoded:
        return NO_COLUMNS
    from nemo_rl.column_arrays import decode

    return TokenColumns({name: decode(one) for name, one in encoded.items()})
