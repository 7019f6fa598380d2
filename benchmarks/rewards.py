"""Rewards for benchmarks/step_overhead.py."""

import time
from collections.abc import Mapping, Sequence
from typing import Any


def length_reward(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    """Something that differs inside a group: the share of letters "e"."""
    return messages[-1]["content"].count("e") / 64


def slow_reward(messages: Sequence[Mapping[str, str]], metadata: Mapping[str, Any]) -> float:
    time.sleep(0.01)
    return length_reward(messages, metadata)
