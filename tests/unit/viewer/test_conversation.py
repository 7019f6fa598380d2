"""Messages of records as text: parts are joined as `Message.content` joins them."""

import pytest

from nemo_rl.data.messages import to_record
from nemo_rl.types import Message, Part, TextPart, ThinkingPart, ToolCall, ToolResult
from nemo_rl.viewer.conversation import chains_of, message_text, turns_of

SO = ThinkingPart("so")
CALL = ToolCall("c1", "add", "{}")


@pytest.mark.parametrize(
    ("role", "parts", "text"),
    [
        ("assistant", (TextPart("a"), TextPart("b")), "ab"),
        ("assistant", (SO, TextPart("a"), TextPart("b")), "<think>so</think>\nab"),
        ("assistant", (SO, CALL, TextPart("a")), "<think>so</think>\na"),
        ("assistant", (SO,), "<think>so</think>"),
        ("tool", (ToolResult("c1", (TextPart("a"), TextPart("b"))),), "ab"),
    ],
)
def test_line_breaks_follow_thinking_alone(role: str, parts: tuple[Part, ...], text: str) -> None:
    record = to_record(Message(role, parts))  # type: ignore[arg-type]
    assert message_text(record) == text


def test_a_turn_shows_the_parts_of_a_message_once_and_in_order() -> None:
    said = Message("assistant", (SO, TextPart("first"), CALL, TextPart("then")))
    result = Message("tool", (ToolResult("c1", (TextPart("7"), TextPart(" of 8"))),))
    (chain,) = chains_of({"messages": [to_record(said), to_record(result)]})
    first, second = turns_of(chain)
    assert [(part["kind"], part["text"].strip()) for part in first["parts"]] == [
        ("thinking", "so"),
        ("text", "firstthen"),
    ]
    assert [(call["name"], call["arguments"]) for call in first["calls"]] == [("add", "{}")]
    assert [(part["kind"], part["text"]) for part in second["parts"]] == [("text", "7 of 8")]
    assert (second["call_id"], second["calls"]) == ("c1", [])


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "a"}], "<think>so</think>\na"),
        ([{"type": "image", "url": "x"}, {"type": "text", "text": "a"}], '{\n "type": "image",\n "url": "x"\n}a'),
        (["a", 3, {"text": None}], 'a3{\n "text": null\n}'),
        ([], ""),
    ],
)
def test_parts_of_other_writers_are_shown_as_they_are(parts: list[object], text: str) -> None:
    assert message_text({"role": "assistant", "content": "unused", "parts": parts}) == text
    assert message_text({"role": "assistant", "content": parts}) == text
