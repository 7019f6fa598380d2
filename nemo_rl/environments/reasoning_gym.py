"""The environment `reasoning_gym`: answers scored by reasoning_gym's own verifiers."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, BlockingCalls, StepResult, error_to_failure
from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.types import EnvStep, FailureClass, Message

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """Answers scored by reasoning_gym's own verifiers; the prompt's state names the task."""

    num_workers: int = Field(default=0, ge=0)  # processes; 0: a thread
    partial_credit: bool = False  # False: 1 for a full score, else 0
    require_stop: bool = False  # True: a response truncated by its token limit scores 0


class ReasoningGymEnvironment:
    """A single turn; reward `reasoning_gym` is the verifier's score of the answer: 1 for a full score, else 0.

    The prompt's state holds "task", a name in reasoning_gym, and "entry", the row that it generated. With
    `partial_credit` scores between 0 and 1 count; with `require_stop` a truncated response scores 0 (see
    boundary.RESPONSE_TRUNCATED). Scoring runs in a thread, which a hanging verifier would block, or with
    `num_workers` in processes, which are killed after `timeout_s`.
    """

    def __init__(self, name: str, section: ReasoningGymEnvironmentConfig) -> None:
        self._section = section
        self._blocking_calls = BlockingCalls(f"env-{name}", 1)
        self._pool: ProcessPool | None = None
        if section.num_workers:
            path = f"{__name__}:{score_answer.__name__}"
            self._pool = ProcessPool(path, section.num_workers, timeout_s=section.timeout_s)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await asyncio.gather(*map(self._score, conversations, states))

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        answer = extract_answer(conversation[-1].content)
        try:
            score = await self._call(state["task"], state["entry"], answer)
            if not self._section.partial_credit:
                score = float(score >= 1.0)
            if self._section.require_stop and state[RESPONSE_TRUNCATED]:
                score = 0.0
        except Exception as error:  # a state without its keys, a verifier that raises, a worker that was killed
            return error_to_failure(error, FailureClass.REWARD)
        return EnvStep(rewards={"reasoning_gym": score}, state=state, answer=answer)

    async def _call(self, task: str, entry: Mapping[str, Any], answer: str) -> float:
        if self._pool is not None:
            return await self._pool.call(task, dict(entry), answer)
        return await self._blocking_calls.run(partial(score_answer, task, dict(entry), answer))

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


REASONING_GYM = Entry(ReasoningGymEnvironmentConfig, make=ReasoningGymEnvironment)


def extract_answer(response: str) -> str:
    """Return the text in the last <answer> tags, else the whole response; verifiers deduct for further words."""
    tagged = ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()


def score_answer(task: str, entry: dict[str, Any], answer: str) -> float:
    """Return the task verifier's score, 0 to 1; an entry of a mixture ("composite") names its own task."""
    if task == "composite":
        task = entry["metadata"]["source_dataset"]
    return float(_get_scorer(task)(answer=answer, entry=entry))


@cache
def _get_scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
