"""Messages of records as text: parts are joined as `Message.content` joins them."""

import pytest

from nemo_rl.data.messages import to_record
from nemo_rl.types import Message, Part, TextPart, ThinkingPart, ToolCall, ToolResult
from nemo_rl.viewer.conversation import message_text

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
