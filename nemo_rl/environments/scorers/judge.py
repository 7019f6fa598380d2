"""The scorer `judge`: a generative model judges over chat completions, and its answer is parsed as a number."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from nemo_rl.config.environment import EndpointScorerConfig
from nemo_rl.config.kinds import Entry, import_path
from nemo_rl.data.images import to_data_url
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.environments.scorers.checked_scorer import ScoreError, score_each
from nemo_rl.errors import ConfigError
from nemo_rl.types import Failure, ResponseFault, ScoreRequest

CHARACTERS_PER_TOKEN = 4  # estimate for `tokens_per_minute` until the server reports usage


class JudgeScorerConfig(EndpointScorerConfig):
    """A generative judge over chat completions."""

    prompt: str  # Jinja, with `messages`, `prompt`, `response` and the row's `metadata`
    system_prompt: str | None = None  # system message of each request, if any
    images: bool = False  # show the judge the conversation's images too, in their order after the prompt
    parser: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"  # a regular expression with one group, or a dotted path
    min_score: float | None = None  # a score below it or above `max_score` is a typed failure
    max_score: float | None = None  # a score above it or below `min_score` is a typed failure
    temperature: float = Field(default=0.0, ge=0)  # sampling temperature of the judge; 0: greedy
    max_tokens: int = Field(default=512, gt=0)  # maximum length of the judge's reply


def check_judge(key: str, section: JudgeScorerConfig, config: object) -> None:
    """Raise ConfigError for an empty range of scores."""
    low, high = section.min_score, section.max_score
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"{key}.min_score", low, f"must be below max_score = {high:g}")


class JudgeScorer:
    """A judge model over chat completions.

    Its template `prompt` sees `messages`, `prompt` (the message before the response), `response` and `metadata`.
    """

    def __init__(self, name: str, section: JudgeScorerConfig) -> None:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from nemo_rl.distributed.endpoint import Endpoint  # loads aiohttp

        key = f"scorers.{name}"
        self._section = section
        self._endpoint = Endpoint(key, section)
        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(section.prompt)
        except TemplateError as error:
            raise ConfigError(f"{key}.prompt", section.prompt, f"not a Jinja template: {error}") from error
        self._parse = make_answer_parser(f"{key}.parser", section.parser)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure | ResponseFault]:
        return await score_each(requests, self._score)

    async def close(self) -> None:
        await self._endpoint.close()

    async def _score(self, request: ScoreRequest) -> float:
        text = self._render(request)
        body = {
            "model": self._section.model,
            "messages": self._messages(text, request),
            "temperature": self._section.temperature,
            "max_tokens": self._section.max_tokens,
        }
        characters = len(text) + len(self._section.system_prompt or "")
        estimated = characters // CHARACTERS_PER_TOKEN + self._section.max_tokens
        answer = await self._endpoint.post("/v1/chat/completions", body, num_tokens=estimated)
        used = answer.get("usage") or {} if isinstance(answer, dict) else {}
        if isinstance(used.get("total_tokens"), int):
            self._endpoint.correct_token_estimate(used["total_tokens"], estimated=estimated)
        return self._check_range(self._parse(_extract_content(answer)))

    def _render(self, request: ScoreRequest) -> str:
        *before, response = request.messages
        return self._template.render(
            messages=messages_to_dicts(request.messages),
            prompt=before[-1].content if before else "",
            response=response.content,
            metadata=dict(request.metadata),
        )

    def _messages(self, text: str, request: ScoreRequest) -> list[dict[str, Any]]:
        shown = [image for message in request.messages for image in message.images] if self._section.images else []
        pictures = [{"type": "image_url", "image_url": {"url": to_data_url(image)}} for image in shown]
        content = [{"type": "text", "text": text}, *pictures] if pictures else text
        system = self._section.system_prompt
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]

    def _check_range(self, score: float) -> float:
        low, high = self._section.min_score, self._section.max_score
        if (low is not None and score < low) or (high is not None and score > high):
            raise ScoreError(f"the judge gave {score:g}, outside of {low} to {high}")
        return score


JUDGE = Entry(JudgeScorerConfig, make=JudgeScorer, check=check_judge)


def make_answer_parser(key: str, parser: str) -> Callable[[str], float]:
    """Return the parser of a regular expression with one group, whose last match counts, or of a dotted path."""
    if re.fullmatch(r"[\w.]+:\w+", parser):
        function = import_path(key, parser)
        if not callable(function):
            raise ConfigError(key, parser, "not a function")
        return partial(_call_parser, function)
    try:
        pattern = re.compile(parser)
    except re.error as error:
        raise ConfigError(key, parser, f"not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise ConfigError(key, parser, f"has {pattern.groups} groups; must have one: the score")

    def parse(text: str) -> float:
        found = pattern.findall(text)
        if not found:
            raise ScoreError(f"no score in the judge's answer: {text[:200]!r}")
        return float(found[-1])

    return parse


def _call_parser(function: Callable[[str], Any], text: str) -> float:
    return float(function(text))


def _extract_content(answer: Any) -> str:
    try:
        return answer["choices"][0]["message"]["content"] or ""
    except (KeyError, IndexError, TypeError) as error:
        raise ScoreError(f"no chat completion: {str(answer)[:200]}") from error
