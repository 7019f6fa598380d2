"""The built-in environments of a single turn.

`math` compares answers as mathematics by math-verify (1/2 equals 0.5 and \\frac{2}{4}), `reasoning_gym` scores them by
reasoning_gym's own verifiers, and `reward_model` leaves scoring to the entry's `scorers`. What runs them is imported
when they run, since a configuration with one of them imports this module.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

if TYPE_CHECKING:
    from nemo_rl.environments.boundary import StepResult

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class MathEnvironmentConfig(EnvironmentConfig):
    """Answers compared as mathematics."""

    # math_verify: as mathematics; last_answer: the last "Answer: ..." as text, as DAPO scores; choice: its letter.
    verifier: Literal["math_verify", "last_answer", "choice"] = "math_verify"
    num_workers: int = Field(default=2, gt=0)  # processes
    verify_timeout_s: float = Field(default=10.0, gt=0)  # per answer


class MathEnvironment:
    """A single turn; reward `math` is 1 if the response's answer equals `state["answer"]`, else 0.

    Parsing and comparing run in processes (math-verify's own timeouts need the main thread); a comparison that exceeds
    `verify_timeout_s` fails its item alone.
    """

    def __init__(self, name: str, section: MathEnvironmentConfig) -> None:
        from nemo_rl.environments.process_pool import ProcessPool

        self._pool = ProcessPool(VERIFIERS[section.verifier], section.num_workers, timeout_s=section.verify_timeout_s)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        from nemo_rl.environments.boundary import step_each

        return await step_each(self._verify, conversations, states, FailureClass.REWARD)

    async def _verify(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> "StepResult":
        from nemo_rl.environments.boundary import error_to_failure

        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        try:
            is_correct, answer = await self._pool.call(str(state["answer"]), conversation[-1].content)
        except WorkerError as error:
            return error_to_failure(error, FailureClass.REWARD)
        return EnvStep(rewards={"math": float(is_correct)}, state=state, answer=answer)

    async def close(self) -> None:
        await self._pool.close()


VERIFIERS = {
    "math_verify": f"{__name__}:verify_answer",
    "last_answer": "nemo_rl.environments.final_answers:verify_last_answer",
    "choice": "nemo_rl.environments.final_answers:verify_choice",
}
MATH = Entry(MathEnvironmentConfig, make=MathEnvironment)


def verify_answer(reference: str, response: str) -> tuple[bool, str | None]:
    """Return whether the response's answer equals the reference, and that answer as text (None: there is none).

    The reference is LaTeX or plain, with or without $ or \\boxed, or a solution that ends with "#### answer". Raises
    ValueError if it is not mathematics, since nothing would ever equal it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its timeout is off
    text = reference.rpartition("####")[2].strip()
    is_marked = "$" in text or "\\boxed" in text
    gold = parse(text if is_marked else f"\\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"the reference answer {reference!r} is not mathematics")
    answer = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not answer:
        return False, None
    return verify(gold, answer, timeout_seconds=None), str(answer[-1])


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
        from nemo_rl.environments.blocking_calls import BlockingCalls
        from nemo_rl.environments.process_pool import ProcessPool

        self._section = section
        self._blocking_calls = BlockingCalls(f"env-{name}", 1)
        self._pool: ProcessPool | None = None
        if section.num_workers:
            path = f"{__name__}:{score_answer.__name__}"
            self._pool = ProcessPool(path, section.num_workers, timeout_s=section.timeout_s)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        from nemo_rl.environments.boundary import step_each

        return await step_each(self._score, conversations, states, FailureClass.REWARD)

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> "StepResult":
        from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, error_to_failure

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


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """A single turn whose rewards are those of its `scorers`."""

    has_own_rewards: ClassVar[bool] = False


def check_reward_model_environment(key: str, section: RewardModelEnvironmentConfig, config: object) -> None:
    """Raise ConfigError for an entry without scorers."""
    if not section.scorers:
        raise ConfigError(f"{key}.scorers", [], "its rewards are those of scorers: must name one or more")


class RewardModelEnvironment:
    """A single turn without a reward of its own: `env.<name>.scorers` score the rollout when it has ended."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        return [
            EnvStep(state=state, answer=conversation[-1].content)
            for conversation, state in zip(conversations, states, strict=True)
        ]

    async def close(self) -> None:
        """Do nothing: no resources are held."""


REWARD_MODEL = Entry(
    RewardModelEnvironmentConfig,
    make=lambda name, section: RewardModelEnvironment(),
    check=check_reward_model_environment,
)
