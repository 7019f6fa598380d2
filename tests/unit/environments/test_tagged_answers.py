"""Rewards of tagged answers: values by hand, and answers that would break their functions."""

import asyncio

import pytest

from nemo_rl.environments.tagged_answers import (
    RewardFunction,
    TaggedAnswers,
    TaggedAnswersConfig,
    check_tagged_answers,
    score_box,
    score_exact,
    score_expression,
    score_format,
    score_geo3k,
)
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Message


def tagged(answer: str) -> str:
    return f"<think>so</think> <answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (tagged("1"), 1.0),
        ("<answer>1</answer>", 0.75),
        ("<think></think>", 0.25),
        ("</answer><answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_a_quarter_thinking_and_the_rest_the_answer(response: str, reward: float) -> None:
    assert score_format("1", response) == reward


def test_letters_and_digits_decide() -> None:
    assert score_exact("Yes", tagged(" yes. ")) == 1.0
    assert score_exact("12", tagged("1,2")) == 1.0
    assert score_exact("12", "12") == score_exact("12", tagged("13")) == 0.0
    assert score_exact("12", "<box>12</box>", answer_tag="box") == 1.0


def test_expressions_are_compared_as_mathematics() -> None:
    assert score_expression("2 \\sqrt{221}", tagged("\\sqrt{884}")) == 1.0
    assert score_expression("0.5", tagged("1/3")) == 0.0
    assert score_geo3k("1/2", "<think>hm</think> it is \\boxed{0.5}") == pytest.approx(1.0)
    assert score_geo3k("1/2", "\\boxed{\\frac{1}{2}}") == pytest.approx(0.9)
    assert score_geo3k("1/2", "</think>\\boxed{3}", format_score=0.2) == pytest.approx(0.2)
    assert score_geo3k("1/2", "</think>\\boxed{3") == 0.0


@pytest.mark.parametrize(
    ("answer", "threshold", "reward"),
    [
        ("[0, 0, 10, 10]", 0.5, 1.0),
        ("0, 0, 10, 5", 0.5, 0.5),  # half of it, not below the threshold
        ("[0, 0, 10, 4]", 0.5, 0.4),  # below; the hull is the union, so that nothing is taken off
        ("[20, 0, 30, 10]", 0.5, -1 / 3),  # apart: no overlap, and 100 of 300 in the hull are neither
        ("[0, 0, nan, 10]", 0.5, 0.0),
        ("[0, 0, 1e308, 1e308]", 0.5, 0.0),
        ("[10, 10, 0, 0]", 0.5, 0.0),  # corners in the wrong order: its area would be positive, its overlap 0
        ("[1000, 1000, -1000, -1000]", 0.5, 0.0),
        ("[0, 0, 10]", 0.5, 0.0),
        ("the box", 0.5, 0.0),
    ],
)
def test_boxes_are_compared_by_what_they_cover(answer: str, threshold: float, reward: float) -> None:
    assert score_box("[0, 0, 10, 10]", tagged(answer), giou_penalty_thres=threshold) == pytest.approx(reward)


def test_the_environment_gives_the_weighted_rewards_by_name() -> None:
    functions = [RewardFunction(name="format", weight=1), RewardFunction(name="exact_alnum", weight=3)]
    section = TaggedAnswersConfig(reward_functions=functions, num_workers=1)

    async def main() -> list[EnvStep]:
        environment = TaggedAnswers("clevr", section)
        asked = [[Message("user", "?"), Message("assistant", text)] for text in (tagged("3"), "<answer>4</answer>")]
        try:
            return list(await environment.step(asked, [{"answer": "3"}] * 2))  # type: ignore[arg-type]
        finally:
            await environment.close()

    right, wrong = asyncio.run(main())
    assert (right.rewards, right.answer, right.done) == ({"format": 0.25, "exact_alnum": 0.75}, "3", True)
    assert wrong.rewards == {"format": pytest.approx(0.1875), "exact_alnum": 0.0}


@pytest.mark.parametrize(
    ("functions", "key"),
    [
        ([{"name": "format"}, {"name": "format"}], "env.e.reward_functions"),
        ([{"name": "format", "kwargs": {"tag": "x"}}], "env.e.reward_functions.0.kwargs.tag"),
        ([{"name": "geo3k", "kwargs": {"format_score": "x"}}], "env.e.reward_functions.0.kwargs.format_score"),
    ],
)
def test_functions_and_their_options_are_checked(functions: list[dict], key: str) -> None:
    section = TaggedAnswersConfig.model_validate({"reward_functions": functions})
    with pytest.raises(ConfigError) as refused:
        check_tagged_answers("env.e", section, None)
    assert refused.value.key == key
