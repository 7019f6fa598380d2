import asyncio
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.environments.scorers.judge import JudgeScorer, JudgeScorerConfig, make_answer_parser
from nemo_rl.errors import ConfigError
from nemo_rl.types import Failure, FailureClass, ImagePart, Message, ResponseFault, ScoreRequest, TextPart
from tests.fakes.scoring_server import scoring_server

PROMPT = "{{ prompt }} -> {{ response }} (expected {{ metadata.answer }})"
REQUEST = ScoreRequest(
    (Message("system", "be brief"), Message("user", "2 + 2"), Message("assistant", "4")), {"answer": "four"}
)


def section(url: str = "http://x", **changes: Any) -> JudgeScorerConfig:
    entry = {
        "base_urls": [url],
        "model": "m",
        "prompt": PROMPT,
        "limits": EndpointLimitsConfig(max_retries=0),
        **changes,
    }
    return JudgeScorerConfig.model_validate(entry)


def judged(
    says: str, request: ScoreRequest = REQUEST, **changes: Any
) -> tuple[float | Failure | ResponseFault, dict[str, Any]]:
    """The score, and what the judge was asked."""
    seen: dict[str, Any] = {}

    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        seen.update(body, path=path)
        usage = {"total_tokens": 9}
        return web.json_response({"choices": [{"message": {"content": says}}], "usage": usage})

    async def main() -> float | Failure | ResponseFault:
        async with scoring_server(answer) as url:
            scorer = JudgeScorer("judge", section(url, **changes))
            (score,) = await scorer.score([request])
            await scorer.close()
        return score

    return asyncio.run(main()), seen


def test_the_judge_sees_the_prompt_and_its_last_score_counts() -> None:
    score, asked = judged("A score: 3 at first. Score = 7.5", system_prompt="You are strict.")
    assert score == 7.5
    assert asked["path"] == "/v1/chat/completions"
    assert asked["messages"] == [
        {"role": "system", "content": "You are strict."},
        {"role": "user", "content": "2 + 2 -> 4 (expected four)"},
    ]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 512)


def test_a_judge_with_images_sees_those_of_prompt_and_tools_in_their_order() -> None:
    first, second = (ImagePart(name, file) for name, file in (("a", b"\x89PNG 1"), ("b", b"\xff\xd8 2")))
    asked, screen = Message("user", (TextPart("click"), first)), Message("tool", (second,), tool_call_id="c1")
    request = ScoreRequest((asked, screen, Message("assistant", "4")), {"answer": "four"})
    score, seen = judged("Score: 1", request, images=True)
    assert score == 1
    (message,) = seen["messages"]
    text, *pictures = message["content"]
    assert text == {"type": "text", "text": " -> 4 (expected four)"}
    urls = [picture["image_url"]["url"] for picture in pictures]
    assert urls == ["data:image/png;base64,iVBORyAx", "data:image/jpeg;base64,/9ggMg=="]
    assert judged("Score: 1", request)[1]["messages"][0]["content"] == " -> 4 (expected four)"


@pytest.mark.parametrize(
    ("says", "changes", "cause"),
    [
        ("I cannot tell", {}, "no score in the judge's answer"),
        ("Score: 11", {"min_score": 0, "max_score": 10}, "outside of 0.0 to 10.0"),
        ("Score: 1", {"prompt": "{{ metadata.missing }}"}, "missing"),
        ("yes", {"parser": "math:sqrt"}, "TypeError"),
    ],
)
def test_an_answer_without_a_score_is_a_failure_and_never_zero(says: str, changes: dict[str, Any], cause: str) -> None:
    score, _ = judged(says, **changes)
    assert isinstance(score, Failure)
    assert score.failure_class is FailureClass.REWARD
    assert cause in score.cause


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."),
        (413, "Request Entity Too Large"),  # a proxy's
    ],
)
def test_a_response_that_the_judge_has_no_room_for_is_its_own_fault(status: int, message: str) -> None:
    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": message}}, status=status)

    async def main() -> object:
        async with scoring_server(answer) as url:
            scorer = JudgeScorer("judge", section(url))
            (score,) = await scorer.score([REQUEST])
            await scorer.close()
        return score

    assert asyncio.run(main()) == ResponseFault("too_long_for_scorer")


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("score (", "not a regular expression"),
        ("score", "has 0 groups"),
        ("math:squirt", "did you mean"),
        ("math:pi", "not a"),
    ],
)
def test_parsers_that_cannot_be_used_are_refused_at_start(parser: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_answer_parser("scorers.judge.parser", parser)


def test_a_template_that_cannot_be_read_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="not a Jinja template"):
        JudgeScorer("judge", section(prompt="{{ response"))
