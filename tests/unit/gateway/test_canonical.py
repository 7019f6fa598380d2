import pytest

from nemo_rl.gateway.sessions import history_digest, tools_digest
from nemo_rl.types import Message, ToolCall
from tests.unit.gateway.engines import TOOL


def digest(message: Message) -> bytes:
    return history_digest(b"", message)


def call(arguments: str, *, id: str = "call1", name: str = "f") -> Message:
    return Message("assistant", "", (ToolCall(id, name, arguments),))


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        (call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}')),
        (call("{}", id="call1"), call("{}", id="other")),
        (call("{broken"), call(" {broken ")),
        (Message("assistant", "<think>so</think>\n\n4"), Message("assistant", "4")),
        (Message("assistant", "so</think>4"), Message("assistant", "4")),
        (Message("assistant", "4\n"), Message("assistant", "4")),
        (Message("tool", "7", tool_call_id="x"), Message("tool", "7", tool_call_id="y")),
    ],
)
def test_what_clients_re_serialise_is_the_same_message(said, sent_back):
    assert digest(said) == digest(sent_back)


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        (Message("user", "4"), Message("user", "4 ")),
        (Message("user", "4"), Message("system", "4")),
        (Message("user", "<think>a</think>4"), Message("user", "4")),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call("{}"), call("{}", name="g")),
        (call("{}"), Message("assistant", "")),
        (call("{broken"), call("{broken}")),
        (Message("assistant", "4"), Message("assistant", "5")),
    ],
)
def test_what_changes_the_conversation_is_another_message(said, sent_back):
    assert digest(said) != digest(sent_back)


def test_a_history_is_its_tools_and_all_its_messages_in_order():
    hi, ho = Message("user", "hi"), Message("user", "ho")
    start = tools_digest(())
    assert history_digest(history_digest(start, hi), ho) != history_digest(history_digest(start, ho), hi)
    assert tools_digest((TOOL,)) != start
    assert tools_digest((dict(reversed(TOOL.items())),)) == tools_digest((TOOL,))


def test_arguments_nested_too_deep_are_compared_as_text():
    assert digest(call("[" * 100_000)) != digest(call("[" * 100_001))


def test_half_a_surrogate_pair_has_a_digest():
    assert digest(Message("user", "\ud800")) != digest(Message("user", "\ud801"))
