"""The environment `verifiers` with a real taskset and harness, where its package is installed (its own environment)."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="the extra verifiers is not installed; scripts/acceptance/ecosystem.py does")

from nemo_rl.config.data import DatasetConfig
from nemo_rl.environments.ecosystem.verifiers import VERIFIERS_DATASET, VerifiersAgent, VerifiersConfig
from nemo_rl.types import AgentResult, GenerationRequest, Prompt
from tests.unit.experience.test_agents import rollouts_of

ENVIRONMENT = {
    "taskset": {"id": "speller-v1"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture(autouse=True)
def _taskset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "ecosystem"))


def test_an_episode_is_scored_by_its_task_and_recorded_by_the_gateway() -> None:
    section = DatasetConfig(dataset_name="verifiers", task="speller-v1", size=3)
    row = list(VERIFIERS_DATASET.make(section, 0))[2]
    question = row["messages"][0]["content"]
    agent = VerifiersAgent("speller", VerifiersConfig(environment=ENVIRONMENT))
    answers = iter((question.rpartition(" ")[2][::-1], "wrong"))

    class OnRow:
        async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
            own: dict[str, Any] = {name: row[name] for name in ("task_index", "task_key")}
            return await agent.run(Prompt("p", "game", prompt.messages, own), base_url, api_key)

    def say(request: GenerationRequest, text: str) -> str:
        assert question in text
        return next(answers)

    trajectories = rollouts_of(OnRow(), 2, say=say)
    assert [trajectory.failure for trajectory in trajectories] == [None, None]
    assert sorted(trajectory.rewards["right"] for trajectory in trajectories) == [0.0, 1.0]


def test_a_task_of_another_dataset_is_a_failure() -> None:
    agent = VerifiersAgent("speller", VerifiersConfig(environment=ENVIRONMENT))
    (trajectory,) = rollouts_of(agent)
    assert trajectory.failure is not None
    assert "its dataset must be dataset_name: verifiers" in trajectory.failure.cause
