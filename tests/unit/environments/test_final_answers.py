import json
from pathlib import Path

import pytest

from nemo_rl.environments.final_answers import normalize_answer, score_tagged_answer, verify_choice, verify_last_answer

# References and responses with the verdict that NeMo-RL 0.7's and verl 0.9's verifiers of DAPO both give.
VERDICTS = Path(__file__).with_name("dapo_verdicts.jsonl")


def test_verdicts_are_those_of_dapos_verifier() -> None:
    cases = [json.loads(line) for line in VERDICTS.read_text(encoding="utf-8").splitlines()]
    assert len(cases) >= 400
    differing = [case for case in cases if verify_last_answer(*case[:2])[0] is not case[2]]
    assert differing == []


@pytest.mark.parametrize(
    ("text", "normal"),
    [("x = $1,234 \\text{ cm}$", "1234"), ("\\frac12", "\\frac{1}{2}"), ("\\boxed{7}", "7"), ("90^\\circ", "90")],
)
def test_units_spaces_and_text_commands_do_not_count(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_the_last_answer_line_counts() -> None:
    assert verify_last_answer("34", "Answer: 5\nno.\nAnswer: $34$") == (True, "34")
    assert verify_last_answer("34", "The result is 34") == (False, None)
    assert verify_last_answer("34", "Answer: 34" + " " * 400) == (False, None)  # not at the end
    assert verify_last_answer("[INVALID]", "34") == (False, None)


def test_the_letter_counts() -> None:
    assert verify_choice("B", "because ... Answer: (b)") == (True, "B")
    assert verify_choice("C", "Antwort: C") == (True, "C")
    assert verify_choice("A", "Answer: none") == (False, None)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>6 * 7</think>\n<answer>42</answer>", (1.0, 1.0, 1.0)),
        ("<think>6 * 7</think>\n<answer>41</answer>", (0.0, 1.0, 1.0)),
        ("<answer>42</answer>", (1.0, 1.0, 0.0)),
        ("<think></think>\n<answer>forty</answer>", (0.0, 0.0, 1.0)),
        ("<think></think>\n<answer>1</answer><answer>42</answer>", (1.0, 1.0, 0.0)),
        ("42", (1.0, 1.0, 0.0)),
    ],
)
def test_tagged_answers_have_three_rewards(response: str, expected: tuple[float, float, float]) -> None:
    scores = score_tagged_answer([{"role": "assistant", "content": response}], {"answer": 42})
    assert (scores["correctness"], scores["integer"], scores["format"]) == expected
