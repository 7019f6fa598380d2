"""Preference pairs for reward models: a prompt with a chosen and a rejected answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import DataError
from nemo_rl.types import Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt."""

    messages: tuple[Message, ...]  # the prompt
    chosen: str
    rejected: str

    @property
    def conversations(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return the conversation with the chosen answer and the one with the rejected answer."""
        better, worse = (Message("assistant", answer) for answer in (self.chosen, self.rejected))
        return (*self.messages, better), (*self.messages, worse)


def read_preferences(path: Path) -> list[Preference]:
    """Return the pairs of a JSON Lines file: `prompt` (a text) or `messages` (role and content), `chosen`, `rejected`.

    Raises DataError naming the file and the row that cannot be read.
    """
    pairs = []
    for number, row in enumerate(read_jsonl(path), start=1):
        try:
            pairs.append(Preference(_prompt(row), _text(row, "chosen"), _text(row, "rejected")))
        except DataError as error:
            raise DataError(f"{path}: row {number}: {error}") from error
    return pairs


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "messages" not in row:
        return (Message("user", _text(row, "prompt")),)
    messages = row["messages"]
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise DataError("messages must be a list of objects with role and content")
    for message in messages:
        if message.get("role") not in ROLES:
            raise DataError(f"a message's role is {message.get('role')!r}; known: {', '.join(ROLES)}")
    return tuple(Message(message["role"], _text(message, "content")) for message in messages)


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise DataError(f"{key} must be a text, not {row.get(key)!r}")
    return row[key]
