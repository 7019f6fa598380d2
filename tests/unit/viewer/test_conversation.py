"""Messages of records as text: parts are joined as `Message.content` joins them."""

import pytest

from nemo_rl.data.messages import to_record
from nemo_rl.types import Message, Part, TextPart, ThinkingPart, ToolCall, ToolResult
from nemo_rl.viewer import conversation
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


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"answer": "42", "solution": "by hand"}, "42"),
        ({"ground_truth": 7}, "7"),
        ({"target": [1, 2]}, "[\n 1,\n 2\n]"),
        ({"row": {"expected_answer": "nested"}}, "nested"),
        ({"answer": None, "label": "cat"}, "cat"),
        ({"answer": "a" * 500}, "a" * 400 + "…"),
        ({"answer": "\x1b[31m"}, "␛[31m"),
        ({"grid": "x"}, ""),
        (None, ""),
        ("text", ""),
    ],
)
def test_expected_answer_is_found_by_its_usual_names(state: object, expected: str) -> None:
    assert conversation.target_of({"env_state": state}) == expected


def test_short_messages_are_unfolded_whoever_says_them() -> None:
    long = "x" * (conversation.SHORT_CHARS + 1)
    roles = ("system", "tool", "assistant")
    chain: conversation.Chain = [{"role": role, "content": text} for role in roles for text in ("short", long)]
    folded = [turn["is_folded"] for turn in conversation.turns_of(chain)]
    assert folded == [False, True, False, True, False, False]


def test_thinking_stands_apart_from_the_answer() -> None:
    assert conversation.split_answer("<think>a</think>b<think>c</think>\nd") == ("a\nc", "b\nd")
    assert conversation.split_answer("<think>cut") == ("cut", "")


@pytest.mark.parametrize(
    ("text", "shown", "is_special"),
    [
        ("<|im_end|>", "<|im_end|>", True),
        ("</s>", "</s>", True),
        ("[PAD]", "[PAD]", True),
        ("<think>", "<think>", True),
        ("a<b", "a<b", False),
        ("\n\n", "↵\n↵\n", False),
        ("\t", "⇥\t", False),
        ("", "␃", False),
    ],
)
def test_tokens_that_people_overlook_are_visible(text: str, shown: str, is_special: bool) -> None:
    (token,) = conversation.colour_tokens({"text": [text], "mask": "0"}, "policy")["tokens"]
    assert (token["text"], token["is_special"]) == (shown, is_special)


@pytest.mark.parametrize(
    ("colour", "values"),
    [
        ("policy", {"above -0.5": -0.2, "-0.5 to -1.5": -1.2, "-3.5 to -4.5": -3.6, "below -4.5": -9.0}),
        ("difference", {"below -0.06": -0.5, "-0.02 to 0": -0.01, "0": 0.0, "0.02 to 0.04": 0.03, "above 0.06": 0.1}),
        ("advantage", {"-1 to -0.5": -0.7, "0 to 0.5": 0.5, "above 1.5": 2.0}),
    ],
)
def test_scale_says_what_a_colour_stands_for(colour: str, values: dict[str, float]) -> None:
    names = {text: kind for kind, text in conversation.colour_scale(colour)}
    for text, value in values.items():
        details = {
            "text": ["a"],
            "mask": "1",
            "policy_logprobs": [value],
            "engine_logprobs": [0.0],
            "advantage": value,
        }
        (token,) = conversation.colour_tokens(details, colour)["tokens"]
        shades = {f"{token['kind'][0]}{int(token['kind'][1:]) - 1}", token["kind"]}  # two shades of t look alike
        assert names[text] in (shades if colour == "policy" else {token["kind"]}), text
