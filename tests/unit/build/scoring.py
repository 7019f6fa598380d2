"""An environment by dotted path."""

from collections.abc import Mapping, Sequence
from typing import Any


def length(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """The number of characters of the answer."""
    return float(len(messages[-1]["content"]))


def raising(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """Scores nothing."""
    raise ValueError("made to fail")


class Closing:
    """Says in `closed` that it was closed."""

    closed: list[str] = []  # noqa: RUF012

    async def step(self, conversations: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed.append("closed")
