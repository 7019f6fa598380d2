"""The environment `spelling_duel`, a game of two policies: each spells a word backward, and the better speller wins."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.data.reasoning_gym_rows import REASONING_GYM
from nemo_rl.data.rows import Row
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, StepResult, step_each
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, FailureClass, Message

NUM_PLAYERS = 2
WIN, DRAW, LOSS = 1.0, 0.5, 0.0
TASK = "spell_backward"  # of reasoning_gym, whose questions and words these are


class SpellingDuelEnvironmentConfig(EnvironmentConfig):
    """A game of two policies: each spells a word backward, the second after it has read the first one's turn."""


class SpellingDuelEnvironment:
    """Reward `spelling_duel` of each policy: 1 for a right answer to a wrong one, 0 for the opposite, else 0.5.

    An answer cut by its token limit is wrong; a first one ends the game, which is then lost. States come from
    `duel_rows`.
    """

    def __init__(self, name: str, section: SpellingDuelEnvironmentConfig) -> None:
        self._players = tuple(section.policies)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states, FailureClass.REWARD)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        is_cut = bool(state[RESPONSE_TRUNCATED])
        answers = [*state.get("answers", ()), conversation[-1].content.strip()]
        was_right = [*state.get("was_right", ()), not is_cut and answers[-1] == state["words"][len(answers) - 1][::-1]]
        state = {**state, "answers": answers, "was_right": was_right}
        if len(answers) == NUM_PLAYERS:
            return EnvStep(policy_rewards=self._rewards(*was_right), state=state, answer=answers[0])
        if is_cut:
            lost = {self._players[0]: {"spelling_duel": LOSS}}
            return EnvStep(policy_rewards=lost, state=state, answer=answers[0])
        question = Message("user", state["questions"][1])
        return EnvStep((question,), done=False, state=state, policy=self._players[1])

    def _rewards(self, first: bool, second: bool) -> dict[str, dict[str, float]]:
        """Return the rewards by policy, given whether each answer is right."""
        score = DRAW if first == second else WIN if first else LOSS
        values = (score, WIN + LOSS - score)
        return {policy: {"spelling_duel": value} for policy, value in zip(self._players, values, strict=True)}

    async def close(self) -> None:
        """Do nothing: no resources are held."""


def check_spelling_duel(key: str, section: SpellingDuelEnvironmentConfig, config: Any) -> None:
    """Raise ConfigError unless two policies play, with a turn each."""
    if len(section.policies) != NUM_PLAYERS:
        raise ConfigError(f"{key}.policies", section.policies, "names the two policies that play, the first one first")
    if config.max_rollout_turns < NUM_PLAYERS:
        problem = f"{key} is a game of {NUM_PLAYERS} turns; must be at least {NUM_PLAYERS}"
        raise ConfigError("grpo.max_rollout_turns", config.max_rollout_turns, problem)


SPELLING_DUEL = Entry(SpellingDuelEnvironmentConfig, make=SpellingDuelEnvironment, check=check_spelling_duel)


def duel_rows(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield the rows of the dataset `nemo_rl.environments.spelling_duel.duel_rows`: two words each, one per policy.

    Words are those of reasoning_gym's task `spell_backward` with `section.task_kwargs`; the second word of a row is the
    first of the next one.
    """
    entries = [row["entry"] for row in REASONING_GYM.make(section.model_copy(update={"task": TASK}), seed)]
    for first, second in zip(entries, [*entries[1:], entries[0]], strict=True):
        yield {
            "messages": [{"role": "user", "content": first["question"]}],
            "questions": [first["question"], second["question"]],
            "words": [first["metadata"]["word"], second["metadata"]["word"]],
        }
