"""Environment `math`: answers compared as mathematics by math-verify (1/2 equals 0.5 and \\frac{2}{4}), or as text."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.value_types import Processes, Seconds
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

if TYPE_CHECKING:
    from nemo_rl.environments.boundary import StepResult

VERIFIERS = {
    "math_verify": f"{__name__}:verify_answer",
    "last_answer": "nemo_rl.environments.final_answers:verify_last_answer",
    "choice": "nemo_rl.environments.final_answers:verify_choice",
}
KEPT_REFERENCES = 1024  # parsed, per process


class MathEnvironmentConfig(EnvironmentConfig):
    """Answers compared as mathematics."""

    # math_verify: as mathematics; last_answer: the last "Answer: ..." as text, as DAPO scores; choice: its letter.
    verifier: Literal["math_verify", "last_answer", "choice"] = "math_verify"
    num_workers: Processes = 2  # processes
    verify_timeout_s: Seconds = 5.0  # computing time per answer; one that needs more is wrong


class MathEnvironment:
    """A single turn; reward `math` is 1 if the response's answer equals `state["answer"]`, else 0.

    Parsing and comparing run in sandboxed processes. A response that breaks the comparison, or needs more computing
    time than `verify_timeout_s`, is wrong.
    """

    bounds_items = True

    def __init__(self, name: str, section: MathEnvironmentConfig) -> None:
        from nemo_rl.environments.process_pool import PoolOptions, ProcessPool

        options = PoolOptions(section.timeout_s, section.verify_timeout_s, sandboxed=True, max_batch_size=32)
        factory = f"{__name__}:{make_verifier.__name__}"
        self._pool = ProcessPool(factory, section.num_workers, options, factory_args=(section.verifier,))

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        from nemo_rl.environments.boundary import step_each

        return await step_each(self._verify, conversations, states, FailureClass.REWARD)

    async def _verify(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> "StepResult":
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        verdict, fault = await self._pool.call_verifier(str(state["answer"]), conversation[-1].content)
        is_correct, answer, fault = (False, None, fault) if verdict is None else verdict
        reward = float(is_correct is True)
        return EnvStep(rewards={"math": reward}, state=state, answer=answer, response_fault=fault)

    async def close(self) -> None:
        await self._pool.close()


MATH = Entry(MathEnvironmentConfig, make=MathEnvironment)


def make_verifier(name: str) -> Callable[[str, str], tuple[bool, str | None, str | None]]:
    """Return a verifier for a process of its own, which from now on evaluates nothing but mathematics.

    The verifier gives whether the response is right, its answer, and what the response did to it, if anything; it
    raises ValueError for a reference that is not mathematics.
    """
    module, _, function = VERIFIERS[name].partition(":")
    compare: Callable[[str, str], tuple[bool, str | None]] = getattr(importlib.import_module(module), function)
    if name == "math_verify":
        compare("1", "\\boxed{1}")  # imports of its parser evaluate code

    from nemo_rl.environments.mathematical_text import refuse_other_code

    refuse_other_code()

    def verify(reference: str, response: str) -> tuple[bool, str | None, str | None]:
        if name == "math_verify":
            _parse_reference(reference)
        try:
            return *compare(reference, response), None
        except Exception:  # thousands of brackets, more memory than there is  # noqa: BLE001
            return False, None, "verifier_error"

    return verify


def verify_answer(reference: str, response: str) -> tuple[bool, str | None]:
    """Return whether the response's answer equals the reference, and that answer as text, None if missing.

    The reference is LaTeX or plain, with or without $ or \\boxed, or a solution that ends with "#### answer". Raises
    ValueError if it is not mathematics, since nothing would ever equal it.
    """
    from math_verify import parse, verify

    gold = _parse_reference(reference)
    answer = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not answer:
        return False, None
    return verify(gold, answer, timeout_seconds=None), str(answer[-1])


@lru_cache(KEPT_REFERENCES)
def _parse_reference(reference: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its timeout is off
    text = reference.rpartition("####")[2].strip()
    is_marked = "$" in text or "\\boxed" in text
    gold = parse(text if is_marked else f"\\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"the reference answer {reference!r} is not mathematics")
    return gold
