"""Tags in a model's text: the same as by a regular expression, in linear time."""

import random
import re
import time
from collections.abc import Callable

import pytest

from nemo_rl.environments.final_answers import score_tagged_answer, verify_choice, verify_last_answer
from nemo_rl.environments.reasoning_gym import extract_answer
from nemo_rl.environments.response_tags import find_tags, last_tag
from nemo_rl.environments.sliding_puzzle import parse_action
from nemo_rl.gateway.markup import parse_hermes, parse_qwen3_coder, parse_think


def test_tags_are_those_of_a_regular_expression() -> None:
    pattern, rng = re.compile(r"<(tool|answer)>(.*?)</\1>", re.DOTALL), random.Random(0)
    pieces = ["<tool>", "</tool>", "<answer>", "</answer>", "x", "\n", "<", "tool>"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        assert list(find_tags(text, "tool", "answer")) == pattern.findall(text), text
        assert last_tag(text, "answer") == next(iter(re.findall(r"(?s)<answer>(.*?)</answer>", text)[::-1]), None)


READERS: dict[str, Callable[[str], object]] = {
    "answer": extract_answer,
    "tools": lambda text: next(find_tags(text, "tool", "answer"), None),
    "tagged": lambda text: score_tagged_answer([{"content": text}], {"answer": "1"}),
    "last_answer": lambda text: verify_last_answer("1", text),
    "choice": lambda text: verify_choice("A", text),
    "action": parse_action,
    "think": parse_think,
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
}
PIECES = (
    *(
        "<answer>",
        "<tool>",
        "<tool></answer>",
        "<think>",
        "</think>\n<answer>",
        "<action>",
        "<action> ",
        "answer:",
        "(",
    ),
    *("<tool_call>", "<function=", "<function=f>", "<function=f><parameter=", "<parameter=a>\n", "<parameter=", "\n"),
    *("<function=f><parameter=a>", "<tool_call><function=f>", "answer: (", " ", "<action>a "),
)


def seconds(read: Callable[[str], object], text: str) -> float:
    """Return the least computing time of three readings."""
    times = []
    for _ in range(3):
        start = time.process_time()
        read(text)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("name", READERS)
def test_time_grows_with_the_length_and_not_with_its_square(name: str) -> None:
    for piece in PIECES:
        short, long = (f"<function=f>{piece * (size // len(piece))}" for size in (2**13, 2**17))
        ratio = seconds(READERS[name], long) / max(seconds(READERS[name], short), 1e-4)
        assert ratio < 100, (piece, ratio)  # 16 times the length; its square: 256
