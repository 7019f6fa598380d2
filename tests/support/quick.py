"""Which cases of a product CI runs: those that differ in kind. The others are `slow`, and scripts/nightly runs them."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return the cases of `parametrize` in order, those that are not chosen marked slow.

    Raises AssertionError for a chosen case that is none.
    """
    cases, chosen = list(cases), list(chosen)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, f"no such case: {unknown}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]
