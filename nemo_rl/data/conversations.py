"""Conversations whose assistant turns are to be learnt: what supervised training takes in place of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.types import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's, each of whose turns is learnt."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas that the chat template renders
