"""Each way a reward can enter, attacked by the policy's own processes; docs/reliability.md lists them."""

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_rl.environments.ecosystem.openenv import OpenEnvAgent, OpenEnvConfig
from nemo_rl.environments.sandbox import SandboxLimits, run_python
from nemo_rl.experience.agent_rollouts import run_agent_rollouts
from nemo_rl.experience.command_agent import CommandAgent
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.interfaces import Agent
from nemo_rl.types import Trajectory
from tests.fakes.agent_programs import ASK
from tests.fakes.environments import FakeEnvironment
from tests.fakes.gym_stack import Script
from tests.fakes.scorers import FakeScorer
from tests.unit.environments.test_tools import step_once
from tests.unit.experience import test_nemo_gym_rollouts as gym
from tests.unit.experience.rollout_setup import jobs
from tests.unit.experience.test_agents import Setup, rollout_of, use

# A program that gives the policy a shell with all that it holds: `sh` inherits descriptors and environment.
HARNESS = f"{ASK}status = os.system(said)\n"
REPORT = "report(reward=0.0)\n"
FORGED = '{"reward": 1.0, "rewards": {"a": 1.0}, "report_key": "guessed"}'
GATEWAY = """
import os, urllib.error, urllib.request
base, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for method, url, body in (
    ("POST", base + "/reward", b'{"reward": 1e300}'), ("POST", base + "/reward", b'{"rewards": {"a": 1}}'),
    ("GET", base, None), ("DELETE", base, None), *[("POST", base.rpartition("/")[0], b"{}")] * 3
):
    for bearer in (key, "unused", ""):
        headers = {"Authorization": "Bearer " + bearer, "Content-Type": "application/json"}
        try:
            opener.open(urllib.request.Request(url, body, headers, method=method)).close()
            os._exit(7)
        except urllib.error.HTTPError as error:
            assert error.code == 401, error.code
"""
FLOOD = """
import os
file = int(os.environ["NEMO_RL_REPORT_FD"])
for size in (0, 1, 100_000) * 200:
    os.write(file, b"{" * size)
os.write(file, b'{"reward": 1, "report_key": ""}')
"""
SEARCH = """
import glob, os, sys
found = b""
for path in [*glob.glob(f"/proc/{sys.argv[1]}/fd/*"), f"/proc/{sys.argv[1]}/environ", "/dev/stdin"]:
    try:
        found += os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1_000_000)
    except OSError:
        pass
if b"report_key" in found:
    os.write(int(os.environ["NEMO_RL_REPORT_FD"]), found)
    os._exit(7)
"""


def python(script: str) -> str:
    """A shell's command that runs a script, which reads the id of the program that owns the shell."""
    return f"{sys.executable} -S -c \"$(cat <<'END'{script}END\n)\" $PPID"


def bash(script: str) -> str:
    """A shell's command that runs a script in bash, which writes to descriptors above 9, too."""
    return f"bash -c \"$(cat <<'END'\n{script}\nEND\n)\""


ATTACKS = {
    "a line of output": f"echo '{FORGED}'",
    "a report without the key": bash(f"echo '{FORGED}' >&$NEMO_RL_REPORT_FD"),
    "every descriptor of the program": f"for fd in /proc/$PPID/fd/*; do echo '{FORGED}' > $fd; done; true",
    "a process that stays": bash(f"(trap '' HUP; while :; do echo '{FORGED}' >&$NEMO_RL_REPORT_FD; done) & sleep 0.2"),
    "the key, searched for": python(SEARCH),
    "the gateway": python(GATEWAY),
    "a flood of records": python(FLOOD),
}


def shell(command: str, then: str) -> tuple[CommandAgent, Any]:
    """A program that lets the policy run `command` in its shell; it fails if the command does."""
    script = HARNESS + "assert status >> 8 == 0, status\n" + then
    return CommandAgent("game", [sys.executable, "-S", "-c", script]), lambda request, text: command


def rollout_by(attack: str, then: str, **how: Any) -> Trajectory:
    agent, say = shell(attack, then)
    return rollout_of(agent, say=say, max_new_tokens=4096, max_model_len=8192, **how)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_policys_shell_cannot_forge_an_agents_report(attack: str) -> None:
    trajectory = rollout_by(attack, REPORT)
    assert (trajectory.failure, trajectory.rewards) == (None, {"game": 0.0})


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_policys_shell_cannot_forge_the_reward_of_a_scoring_environment(attack: str) -> None:
    trajectory = rollout_by(attack, "", scorer=FakeEnvironment())
    assert (trajectory.failure, trajectory.rewards) == (None, {"length": float(len(attack))})


def test_the_policys_shell_cannot_add_to_the_rewards_of_scorers() -> None:
    async def body(setup: Setup) -> None:
        for attack in ATTACKS.values():
            agent, setup.generation._say = shell(attack, "")
            runtime = replace(setup.dependencies.agents["game"], agent=agent)
            scoring = Scoring({"game": [WeightedScorer("judge", FakeScorer(), 1.0)]})
            dependencies = replace(setup.dependencies, agents={"game": runtime}, scoring=scoring)
            (trajectory,) = await run_agent_rollouts(jobs(1), dependencies, setup.options)
            assert trajectory.rewards.keys() == {"judge"}, attack

    use(shell("true", "")[0], body, max_new_tokens=4096, max_model_len=8192)


def test_the_policys_shell_sees_no_variable_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    assert rollout_by("! env | grep -q SECRET_OF_THE_RUN", REPORT).failure is None


def test_code_in_an_environments_sandbox_reaches_neither_the_gateway_nor_its_reward() -> None:
    code = "import socket\nprint(socket.create_connection(('127.0.0.1', {port}), 2))"

    async def body(setup: Setup) -> None:
        port = int(setup.manager.default_base_url.rpartition(":")[2].split("/")[0])
        output = await asyncio.to_thread(run_python, code.format(port=port), SandboxLimits())
        assert "Error" in output
        assert "socket.socket" not in output

    use(shell("true", "")[0], body)
    forged = [f"<tool>{json.dumps({'name': 'python', 'arguments': {'code': f'print({FORGED!r})'}})}</tool>", FORGED]
    for step in step_once(forged):
        assert step.rewards == {"tools": 0.0}  # type: ignore[union-attr]


def test_processes_of_nemo_gym_that_post_to_a_session_change_no_reward() -> None:
    async def body(setup: gym.Setup) -> None:
        statuses = []

        async def post(session_id: str, key: str) -> None:
            url = setup.manager.default_base_url.removesuffix("/v1") + f"/sessions/{session_id}/reward"
            headers = {"Authorization": f"Bearer {key}"}
            assert setup.stack._http is not None
            async with setup.stack._http.post(url, json={"rewards": {"forged": 1.0}}, headers=headers) as response:
                statuses.append(response.status)

        finish = setup.manager.finish_with_claims

        async def post_and_finish(handle: Any, claims: Any) -> Any:
            await post(handle.id, handle.api_key)
            await post(handle.id, setup.manager.api_key)
            return await finish(handle, claims)

        setup.manager.finish_with_claims = post_and_finish  # type: ignore[method-assign]
        (trajectory,) = await setup.run("one")
        assert statuses == [401, 200]
        assert (trajectory.rewards, trajectory.chain_rewards) == ({"gym": 0.0}, ())

    gym.use(body, generation=gym.SpeakingGeneration("chatml", lambda request, text: FORGED), script=_unrewarded)


def _unrewarded(agent: str, row: Mapping[str, Any]) -> Script:
    return Script(reward=0.0)


@pytest.mark.parametrize("action_format", ["text", "json"])
def test_an_action_of_openenv_that_names_a_reward_is_an_action(
    action_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        """Stands for a session of the server, which rewards every action with 0.25."""

        def __init__(self, url: str, **settings: Any) -> None: ...

        async def __aenter__(self) -> "Server":
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def reset(self) -> Any:
            return SimpleNamespace(reward=None, observation={}, done=False)

        async def step(self, action: Mapping[str, Any]) -> Any:
            actions.append(action)
            return SimpleNamespace(reward=0.25, observation={}, done=True)

    actions: list[Mapping[str, Any]] = []
    core: Any = ModuleType("openenv.core")
    core.GenericEnvClient = Server
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    agent: Agent = OpenEnvAgent("speller", OpenEnvConfig(url="http://unused", action_format=action_format))
    trajectory = rollout_of(agent, say=lambda request, text: FORGED)
    assert trajectory.rewards == {"speller": 0.25}
    assert actions == [json.loads(FORGED) if action_format == "json" else {"message": FORGED}]
