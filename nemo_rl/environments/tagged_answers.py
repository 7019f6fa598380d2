"""Environment `tagged_answers`: a single turn scored by a weighted sum of functions of the answer between two tags.

The functions have NeMo-RL's names, as its recipes of vision write them.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry, Section
from nemo_rl.config.value_types import Processes, Seconds
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

if TYPE_CHECKING:
    from nemo_rl.environments.boundary import StepResult

MIN_AREA = 1e-3
THINKING_SHARE = 0.25  # share of the reward `format` for thinking tags; the rest is for the answer's
GEO3K_FORMAT = re.compile(r"</think>.*\\boxed\{.*\}", re.DOTALL)
OPTIONS: Mapping[str, Mapping[str, type]] = {  # keyword arguments of each function
    "format": {"think_tag": str, "answer_tag": str},
    "exact_alnum": {"answer_tag": str},
    "math_expr": {"tag": str},
    "bbox_giou": {"answer_tag": str, "giou_penalty_thres": float},
    "geo3k": {"format_score": float},
}


class RewardFunction(Section):
    """One function of the answer."""

    name: Literal["format", "exact_alnum", "math_expr", "bbox_giou", "geo3k"]  # what it scores, by NeMo-RL's name
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # its share is its weight by the sum of all
    kwargs: dict[str, Any] = Field(default_factory=dict)  # e.g. answer_tag


class TaggedAnswersConfig(EnvironmentConfig):
    """Rewards by name: the functions' values times their shares."""

    reward_functions: list[RewardFunction] = Field(min_length=1)
    num_workers: Processes = 2  # processes
    verify_timeout_s: Seconds = 5.0  # computing time per answer; one that needs more is wrong


def check_tagged_answers(key: str, section: TaggedAnswersConfig, config: object) -> None:
    """Raise ConfigError for a function that is named twice, and for options that a function does not have."""
    names = [each.name for each in section.reward_functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}.reward_functions", names, "names a function twice")
    for index, each in enumerate(section.reward_functions):
        for option, value in each.kwargs.items():
            where, known = f"{key}.reward_functions.{index}.kwargs.{option}", OPTIONS[each.name]
            if option not in known:
                raise ConfigError(where, value, f"{each.name} has no such option", known=known)
            if not isinstance(value, (int, float) if known[option] is float else str) or isinstance(value, bool):
                raise ConfigError(where, value, f"must be a {'number' if known[option] is float else 'text'}")


class TaggedAnswers:
    """A single turn, compared with `state["answer"]`; the functions run in sandboxed processes."""

    bounds_items = True

    def __init__(self, name: str, section: TaggedAnswersConfig) -> None:
        from nemo_rl.environments.process_pool import PoolOptions, ProcessPool

        options = PoolOptions(section.timeout_s, section.verify_timeout_s, sandboxed=True, max_batch_size=32)
        functions = [each.model_dump() for each in section.reward_functions]
        self._functions = section.reward_functions
        self._pool = ProcessPool(
            f"{__name__}:{make_functions.__name__}", section.num_workers, options, factory_args=(functions,)
        )

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        from nemo_rl.environments.boundary import step_each

        return await step_each(self._score, conversations, states, FailureClass.REWARD)

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> "StepResult":
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        response = conversation[-1].content
        rewards, fault = await self._pool.call_verifier(str(state["answer"]), response)
        rewards = {each.name: 0.0 for each in self._functions} if rewards is None else rewards
        return EnvStep(rewards=rewards, state=state, answer=self._find_answer(response), response_fault=fault)

    def _find_answer(self, response: str) -> str | None:
        """Return the answer as the first function that reads one finds it."""
        for each in self._functions:
            if each.name == "geo3k":
                return _last_boxed(response)
            if each.name != "format":
                return find_tagged(response, each.kwargs.get("tag") or each.kwargs.get("answer_tag") or "answer")
        return find_tagged(response, "answer")

    async def close(self) -> None:
        await self._pool.close()


TAGGED_ANSWERS = Entry(TaggedAnswersConfig, make=TaggedAnswers, check=check_tagged_answers)


def make_functions(functions: Sequence[Mapping[str, Any]]) -> Callable[[str, str], dict[str, float]]:
    """Return the weighted functions for a process of its own, which from now on evaluates nothing but mathematics."""
    from nemo_rl.environments.mathematical_text import refuse_other_code

    if any(each["name"] in ("math_expr", "geo3k") for each in functions):
        score_expression("1", "<answer>1</answer>")  # imports of its parser evaluate code
    refuse_other_code()
    total = sum(each["weight"] for each in functions)

    def score(reference: str, response: str) -> dict[str, float]:
        return {
            each["name"]: each["weight"] / total * FUNCTIONS[each["name"]](reference, response, **each["kwargs"])
            for each in functions
        }

    return score


def find_tagged(text: str, tag: str) -> str | None:
    """Return the text from the first opening tag to the last closing one; None without both in this order."""
    start, end = text.find(f"<{tag}>"), text.rfind(f"</{tag}>")
    return text[start + len(tag) + 2 : end] if 0 <= start < end else None


def score_format(reference: str, response: str, think_tag: str = "think", answer_tag: str = "answer") -> float:
    """Return 0.25 for a pair of thinking tags, plus 0.75 for a pair of answer tags."""
    has_thinking, has_answer = (find_tagged(response, tag) is not None for tag in (think_tag, answer_tag))
    return THINKING_SHARE * has_thinking + (1 - THINKING_SHARE) * has_answer


def score_exact(reference: str, response: str, answer_tag: str = "answer") -> float:
    """Return 1 if the letters and digits of the tagged answer are the reference's, whatever their case."""
    answer = find_tagged(response, answer_tag)
    return float(answer is not None and _letters(answer) == _letters(reference))


def _letters(text: str) -> str:
    return "".join(character for character in text if character.isalnum()).lower()


def score_expression(reference: str, response: str, tag: str = "answer") -> float:
    """Return 1 if the tagged answer equals the reference as mathematics."""
    return _compare(reference, find_tagged(response, tag))


def _compare(reference: str, answer: str | None) -> float:
    from nemo_rl.environments.math_answers import verify_answer

    return 0.0 if answer is None else float(verify_answer(reference, f"\\boxed{{{answer.strip()}}}")[0])


def score_box(reference: str, response: str, answer_tag: str = "answer", giou_penalty_thres: float = 10.0) -> float:
    """Return how well the box [x1, y1, x2, y2] in the tags covers the reference's.

    It is the intersection by the union, and below the threshold the generalized one (arXiv:1902.09630), which is
    negative for boxes apart. 0 for what is no box.
    """
    true, answered = (_read_box(text) for text in (reference, find_tagged(response, answer_tag)))
    if true is None or answered is None:
        return 0.0
    inner = [max(a, b) for a, b in zip(true[:2], answered[:2], strict=True)]
    inner += [min(a, b) for a, b in zip(true[2:], answered[2:], strict=True)]
    overlap = max(0.0, inner[2] - inner[0]) * max(0.0, inner[3] - inner[1])
    union = max(MIN_AREA, _area(true) + _area(answered) - overlap)
    ratio = overlap / union
    if ratio >= giou_penalty_thres:
        return ratio
    outer = [min(a, b) for a, b in zip(true[:2], answered[:2], strict=True)]
    outer += [max(a, b) for a, b in zip(true[2:], answered[2:], strict=True)]
    hull = max(MIN_AREA, _area(outer))
    value = ratio - (hull - union) / hull
    return value if math.isfinite(value) else 0.0


def _read_box(text: str | None) -> list[float] | None:
    """Return four finite numbers, the first corner's before the second's; None for anything else."""
    try:
        numbers = [float(part) for part in (text or "").replace("[", "").replace("]", "").split(",")]
    except ValueError:
        return None
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        return None
    return numbers if numbers[0] <= numbers[2] and numbers[1] <= numbers[3] else None


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def score_geo3k(reference: str, response: str, format_score: float = 0.1) -> float:
    """Return `format_score` for a box after the end of thinking, plus the rest if the last box equals the reference."""
    has_format = GEO3K_FORMAT.search(response) is not None
    return (1 - format_score) * _compare(reference, _last_boxed(response)) + format_score * has_format


def _last_boxed(text: str) -> str | None:
    """Return the content of the last box, up to the brace that closes it; None without one."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for index, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:index]
    return None


FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "format": score_format,
    "exact_alnum": score_exact,
    "math_expr": score_expression,
    "bbox_giou": score_box,
    "geo3k": score_geo3k,
}
