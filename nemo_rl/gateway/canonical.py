"""When two messages are the same: digests of what a client may not change without starting another branch.

Clients re-serialise what they were sent. Left out are tool-call ids, the spelling of JSON arguments, thinking, and
white space around an assistant's text; what is left is hashed. Digests only decide which chain a request continues:
the tokens of a sampled message never depend on how the client wrote it back.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from nemo_rl.gateway.parsers import strip_thinking
from nemo_rl.types import Message

DIGEST_BYTES = 16


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Where the digests of a history start: a conversation with other tools is another conversation."""
    return _digest(b"tools", _canonical_json(list(tools)))


def history_digest(history: bytes, message: Message) -> bytes:
    """The digest of a history with one more message at its end."""
    content = strip_thinking(message.content).strip() if message.role == "assistant" else message.content
    calls = [[call.name, _arguments(call.arguments)] for call in message.tool_calls]
    return _digest(history, _canonical_json([message.role, content, calls]))


def _digest(history: bytes, text: str) -> bytes:
    return blake2b(history + text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _arguments(text: str) -> str:
    """One spelling of the value that the arguments describe; broken JSON is compared as it is."""
    try:
        return _canonical_json(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()
