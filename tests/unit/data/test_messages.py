"""Messages as parts: plain strings stay valid, records hold every part, images are refused by their place."""

import json
from typing import Any

import pytest

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.messages import parse_content, parse_message, parse_record, to_openai_message, to_record
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, TextPart, ThinkingPart, ToolCall, ToolResult
from tests.templates import byte_tokenizer

ADD = ToolCall("c1", "add", '{"a": 1}')
THOUGHT = {"type": "thinking", "thinking": "x"}
CALL = {"id": "c1", "function": {"name": "add", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_a_message_of_a_text_is_the_same_message_of_parts() -> None:
    message = Message("assistant", "I add.", (ADD,))
    assert message == Message("assistant", (TextPart("I add."), ADD))
    assert (message.content, message.tool_calls, message.tool_call_id, message.thinking) == (
        "I add.",
        (ADD,),
        None,
        None,
    )
    result = Message("tool", "7", tool_call_id="c1")
    assert result.parts == (ToolResult("c1", (TextPart("7"),)),)
    assert (result.content, result.tool_call_id, result.tool_calls) == ("7", "c1", ())
    assert Message("user").parts == Message("user", (TextPart(""),)).parts == ()


def test_views_leave_thinking_out_and_join_texts_around_calls() -> None:
    message = Message("assistant", (ThinkingPart("sum"), TextPart("I "), ADD, TextPart("add.")))
    assert (message.content, message.thinking, message.tool_calls) == ("I add.", "sum", (ADD,))
    assert message.without_thinking() == Message("assistant", (TextPart("I "), ADD, TextPart("add.")))
    plain = Message("user", "hi")
    assert plain.without_thinking() is plain


@pytest.mark.parametrize(
    ("role", "content", "named"),
    [
        ("user", [TextPart("see"), IMAGE], "parts[1]"),
        ("user", None, "NoneType"),
        ("user", (ToolResult("c1", ()),), "parts[0] is a tool's result in a message of role user"),
    ],
)
def test_content_that_is_no_part_is_refused_with_its_index(role: Any, content: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Message(role, content)
    assert named in str(caught.value)


RECORDS: list[tuple[Message, str]] = [  # and the line that records hold
    (Message("user", "hi"), '{"role": "user", "content": "hi"}'),
    (Message("user", ""), '{"role": "user", "content": ""}'),
    (
        Message("assistant", "I add.", (ADD,)),
        '{"role": "assistant", "content": "I add.", '
        '"tool_calls": [{"id": "c1", "name": "add", "arguments": "{\\"a\\": 1}"}]}',
    ),
    (Message("tool", "7", tool_call_id="c1"), '{"role": "tool", "content": "7", "tool_call_id": "c1"}'),
    (Message("tool", "7"), '{"role": "tool", "content": "7"}'),
    (
        Message("assistant", (ThinkingPart("sum"), TextPart("7"))),
        '{"role": "assistant", "content": "7", '
        '"parts": [{"type": "thinking", "text": "sum"}, {"type": "text", "text": "7"}]}',
    ),
    (
        Message("assistant", (ADD, TextPart("done"))),
        '{"role": "assistant", "content": "done", '
        '"tool_calls": [{"id": "c1", "name": "add", "arguments": "{\\"a\\": 1}"}], '
        '"parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": "{\\"a\\": 1}"}, '
        '{"type": "text", "text": "done"}]}',
    ),
]


@pytest.mark.parametrize(("message", "line"), RECORDS)
def test_a_record_has_parts_only_where_plain_fields_do_not_say_everything(message: Message, line: str) -> None:
    assert json.dumps(to_record(message)) == line
    assert parse_record(json.loads(line)) == message


def test_a_tool_result_of_two_parts_makes_the_round_trip() -> None:
    message = Message("tool", (ToolResult("c1", (TextPart("a"), TextPart("b"))),))
    assert parse_record(json.loads(json.dumps(to_record(message)))) == message


def test_a_row_may_have_a_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "input_text", "text": "c"}]
    assert parse_message({"role": "user", "content": parts}) == Message("user", "abc")
    assert parse_message({"role": "user", "content": "abc"}) == Message("user", "abc")
    assert parse_message({"role": "assistant", "content": None}) == Message("assistant")
    thought = [{"type": "thinking", "thinking": "sum"}, {"type": "text", "text": "7"}]
    message = parse_message({"role": "assistant", "content": thought})
    assert message == Message("assistant", (ThinkingPart("sum"), TextPart("7")))
    assert to_openai_message(message) == {"role": "assistant", "content": "7", "reasoning_content": "sum"}


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}, "messages[2].content[1]"),
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages[2].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio'"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[2].content[0] has no text"),
        ({"role": "user", "content": ["see"]}, "messages[2].content[0]"),
        ({"role": "user", "content": 3}, "messages[2].content is 3"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "only the assistant thinks"),
        ({"role": "robot", "content": "x"}, "messages[2]"),
        ({"role": "user", "content": "x", "reasoning_content": "so"}, "messages[2].reasoning_content: thinking in a"),
        ({"role": "assistant", "content": [THOUGHT], "reasoning_content": "so"}, "messages[2].reasoning_content: the"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "messages[2].reasoning_content is 3"),
        ({"role": "user", "content": "x", "tool_call_id": "c1"}, "messages[2].tool_call_id: 'c1'"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "messages[2].tool_calls[0] has no function.name"),
        (
            {"role": "assistant", "tool_calls": [CALL, {"function": {}}]},
            "messages[2].tool_calls[1] has no function.name",
        ),
    ],
)
def test_a_row_with_another_part_names_its_place_and_type(item: Any, place: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_message(item, "messages[2]")
    assert place in str(caught.value)


def test_parts_and_plain_strings_give_the_same_tokens() -> None:
    tokenizer = byte_tokenizer("qwen3")
    encoder = ChatEncoder(tokenizer)
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [to_openai_call()]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    (*_, last) = encoder.encode_prompt(tuple(parse_message(item) for item in plain))
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    assert last.token_ids == tuple(tokenizer.encode(str(text), add_special_tokens=False))
    as_parts = [{**item, "content": [{"type": "text", "text": item["content"]}]} for item in plain]
    assert encoder.encode_prompt(tuple(parse_message(item) for item in as_parts))[-1].token_ids == last.token_ids


def to_openai_call() -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_thinking_is_rendered_as_the_template_writes_it_or_refused_where_it_knows_none() -> None:
    message = Message("assistant", (ThinkingPart("sum"), TextPart("7")))
    encoder = ChatEncoder(byte_tokenizer("chatml"), chat_template=THINKING_TEMPLATE)
    assert encoder.decode(encoder.encode_answer(message)) == "<think>sum</think>7"
    assert encoder.decode(encoder.encode_answer(message.without_thinking())) == "7"
    with pytest.raises(ConfigError, match="its thinking is not rendered"):
        ChatEncoder(byte_tokenizer("chatml")).encode_answer(message)


def test_content_of_a_text_is_one_part() -> None:
    assert parse_content("a") == (TextPart("a"),)
    assert parse_content(None) == parse_content("") == ()


@pytest.mark.parametrize("thinking", ["sum", ""])
def test_reasoning_content_of_a_row_is_the_assistants_thinking(thinking: str) -> None:
    message = Message("assistant", (ThinkingPart(thinking), TextPart("7"), ADD))
    assert parse_message(to_openai_message(message)) == message
    empty_columns = {"reasoning_content": None, "tool_call_id": "", "tool_calls": None}
    assert parse_message({"role": "user", "content": "3+4", **empty_columns}) == Message("user", "3+4")


def test_a_tools_message_without_a_result_holds_texts_alone() -> None:
    assert Message("tool", (TextPart("7"),), tool_call_id="c1") == Message("tool", "7", tool_call_id="c1")
    for part in (ThinkingPart("so"), ADD):
        with pytest.raises(ValueError, match=rf"parts\[1\] is a {type(part).__name__} in a tool's message"):
            Message("tool", (TextPart("7"), part))


def test_a_call_id_that_no_result_takes_is_an_error() -> None:
    with pytest.raises(ValueError, match="tool_call_id 'c1': a message of role user answers no call"):
        Message("user", "hi", tool_call_id="c1")
    with pytest.raises(ValueError, match="tool_call_id 'c2': the parts have a tool's result"):
        Message("tool", (ToolResult("c1", (TextPart("7"),)),), tool_call_id="c2")
