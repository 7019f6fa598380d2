"""Messages of a conversation, collected from the turns, blocks or items of a request."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from nemo_rl.gateway.schema import make_unsupported_error
from nemo_rl.types import Message, Part, Role, TextPart, ThinkingPart, ToolCall, ToolResult


def merge_texts(parts: Iterable[Part | None], separator: str = "") -> tuple[Part, ...]:
    """Return the parts that there are; adjacent texts become one, and so does adjacent thinking."""
    merged: list[Part] = []
    for kind, run in groupby((part for part in parts if part is not None), type):
        if kind is TextPart:
            merged.append(TextPart(separator.join(part.text for part in run if isinstance(part, TextPart))))
        elif kind is ThinkingPart:
            merged.append(ThinkingPart("".join(part.text for part in run if isinstance(part, ThinkingPart))))
        else:
            merged += run
    return tuple(merged)


class Turns:
    """The messages of a conversation so far.

    A call without an id gets one, and `answer` finds that of the call that a result answers.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._said: list[Part] | None = None  # by the assistant, whose message is not ended; None: others spoke last
        self._num_calls = 0
        self._unanswered: list[ToolCall] = []  # of the assistant's last message

    def add(self, role: Role, parts: Sequence[Part], *, begins: bool = False) -> None:
        """Add what `role` says.

        What the assistant says belongs to its last message unless others spoke since, or `begins`. In other turns the
        results of tools are messages of their own, before and after the text.
        """
        if role == "assistant":
            if begins or self._said is None:
                self._end_message()
                self._said, self._unanswered = [], []
            self._said += [self._name(part) if isinstance(part, ToolCall) else part for part in parts]
            return
        self._end_message()
        runs = [(key, tuple(run)) for key, run in groupby(parts, lambda part: isinstance(part, ToolResult))]
        for are_results, run in runs or [(False, ())]:
            self._messages += [Message("tool", (part,)) for part in run] if are_results else [Message(role, run)]

    def answer(self, result: ToolResult, name: str) -> ToolResult:
        """Return a result of a function with the id of its call: the first unanswered one of that name, or id."""
        for call in self._unanswered:
            if (result.call_id or call.id, name) == (call.id, call.name):
                self._unanswered.remove(call)
                return replace(result, call_id=call.id)
        return result

    def messages(self) -> tuple[Message, ...]:
        """Return the messages, and end the assistant's."""
        self._end_message()
        return tuple(self._messages)

    def messages_to_answer(self, where: str) -> tuple[Message, ...]:
        """Return the messages of the field `where`; raises RequestError where the assistant spoke last."""
        if self._said is not None:
            raise make_unsupported_error(where, f"{where}: the last is the assistant's; prefill is not supported")
        return self.messages()

    def _end_message(self) -> None:
        if self._said is not None:
            self._messages.append(Message("assistant", merge_texts(self._said)))
            self._said = None

    def _name(self, call: ToolCall) -> ToolCall:
        """Return a call with an id; a new one tells its place among the calls of the conversation."""
        self._num_calls += 1
        call = call if call.id else replace(call, id=f"call_{self._num_calls}")
        self._unanswered.append(call)
        return call
