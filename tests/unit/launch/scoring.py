"""An environment by dotted path."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.types import EnvStep, Message


def length(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """The number of characters of the answer."""
    return float(len(messages[-1]["content"]))


def one_more_than_length(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """The number of characters of the answer, and one."""
    return 1.0 + len(messages[-1]["content"])


def raising(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """Scores nothing."""
    raise ValueError("made to fail")


class Counting:
    """Rewards the number of characters; `calls` has how many conversations each call brought."""

    calls: list[int] = []  # noqa: RUF012

    async def step(self, conversations: Sequence[Sequence[Message]], states: Sequence[Any]) -> list[EnvStep]:
        self.calls.append(len(conversations))
        return [EnvStep(rewards={"length": float(len(c[-1].content))}) for c in conversations]

    async def close(self) -> None:
        """Nothing is held."""


class Closing:
    """Says in `closed` that it was closed."""

    closed: list[str] = []  # noqa: RUF012

    async def step(self, conversations: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    async def close(self) -> None:
        self.closed.append("closed")
