"""What may happen to a key of NeMo-RL's that this project does not have; config/compatibility.py is the table."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    key: str  # dotted; `*` is any key, and lists are entered
    inert: tuple[object, ...] | None  # None: every value
    otherwise: Literal["note", "refuse", "keep"]
    text: str = ""


def dropped(key: str) -> Rule:
    """Means nothing here, whatever its value."""
    return Rule(key, None, "note")


def ignored(key: str, note: str, *inert: object) -> Rule:
    """Is not needed here; said once when it asks for something."""
    return Rule(key, inert, "note", note)


def rejected(key: str, reason: str, *inert: object) -> Rule:
    """Cannot be had; null and the inert values do not ask for it."""
    return Rule(key, (None, *inert), "refuse", reason)


def defaulted(key: str, *inert: object) -> Rule:
    """NeMo-RL's way of writing our default; other values are the schema's."""
    return Rule(key, inert, "keep")
