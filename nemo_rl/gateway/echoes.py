"""Calls outside of any session, found by the tokens that a client sends back.

NeMo Gym and others know no session: their client keeps `prompt_token_ids` and `generation_token_ids` on the assistant's
message and sends them with the next request. They name the call; its tokens, log-probs and weight versions are taken
from here.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from nemo_rl.gateway.canonical import history_digest, tools_digest
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.sessions import Call, Chain, Node, answer_call, chain_of, continue_chain, start_chain
from nemo_rl.types import Completion, Message


@dataclass(frozen=True, slots=True)
class Echo:
    """The tokens of an earlier call, as a client sent them back."""

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]


class UnknownEcho(Exception):
    """Tokens of a call that is not, or no longer, kept here."""


class EchoedCalls:
    """The last `max_calls` calls of clients without a session, each kept for `ttl_s` seconds behind its last use."""

    def __init__(self, codec: Codec, *, max_calls: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._max_calls = max_calls
        self._ttl_s = ttl_s
        self._clock = clock
        self._nodes: OrderedDict[bytes, tuple[float, Node]] = OrderedDict()  # (last use, call), oldest first

    def __len__(self) -> int:
        return len(self._nodes)

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        echo: Echo | None,
        behind: int = 0,
    ) -> Call:
        """The tokens to sample from: the echoed call's and those of the messages from index `behind` on.

        The echo decides: the text of earlier messages is not compared. Without one, a new chain begins.
        Raises UnknownEcho, and ConfigError for messages that the chat template refuses.
        """
        request = tools_digest(tools)
        for message in messages:
            request = history_digest(request, message)
        if echo is None or behind >= len(messages):
            return start_chain(self._codec, messages, tools, request)
        call = continue_chain(self._codec, self._node(echo), messages[behind:], tools, request)
        return start_chain(self._codec, messages, tools, request) if call is None else call

    def commit(self, call: Call, completion: Completion, message: Message) -> None:
        """Keep a completed call for the requests that will continue it."""
        self.expire()
        key = _tokens_digest(call.prompt_token_ids, completion.token_ids)
        self._nodes[key] = (self._clock(), answer_call(call, completion, message))
        self._nodes.move_to_end(key)
        if len(self._nodes) > self._max_calls:
            self._nodes.popitem(last=False)

    def chain(self, echo: Echo) -> Chain:
        """The chain that ends with an echoed call: its tokens, log-probs and weight versions. Raises UnknownEcho."""
        return chain_of(self._node(echo))

    def expire(self) -> None:
        """Forget the calls that nobody has continued for long."""
        while self._nodes and self._clock() - next(iter(self._nodes.values()))[0] > self._ttl_s:
            self._nodes.popitem(last=False)

    def _node(self, echo: Echo) -> Node:
        key = _tokens_digest(echo.prompt_token_ids, echo.generation_token_ids)
        if key not in self._nodes:
            raise UnknownEcho(
                f"no call of {len(echo.prompt_token_ids)} prompt and {len(echo.generation_token_ids)} generated tokens "
                "is kept here: the tokens were changed, or the call is too old"
            )
        _, node = self._nodes[key]
        self._nodes[key] = (self._clock(), node)
        self._nodes.move_to_end(key)
        return node


def _tokens_digest(prompt: Sequence[int], generation: Sequence[int]) -> bytes:
    """Of both and of where one ends: the same tokens split elsewhere are another call."""
    digest = blake2b(len(prompt).to_bytes(8, "little"), digest_size=16)
    digest.update(array("q", (*prompt, *generation)).tobytes())
    return digest.digest()
