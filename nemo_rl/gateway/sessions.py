"""One agent's run as chains of exact tokens, sampled or encoded in between. No I/O, no clock.

Every successful call adds a child to the node whose history it continues:

    begin(messages, tools) -> PendingCall   the prompt's tokens; changes nothing
    commit(call, completion, message)       adds the node; a call that is never committed leaves no trace

A request continues the longest prefix of its messages that is known and ends with a sampled message; only the messages
after that prefix are encoded. So

- an append extends a chain; an edited history begins a branch; a sub-agent, a compacted history or other tools begin
  a new chain;
- a rewritten last message begins a branch at the sampled message before it and is context there; the original stays as
  a chain of its own;
- the same request again (best of n) gives a sibling. All of them are kept, whether or not they overlap in time, but
  not an answer that its client was no longer there to receive. Of siblings with equal text, the last is continued,
  unless the ids of tool calls identify another;
- tool calls that come back without their text continue the chain.
"""

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import chain
from typing import Any

from nemo_rl.data.chat import flat_token_ids
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.markup import strip_thinking
from nemo_rl.image_features import PlacedImage
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns
from nemo_rl.types import (
    Completion,
    ImagePart,
    Message,
    MessageLog,
    TextPart,
    TokenizedMessage,
    ToolResult,
    add_columns,
    placed_images,
)

DIGEST_BYTES = 16


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the digest of an empty history: a conversation with other tools is another conversation."""
    return _digest(b"tools", _canonical_json(list(tools)))


def history_digest(history: bytes, message: Message) -> bytes:
    """Return the digest of a history followed by a message; thinking is ignored."""
    content = strip_thinking(message.content).strip() if message.role == "assistant" else message.content
    calls = [[call.name, _arguments(call.arguments)] for call in message.tool_calls]
    shown = [[number, image.digest] for number, image in _located_images(message)]
    return _digest(history, _canonical_json([message.role, content, calls, *shown]))


def _located_images(message: Message) -> Iterator[tuple[int, ImagePart]]:
    """Yield (characters of text before it, image)."""
    number = 0
    for part in message.parts:
        for each in part.content if isinstance(part, ToolResult) else (part,):
            if isinstance(each, ImagePart):
                yield number, each
            elif isinstance(each, TextPart):
                number += len(each.text)


def _digest(history: bytes, text: str) -> bytes:
    return blake2b(history + text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _arguments(text: str) -> str:
    """Return the canonical JSON of a call's arguments; malformed JSON is compared as text."""
    try:
        return _canonical_json(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


@dataclass(frozen=True, slots=True)
class Echo:
    """The tokens of an earlier call, sent back by a client."""

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """Return a digest of prompt, generation and the boundary between them."""
        prompt, generation = self.prompt_token_ids, self.generation_token_ids
        digest = blake2b(len(prompt).to_bytes(8, "little"), digest_size=16)
        digest.update(array("q", (*prompt, *generation)).tobytes())
        return digest.digest()


class UnknownEcho(Exception):
    """Echoed tokens match no stored call."""

    def __init__(self, echo: Echo) -> None:
        super().__init__(
            f"no call of {len(echo.prompt_token_ids)} prompt and {len(echo.generation_token_ids)} generated tokens "
            "is kept here: the tokens were changed, or the call is too old"
        )


@dataclass(slots=True, eq=False)
class Node:
    """One committed call: the messages encoded since its parent, and the sampled message."""

    parent: "Node | None"
    context: MessageLog
    sampled: TokenizedMessage
    request: bytes  # digest of tools and messages of the request
    weight_versions: tuple[int, int]
    is_truncated: bool = False  # the response was cut by its token limit
    rewards: dict[str, float] = field(default_factory=dict)  # posted for this call
    is_continued: bool = False
    asked: tuple[Message, ...] = ()  # messages of the request as the client knows them, without instructions
    is_delivered: bool = True  # False: the client was gone before it had the answer
    is_side_call: bool = False  # beside the task: its chain is not trained on
    columns: TokenColumns = NO_COLUMNS  # its whole request's and response's, until another call continues it

    def message_log(self) -> MessageLog:
        """Return the whole history up to and including the sampled message."""
        return tuple(message for node in self.path() for message in (*node.context, node.sampled))

    def path(self) -> list["Node"]:
        """Return the calls from the start of the chain to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """An encoded call that is not committed yet."""

    prompt_token_ids: tuple[int, ...]
    parent: Node | None
    context: MessageLog  # messages after the parent's history
    request: bytes
    images: tuple[PlacedImage, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True)
class Chain:
    """One history to train on."""

    message_log: MessageLog
    weight_versions: tuple[int, int]  # oldest and newest
    rewards: Mapping[str, float]  # posted for its calls; `Session.rewards` has those for the whole run
    is_truncated: bool = False  # its last response was cut by its token limit


def start_chain(
    codec: Codec, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: bytes
) -> PendingCall:
    """Encode the first call of a new chain; raises ConfigError for messages that the template refuses."""
    context = codec.encode_first_turn(messages, tools)
    return PendingCall(flat_token_ids(context), None, context, request, placed_images(context))


def continue_chain(
    codec: Codec, node: Node, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: bytes
) -> PendingCall | None:
    """Encode a call that appends to a node's history; return None if the template cannot render it."""
    history = node.message_log()
    context = codec.encode_next_turn(history, new_messages, tools)
    if context is None:
        return None
    token_ids = tuple(chain.from_iterable(each.token_ids for each in (*history, *context)))
    return PendingCall(token_ids, node, context, request, placed_images((*history, *context)))


def complete_call(
    call: PendingCall,
    completion: Completion,
    message: Message,
    *,
    is_trained: bool = True,
    is_side_call: bool = False,
) -> Node:
    """Return the node of a completed call, and mark its parent as continued.

    An untrained call's tokens count as context: they have no log-probs. A side call leaves its parent as the end of a
    chain, until a call that is none continues it.
    """
    logprobs = completion.logprobs if is_trained and not is_side_call else None
    sampled = TokenizedMessage(message, completion.token_ids, logprobs, completion.weight_spans)
    context, sampled = _add_own_columns(call, sampled, completion.columns)
    parent = None if is_side_call else call.parent
    while parent is not None:
        parent.is_continued = True
        parent.columns = NO_COLUMNS
        parent = parent.parent if parent.is_side_call else None
    is_truncated = completion.finish_reason == "length"
    node = Node(call.parent, context, sampled, call.request, completion.weight_versions, is_truncated)
    node.columns = completion.columns
    node.is_side_call = is_side_call
    return node


def _add_own_columns(
    call: PendingCall, sampled: TokenizedMessage, columns: TokenColumns
) -> tuple[MessageLog, TokenizedMessage]:
    """Return the messages that a call adds with their columns, and complete those of the response that it continues."""
    if not columns:
        return call.context, sampled
    added = (*call.context, sampled)
    start = columns.num_tokens - sum(len(each.token_ids) for each in added)
    if call.parent is not None:
        added = (call.parent.sampled, *added)
        start -= len(call.parent.sampled.token_ids)
    *known, sampled = add_columns(added, columns.rows(start, columns.num_tokens))
    if call.parent is not None:
        call.parent.sampled, *known = known
    return tuple(known), sampled


def build_chain(node: Node) -> Chain:
    path = node.path()
    versions = [version for each in path for version in each.weight_versions]
    rewards = {name: reward for each in path for name, reward in each.rewards.items()}
    return Chain(
        add_columns(node.message_log(), node.columns), (min(versions), max(versions)), rewards, node.is_truncated
    )


class CallFailureKind(StrEnum):
    """Reasons a call failed through no fault of the agent."""

    ENGINE = "engine"  # the engine failed, or did not answer before its deadline
    CONTEXT_LENGTH = "context_length"  # the conversation leaves no room for a response


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call that failed through no fault of the agent."""

    kind: CallFailureKind
    cause: str
    is_side_call: bool = False


class Session:
    """The chains of one agent's run."""

    def __init__(self, codec: Codec) -> None:
        self.rewards: dict[str, float] = {}  # for the whole run, by name; the last value posted counts
        self.last_failure: CallFailure | None = None  # failure of the task's last call; None if it was answered
        self._codec = codec
        self._calls: dict[str, Node] = {}  # by completion id, in order of commits
        self._by_history: dict[bytes, list[Node]] = {}  # digest of the history with the sampled message -> calls
        self._by_tokens: dict[bytes, list[Node]] = {}  # digest of an echo -> calls with these tokens

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> PendingCall:
        """Encode a call; raises ConfigError for messages that the chat template refuses."""
        digests = history_digests(messages, tools)
        node, length = self._find_history(messages, digests)
        if node is not None:  # a shorter history is no alternative: it would append the same messages and more
            call = continue_chain(self._codec, node, messages[length:], tools, digests[-1])
            if call is not None:
                return call
        return start_chain(self._codec, messages, tools, digests[-1])

    def mark_truncated(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Mark the chain that a call would continue as truncated, because the context leaves no room for the call."""
        node, _ = self._find_history(messages, history_digests(messages, tools))
        if node is not None:
            node.is_truncated = True

    def _find_history(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[Node | None, int]:
        """Return the call with the longest history that is a prefix of the messages, and that prefix's length."""
        for length in range(len(messages) - 1, 0, -1):
            if nodes := self._by_history.get(digests[length]):
                return _select_node(nodes, messages[length - 1]), length
        return None, 0

    def begin_from_echo(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, echo: Echo, num_known: int
    ) -> PendingCall:
        """Encode a call that continues the call of `echo`; messages from index `num_known` on are new.

        Raises UnknownEcho, and ConfigError as `begin` does.
        """
        node = find_echoed(self.find(echo), echo, messages[:num_known])
        request = history_digests(messages, tools)[-1]
        new = messages[num_known:]
        call = continue_chain(self._codec, node, new, tools, request) if new else None
        return start_chain(self._codec, messages, tools, request) if call is None else call

    def find(self, echo: Echo) -> Sequence[Node]:
        """Return the calls with these tokens, in order of commits."""
        return self._by_tokens.get(echo.digest(), ())

    def conversation(self, completion_id: str) -> tuple[Message, ...] | None:
        """Return the conversation that ends with a completion, without instructions; None if the id is unknown."""
        node = self._calls.get(completion_id)
        return None if node is None else (*node.asked, node.sampled.message)

    def response(self, completion_id: str) -> Message | None:
        """Return the message of a completion as the client received it; None if the id is unknown."""
        node = self._calls.get(completion_id)
        return None if node is None else node.sampled.message

    def commit(
        self,
        call: PendingCall,
        completion: Completion,
        message: Message,
        *,
        completion_id: str,
        asked: tuple[Message, ...] = (),
        is_trained: bool = True,
        is_side_call: bool = False,
    ) -> None:
        """Store a completed call; `message` is the response as the agent receives it and will send it back.

        `asked`: the request's messages, for a later request that names this completion instead of repeating them.
        """
        node = complete_call(call, completion, message, is_trained=is_trained, is_side_call=is_side_call)
        node.asked = asked
        self._calls[completion_id] = node
        self._by_history.setdefault(history_digest(call.request, message), []).append(node)
        if message.tool_calls and message.content:
            without_text = history_digest(call.request, Message("assistant", message.tool_calls))
            self._by_history.setdefault(without_text, []).append(node)
        self._by_tokens.setdefault(Echo(call.prompt_token_ids, completion.token_ids).digest(), []).append(node)
        if not is_side_call:
            self.last_failure = None

    def record_failure(self, failure: CallFailure) -> None:
        """Store the failure of the last call; that of a side call replaces none of the task's own calls."""
        if self.last_failure is None or not failure.is_side_call:
            self.last_failure = failure

    def mark_undelivered(self, completion_id: str) -> None:
        """Leave an answer out that its client did not receive, unless it is continued or rewarded all the same."""
        if completion_id in self._calls:  # the answer to a conversation without room is no call
            self._calls[completion_id].is_delivered = False

    def reward(self, rewards: Mapping[str, float], *, completion_id: str | None = None) -> None:
        """Store rewards by name for the whole run, or for the chains through one call.

        Raises KeyError for an unknown call.
        """
        target = self.rewards if completion_id is None else self._calls[completion_id].rewards
        target.update(rewards)

    def chains(self) -> tuple[Chain, ...]:
        """Return the chains to train on, in order of last commits.

        Answers that their clients did not receive, and side calls that nothing else continued, end none.
        """
        return tuple(build_chain(node) for node in self._calls.values() if self._ends_chain(node))

    def _ends_chain(self, node: Node) -> bool:
        if node.is_continued or node.is_side_call:
            return False
        return node.is_delivered or bool(node.rewards)


def find_echoed(nodes: Sequence[Node], echo: Echo, known: Sequence[Message]) -> Node:
    """Return the last of the calls with an echo's tokens whose images are those of the messages that `known` has.

    Images of one size have equal tokens. Raises UnknownEcho if there is none.
    """
    digests = [image.digest for message in known for image in message.images]
    for node in reversed(nodes):
        if digests == [placed.features.digest for placed in placed_images(node.message_log())]:
            return node
    raise UnknownEcho(echo)


def history_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the digests of the histories of 0, 1, ... messages."""
    digests = [tools_digest(tools)]
    for message in messages:
        digests.append(history_digest(digests[-1], message))
    return digests


def _select_node(nodes: Sequence[Node], message: Message) -> Node:
    """Return the node that a client sent back among several with equal text: by ids of tool calls, else the last."""
    ids = {call.id for call in message.tool_calls}
    for node in nodes:
        if ids & {call.id for call in node.sampled.message.tool_calls}:
            return node
    return nodes[-1]
