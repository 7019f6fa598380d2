"""Rules that runs score with."""

from collections.abc import Mapping, Sequence
from typing import Any


def num_letters(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    return float(len(messages[-1]["content"]))
