"""A harness in place of the tool `bash` of `harbor`: it reaches the gateway alone, and the tests reward its files."""

import asyncio
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.environments.ecosystem import containers
from nemo_rl.environments.ecosystem.harbor import HarborAgent, HarborConfig, check_harbor
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, FailureClass, GenerationRequest, Prompt, Trajectory
from tests.contracts.test_harbor import EXAMPLE, has_containers
from tests.unit.experience.test_agents import HARNESS, SETTINGS, Say, rollouts_of

pytestmark = pytest.mark.skipif(not has_containers(), reason="bubblewrap starts no container on this machine")

PYTHON = "/usr/bin/python3"
WORK = 'word = open("word.txt").read(); open("answer.txt", "w").write(word.strip()[::-1])\n'


def reply(request: GenerationRequest, text: str) -> str:
    return "a reply"


def rollout(
    script: str, directory: Path = EXAMPLE / "spell-moon", count: int = 1, say: Say = reply, **keys: Any
) -> Trajectory:
    """The trajectory of a harness that is this script."""
    command = [PYTHON, "-c", HARNESS + script, "{prompt}", "{workdir}"]
    agent = HarborAgent("harbor", HarborConfig.model_validate({"command": command, "files": [SETTINGS], **keys}))

    class InDirectory:
        async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
            state: Mapping[str, Any] = {"task_directory": str(directory)}
            return await agent.run(replace(prompt, env_state=state), base_url, api_key)

    return rollouts_of(InDirectory(), count, say=say, is_harness=True)[-1]


def test_a_harness_calls_the_policy_and_the_tests_reward_the_files_that_it_leaves() -> None:
    trajectory = rollout('ask(settings["url"], sys.argv[1]); ask(settings["url"], os.getcwd())\n' + WORK, count=2)
    assert trajectory.failure is None
    assert (trajectory.rewards, trajectory.response_faults) == ({"harbor": 1.0}, ())
    logs = (trajectory.message_log, *trajectory.other_chains)
    assert [[m.message.content for m in log] for log in logs] == [["question0", "a reply"], ["/app", "a reply"]]


def test_a_harness_that_does_nothing_earns_nothing() -> None:
    assert rollout('ask(settings["url"], "x")').rewards == {"harbor": 0.0}


def test_a_harness_reaches_the_gateway_alone_and_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        script = f"""
import getpass, socket, subprocess
ask(settings["url"], "x")
assert getpass.getuser() == "agent"
for address in (("127.0.0.1", {listener.getsockname()[1]}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 1)
        sys.exit("reached")
    except OSError:
        pass
assert [os.path.exists(p) for p in ("{secret}", "/root/.ssh", "/logs", "/tests")] == [False] * 4
assert b"hidden" not in b"".join(Path(p).read_bytes() for p in Path("/proc").glob("[0-9]*/environ"))
assert subprocess.run(["touch", "/usr/x"]).returncode
"""
        trajectory = rollout(script + WORK)
    assert (trajectory.failure, trajectory.rewards, trajectory.response_faults) == (None, {"harbor": 1.0}, ())


def test_files_count_although_the_harness_fails() -> None:
    trajectory = rollout(f'ask(settings["url"], "x")\n{WORK}sys.exit(3)')
    outcome = (trajectory.failure, trajectory.rewards, trajectory.response_faults)
    assert outcome == (None, {"harbor": 1.0}, ("harness_failed",))


def test_files_count_although_the_harness_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline comes when it says that its files are there, however slow the machine is."""
    deadlines: list[asyncio.Timeout] = []

    def timeout(delay: float) -> asyncio.Timeout:
        deadlines.append(asyncio.timeout(delay))
        return deadlines[-1]

    def say(request: GenerationRequest, text: str) -> str:
        if "done" in text:
            deadlines[0].reschedule(0.0)
        return "a reply"

    own = SimpleNamespace(timeout=timeout, create_subprocess_exec=asyncio.create_subprocess_exec)
    monkeypatch.setattr(containers, "asyncio", own)
    script = f'ask(settings["url"], "x")\n{WORK}ask(settings["url"], "done")\nimport time; time.sleep(3600)'
    trajectory = rollout(script, say=say, timeout_s=3600.0)
    outcome = (trajectory.failure, trajectory.rewards, trajectory.response_faults)
    assert outcome == (None, {"harbor": 1.0}, ("harness_timeout",))


@pytest.mark.parametrize("num_answered", [0, 1])
@pytest.mark.parametrize("at_failure", ["raise", "sys.exit(0)"])
def test_a_harness_that_gives_up_on_a_failed_engine_earns_no_reward(num_answered: int, at_failure: str) -> None:
    answers = iter(["a reply"] * num_answered)
    script = f"""
{WORK}
try:
    ask(settings["url"], "x"); ask(settings["url"], "y")
except OSError:
    {at_failure}
"""
    trajectory = rollout(script, say=lambda *_: next(answers, None))
    assert trajectory.failure is not None
    assert trajectory.failure.failure_class is FailureClass.INFRA
    assert "it was made to fail" in trajectory.failure.cause
    assert trajectory.rewards == {}


def test_a_harness_that_ends_before_it_calls_the_policy_is_a_failure() -> None:
    failure = rollout("sys.exit('no such option: --fix')").failure
    assert failure is not None
    assert failure.failure_class is FailureClass.AGENT
    assert "exit status 1 before it called the policy" in failure.cause
    assert "no such option: --fix" in failure.cause


def test_more_connections_than_a_harness_needs_are_closed() -> None:
    script = """
import select, socket
host, port = settings["url"].split("/")[2].split(":")
connections = [socket.create_connection((host, int(port))) for _ in range(40)]
closed = []
while len(closed) < 8:
    closed = select.select(connections, [], [], 20)[0]
assert len(closed) == 8 and {each.recv(1) for each in closed} == {b""}
for each in connections:
    each.close()
while True:
    try:
        ask(settings["url"], "x")
        break
    except OSError:  # the others are not ended yet
        pass
"""
    trajectory = rollout(script + WORK)
    assert (trajectory.failure, trajectory.response_faults) == (None, ())


def test_a_harness_elsewhere_needs_its_directory(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "harness"
    shutil.copy(os.path.realpath(PYTHON), program)
    command = [str(program), "-c", HARNESS + 'ask(settings["url"], "x")\n' + WORK, "{prompt}"]
    with pytest.raises(ConfigError, match=f"no directory in it has the program {program}"):
        HarborAgent("h", HarborConfig(command=command))
    with pytest.raises(ConfigError, match="absolute path"):
        HarborAgent("h", HarborConfig(command=command, mounts=["bin"]))
    with pytest.raises(ConfigError, match="no such program"):
        HarborAgent("h", HarborConfig(command=["no-such-harness", "{prompt}"]))
    keys = {"command": command, "files": [SETTINGS], "mounts": [str(tmp_path / "bin")]}
    agent = HarborAgent("harbor", HarborConfig.model_validate(keys))

    class InDirectory:
        async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
            state = {"task_directory": str(EXAMPLE / "spell-moon")}
            return await agent.run(replace(prompt, env_state=state), base_url, api_key)

    (trajectory,) = rollouts_of(InDirectory(), say=reply)
    assert (trajectory.failure, trajectory.rewards) == (None, {"harbor": 1.0})


def test_a_harness_that_the_path_finds_runs_by_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(os.path.realpath(PYTHON), tmp_path / "bin" / "harness")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    program = ["harness", "-c", HARNESS + 'ask(settings["url"], "x")\n' + WORK, "{prompt}"]
    trajectory = rollout("", command=program, mounts=[str(tmp_path / "bin")])
    assert (trajectory.failure, trajectory.rewards) == (None, {"harbor": 1.0})


def test_a_harness_that_is_a_link_needs_its_targets_directory(tmp_path: Path) -> None:
    for name in ("bin", "opt"):
        (tmp_path / name).mkdir()
    target = tmp_path / "opt" / "harness"
    shutil.copy(os.path.realpath(PYTHON), target)
    (tmp_path / "bin" / "harness").symlink_to(target)
    keys = {"command": [str(tmp_path / "bin" / "harness"), "{prompt}"], "mounts": [str(tmp_path / "bin")]}
    with pytest.raises(ConfigError, match=f"no directory in it has the program {target}"):
        HarborAgent("h", HarborConfig.model_validate(keys))
    HarborAgent("h", HarborConfig.model_validate({**keys, "mounts": [str(tmp_path)]}))


@pytest.mark.parametrize(
    "keys", [{"files": [SETTINGS]}, {"variables": {"A": "b"}}, {"mounts": ["/opt"]}, {"inherited_variables": ["A"]}]
)
def test_keys_of_a_harness_without_one_are_refused(keys: dict[str, Any]) -> None:
    config: Any = SimpleNamespace(gateway=SimpleNamespace(tool_parser="hermes"))
    with pytest.raises(ConfigError, match="only with command") as caught:
        check_harbor("env.h", HarborConfig.model_validate(keys), config)
    assert caught.value.key == f"env.h.{next(iter(keys))}"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"command": [PYTHON]}, r"needs \{prompt\} or \{prompt_file\}"),
        ({"command": [PYTHON, "{prompt}"], "answer_file": "a"}, "a harness writes its files itself"),
    ],
)
def test_a_harness_that_cannot_run_is_refused(keys: dict[str, Any], problem: str) -> None:
    config: Any = GRPORunConfig.model_construct()
    with pytest.raises(ConfigError, match=problem):
        check_harbor("env.h", HarborConfig(**keys), config)
