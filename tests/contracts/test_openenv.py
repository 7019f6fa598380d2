"""The environment `openenv` against a real OpenEnv server, where its package is installed (its own environment)."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openenv", reason="the extra openenv is not installed; scripts/acceptance/ecosystem.py installs it")

from nemo_rl.environments.ecosystem.openenv import OpenEnvAgent, OpenEnvConfig
from nemo_rl.types import GenerationRequest, Trajectory
from tests.unit.experience.test_agents import rollouts_of

START_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The example's server, in a thread of this process."""
    import uvicorn

    from examples.ecosystem.openenv_server import make_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(START_S)


def rollout(url: str, *turns: str, count: int = 1, **keys: Any) -> tuple[Trajectory, ...]:
    section = OpenEnvConfig(url=url, observation_field="text", **keys)

    def say(request: GenerationRequest, text: str) -> str:
        return turns[text.count("<|im_start|>assistant") - 1]

    return rollouts_of(OpenEnvAgent("speller", section), count, say=say)


def test_observations_are_read_and_the_rewards_of_all_steps_add_up(url: str) -> None:
    for trajectory in rollout(url, "no", "", count=2):  # the word is empty: no word is spelled backward as ""
        assert trajectory.failure is None
        assert trajectory.rewards == {"speller": pytest.approx(1.0 - 0.1)}
        assert [m.message.content for m in trajectory.message_log if m.is_generated] == ["no", ""]
        assert "wrong" in "".join(m.message.content for m in trajectory.message_log if not m.is_generated)


def test_an_action_that_is_no_json_ends_the_rollout_with_what_it_has(url: str) -> None:
    (trajectory,) = rollout(url, json.dumps({"message": "no"}), "seven", action_format="json")
    assert trajectory.rewards == {"speller": pytest.approx(-0.1)}
    assert trajectory.num_turns == 2


def test_a_server_that_refuses_an_action_fails_the_rollout(url: str) -> None:
    (trajectory,) = rollout(url, "1", action_field="said")
    assert trajectory.failure is not None
    assert "message" in trajectory.failure.cause
