import json

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import (
    ParsedCall,
    find_reasoning_parser,
    find_tool_parser,
    parse_hermes,
    parse_llama3_json,
    parse_think,
)


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
