"""Environment `reasoning_gym`: answers scored by reasoning_gym's own verifiers, in processes that can only compute."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.value_types import Processes, Seconds
from nemo_rl.environments.response_tags import last_tag
from nemo_rl.types import EnvStep, FailureClass, Message

if TYPE_CHECKING:
    from nemo_rl.environments.boundary import StepResult

SCORER_FACTORY = "nemo_rl.environments.reasoning_gym_verifiers:make_scorer"


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """Answers scored by reasoning_gym's own verifiers; the prompt's state names the task."""

    num_workers: Processes = 1  # processes
    verify_timeout_s: Seconds = 5.0  # computing time per answer; one that needs more is wrong
    partial_credit: bool = False  # False: 1 for a full score, else 0
    require_stop: bool = False  # True: a response truncated by its token limit scores 0


class ReasoningGymEnvironment:
    """A single turn; reward `reasoning_gym` is the verifier's score of the answer: 1 for a full score, else 0.

    The prompt's state holds "task", a name in reasoning_gym, and "entry", the row that it generated. With
    `partial_credit` scores between 0 and 1 count; with `require_stop` a truncated response scores 0 (see
    boundary.RESPONSE_TRUNCATED).

    Verifiers run in sandboxed processes and evaluate nothing but mathematics (mathematical_text.py). An answer that
    breaks its verifier, or needs more computing time than `verify_timeout_s`, is wrong.
    """

    bounds_items = True

    def __init__(self, name: str, section: ReasoningGymEnvironmentConfig) -> None:
        from nemo_rl.environments.process_pool import PoolOptions, ProcessPool

        self._section = section
        options = PoolOptions(section.timeout_s, section.verify_timeout_s, sandboxed=True, max_batch_size=32)
        self._pool = ProcessPool(SCORER_FACTORY, section.num_workers, options, factory_args=())

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> "Sequence[StepResult]":
        from nemo_rl.environments.boundary import step_each

        return await step_each(self._score, conversations, states, FailureClass.REWARD)

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> "StepResult":
        from nemo_rl.environments.boundary import RESPONSE_TRUNCATED

        answer = extract_answer(conversation[-1].content)
        verdict, fault = await self._pool.call_verifier(state["task"], dict(state["entry"]), answer)
        score, fault = (0.0, fault) if verdict is None else verdict
        if not self._section.partial_credit:
            score = float(score >= 1.0)
        if self._section.require_stop and state[RESPONSE_TRUNCATED]:
            score = 0.0
        return EnvStep(rewards={"reasoning_gym": score}, state=state, answer=answer, response_fault=fault)

    async def close(self) -> None:
        await self._pool.close()


REASONING_GYM = Entry(ReasoningGymEnvironmentConfig, make=ReasoningGymEnvironment)


def extract_answer(response: str) -> str:
    """Return the text in the last <answer> tags, else the whole response; verifiers deduct for further words."""
    tagged = last_tag(response, "answer")
    return (response if tagged is None else tagged).strip()
