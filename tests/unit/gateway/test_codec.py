import json

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import Codec, ReadingRules
from nemo_rl.gateway.markup import (
    ParsedCall,
    find_reasoning_parser,
    find_tool_parser,
    parse_hermes,
    parse_llama3_json,
    parse_qwen3_coder,
    parse_think,
)
from nemo_rl.types import Message, TextPart, ThinkingPart
from tests.unit.gateway.engines import CALL_TEXT, codec_of, encoder_of, tokens_of


def test_thinking_text_and_calls_are_read_apart():
    ids = tokens_of("qwen3", f"<think>sum</think>\nLet me add.\n{CALL_TEXT}")
    response = codec_of("qwen3").read(ids, ReadingRules("1"))
    assert response.reasoning == "sum"
    assert response.message.content == "Let me add."
    (call,) = response.message.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 3, "b": 4}')


def test_ids_of_calls_are_nine_letters_or_digits_and_follow_the_seed():
    ids = tokens_of("qwen3", CALL_TEXT + CALL_TEXT)
    first, again, other = (codec_of("qwen3").read(ids, ReadingRules(seed)).message for seed in ("1", "1", "2"))
    assert first == again
    call_ids = [call.id for call in (*first.tool_calls, *other.tool_calls)]
    assert len(set(call_ids)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)


def test_a_closing_tag_counts_where_the_prompt_or_the_response_opened_the_thinking():
    ids = tokens_of("qwen3", "so</think>4")
    assert codec_of("qwen3").read(ids, ReadingRules("1", is_thinking=True)).reasoning == "so"
    response = codec_of("qwen3").read(ids, ReadingRules("1"))
    assert (response.message.content, response.reasoning) == ("so</think>4", None)


def test_without_tools_or_parsers_calls_and_thinking_stay_text():
    text = f"<think>sum</think>{CALL_TEXT}"
    ids = tokens_of("qwen3", text)
    assert Codec(encoder_of("qwen3")).read(ids, ReadingRules("1")).message == Message("assistant", text)
    assert codec_of("qwen3").read(ids, ReadingRules("1", with_tools=False)).message == Message(
        "assistant", (ThinkingPart("sum"), TextPart(CALL_TEXT))
    )


@pytest.mark.parametrize(
    ("stop", "content"), [(("b",), "a"), (("cd", "bc"), "a"), (("z",), "abcd"), (("cd", "z"), "ab")]
)
def test_text_ends_before_the_first_stop_string(stop, content):
    response = codec_of("chatml").read(tokens_of("chatml", "abcd"), ReadingRules("1", stop_strings=stop))
    assert response.message.content == content


def test_a_tools_answer_that_the_template_would_drop_is_refused_at_the_start_of_a_chain():
    messages = (Message("user", "3+4"), Message("assistant", "call"), Message("tool", "7"))
    with pytest.raises(ConfigError, match="role tool"):
        codec_of("zephyr").encode_first_turn(messages, ())
    assert codec_of("chatml").encode_first_turn(messages, ())


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("plain", "plain", []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
        ('Sure.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "Sure.", [("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', "", [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),  # the closing tag was not sampled
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
    ],
)
def test_hermes_calls_are_taken_out_of_the_text(text, rest, calls):
    left, parsed = parse_hermes(text)
    assert left == rest
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("plain", "plain", []),
        (
            "Sure.\n<tool_call>\n<function=f>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            "Sure.",
            [("f", {"city": "Berlin", "n": 3})],
        ),
        ("<tool_call><function=f></function></tool_call>", "", [("f", {})]),
        ('<function=f><parameter=a>"x"</parameter></function>', "", [("f", {"a": '"x"'})]),  # a text stays as written
        ("<tool_call><function=f><parameter=a>[1, 2]", "", [("f", {"a": [1, 2]})]),  # cut by the token limit
        (
            "<tool_call><function=f></function></tool_call><tool_call>{</tool_call>",
            "<tool_call>{</tool_call>",
            [("f", {})],
        ),
    ],
)
def test_qwen3_coder_calls_are_taken_out_of_the_text(text, rest, calls):
    left, parsed = parse_qwen3_coder(text)
    assert left == rest
    assert [(call.name, json.loads(call.arguments)) for call in parsed] == calls


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "{",
        "[]",
        '"f"',
        "{}",
        '{"name": 1}',
        '{"name": ""}',
        "[" * 100_000,
        '{"name": "f"} tail',
        "1" * 5000,
        r'{"name": "\ud800"}',
    ],
)
def test_a_block_that_is_no_call_stays_in_the_text(inside):
    text = f" a<tool_call>{inside}</tool_call> b"
    assert parse_hermes(text) == (text, ())


def test_good_and_broken_blocks_are_told_apart():
    text = '<tool_call>{</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse_hermes(text) == ("<tool_call>{</tool_call>", (ParsedCall("f", "{}"),))


def test_llama_calls_are_a_whole_response():
    assert parse_llama3_json('{"name": "f", "parameters": {"a": "ü"}}') == ("", (ParsedCall("f", '{"a": "ü"}'),))
    assert parse_llama3_json('so {"name": "f"}') == ('so {"name": "f"}', ())


@pytest.mark.parametrize(
    ("text", "thinking", "rest"),
    [
        ("4", None, "4"),
        ("<think>\nso\n</think>\n\n4", "so", "4"),
        ("so</think>4", "so", "4"),  # the prompt opened it
        ("<think>cut off", "cut off", ""),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("what is <think>?", None, "what is <think>?"),
    ],
)
def test_thinking_is_apart_from_the_answer(text, thinking, rest):
    assert parse_think(text) == (thinking, rest)


def test_unknown_parsers_are_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"gateway\.tool_parser = 'hermess'.*hermes"):
        find_tool_parser("hermess")
    with pytest.raises(ConfigError, match=r"gateway\.reasoning_parser = 'x'.*think"):
        find_reasoning_parser("x")
    assert find_tool_parser(None) is None
    assert find_reasoning_parser(None) is None
