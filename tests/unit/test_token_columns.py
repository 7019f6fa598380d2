"""Named columns of tokens, and their place in a message log and a batch."""

import pickle

import numpy as np
import pytest

from nemo_rl.column_arrays import id_dtype, is_missing, missing_value, stack
from nemo_rl.token_columns import (
    NO_COLUMNS,
    TokenColumns,
    concatenate_columns,
)
from nemo_rl.types import Completion, Message, TokenizedMessage, add_columns


def column(*rows: object, dtype: str = "uint8") -> TokenColumns:
    return TokenColumns({"c": np.array(rows, dtype)})


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 255), ("uint16", 65535), ("int32", -1), ("int8", -1)])
def test_an_entry_that_nobody_gave_is_the_largest_unsigned_number_or_minus_one(dtype: str, value: int) -> None:
    assert missing_value(np.dtype(dtype)) == value


@pytest.mark.parametrize(("count", "dtype"), [(8, "uint8"), (255, "uint8"), (256, "uint16"), (65536, "uint32")])
def test_ids_have_the_smallest_dtype_in_which_none_of_them_means_missing(count: int, dtype: str) -> None:
    assert id_dtype(count) == dtype


def test_rows_that_a_part_lacks_are_missing_and_narrow_rows_are_padded() -> None:
    narrow, wide = column([[1]], [[2]]), column([[3, 4]])
    joined = concatenate_columns([narrow, NO_COLUMNS, wide], [2, 1, 1])
    assert joined["c"].tolist() == [[[1, 255]], [[2, 255]], [[255, 255]], [[3, 4]]]
    assert is_missing(joined["c"]).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("part", "length"), [(np.zeros((2, 1), np.uint8), 3), (np.zeros((3, 1), np.uint16), 3), (np.zeros(3, np.uint8), 3)]
)
def test_parts_that_are_not_of_one_column_are_refused(part: np.ndarray, length: int) -> None:
    with pytest.raises(ValueError, match=r"in a column of"):
        stack([np.zeros((1, 1), np.uint8), part], [1, length])


def test_columns_of_different_numbers_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a: uint8\[2\], b: uint8\[3\]"):
        TokenColumns({"a": np.zeros(2, np.uint8), "b": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match=r"1 tokens with TokenColumns\(c: uint8\[2\]\)"):
        TokenizedMessage(Message("user", "x"), (7,), columns=column(1, 2))


def test_a_missing_row_is_completed_and_a_given_one_stays() -> None:
    own, other = column([1, 2], [255, 255], [255, 3]), column([7], [8], [9])
    assert own.completed(other) == column([1, 2], [8, 255], [255, 3])
    assert NO_COLUMNS.completed(own) is own
    assert own.completed(NO_COLUMNS) is own


def test_equal_columns_are_equal_and_survive_a_pickle() -> None:
    one = TokenColumns({"c": np.array([0.5, np.nan])})
    assert pickle.loads(pickle.dumps(one)) == one == TokenColumns({"c": np.array([0.5, np.nan])})
    assert one not in (TokenColumns({"c": np.array([0.5, 1.0])}), column(1, 2), 1)


def test_rows_without_any_given_entry_hold_no_array() -> None:
    whole = column(255, 255, 4)
    assert whole.rows(0, 2) is NO_COLUMNS
    assert whole.rows(2, 3) == column(4)
    assert whole.rows(2, 3)["c"].base is None  # not a view that would keep the whole request


def test_a_log_takes_a_requests_rows_but_those_of_sampled_tokens() -> None:
    """The last sampled token of a turn gets the row of the next request, the first that computes it."""
    log = (
        TokenizedMessage(Message("user", "a"), (1, 2)),
        TokenizedMessage(Message("assistant", "b"), (3, 4), (0.0, 0.0), columns=column(13, 255)),
        TokenizedMessage(Message("user", "c"), (5,)),
        TokenizedMessage(Message("assistant", "d"), (6,), (0.0,), columns=column(255)),
        TokenizedMessage(Message("user", "after the last request"), (8,)),
    )
    rows = [21, 22, 23, 24, 25, 255]
    added = add_columns(log, column(*rows))
    expected = [[21, 22], [13, 24], [25], [255], None]
    assert [one.columns["c"].tolist() if one.columns else None for one in added] == expected
    assert add_columns(log, NO_COLUMNS) == log


def test_a_completions_sampled_rows_are_its_last() -> None:
    completion = Completion("r", (7, 8), (0.0, 0.0), "stop", columns=column(1, 2, 3, 4, 255))
    assert completion.sampled_columns == column(4, 255)
    assert Completion("r", (7, 8), (0.0, 0.0), "stop").sampled_columns is NO_COLUMNS
