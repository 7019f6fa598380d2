"""Rewards for the controls of learning.py."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any


def coin(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """0 or 1 by the text alone, with nothing to learn from: a hash of the conversation and its length."""
    text = "\n".join(message["content"] for message in messages)
    return float(hashlib.sha256(text.encode()).digest()[0] % 2)
