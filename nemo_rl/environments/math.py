"""The environment `math`: answers compared as mathematics by math-verify (1/2 equals 0.5 and \\frac{2}{4})."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.boundary import StepResult, error_to_failure
from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.errors import WorkerError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message


class MathEnvironmentConfig(EnvironmentConfig):
    """Answers compared as mathematics."""

    num_workers: int = Field(default=2, gt=0)  # processes
    verify_timeout_s: float = Field(default=10.0, gt=0)  # per answer


class MathEnvironment:
    """A single turn; reward `math` is 1 if the response's answer equals `state["answer"]`, else 0.

    Parsing and comparing run in processes (math-verify's own timeouts need the main thread); a comparison that exceeds
    `verify_timeout_s` fails its item alone.
    """

    def __init__(self, name: str, section: MathEnvironmentConfig) -> None:
        self._pool = ProcessPool(
            f"{__name__}:{verify_answer.__name__}", section.num_workers, timeout_s=section.verify_timeout_s
        )

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await asyncio.gather(*map(self._verify, conversations, states))

    async def _verify(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        try:
            is_correct, answer = await self._pool.call(str(state["answer"]), conversation[-1].content)
        except WorkerError as error:
            return error_to_failure(error, FailureClass.REWARD)
        return EnvStep(rewards={"math": float(is_correct)}, state=state, answer=answer)

    async def close(self) -> None:
        await self._pool.close()


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
