"""The environment `harbor` on real task directories in real bubblewrap containers."""

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.sources import HARBOR
from nemo_rl.environments.harbor import HarborAgent, HarborConfig
from nemo_rl.types import AgentResult, GenerationRequest, Prompt, Trajectory
from tests.unit.experience.test_agents import rollouts_of


def has_containers() -> bool:
    argv = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(argv, capture_output=True, timeout=30).returncode == 0


pytestmark = pytest.mark.skipif(not has_containers(), reason="bubblewrap starts no container on this machine")

CONNECT = 'import socket; socket.create_connection(("127.0.0.1", %d), 1); print("rea" + "ched")'
EXAMPLE = Path(__file__).parents[2] / "examples" / "ecosystem" / "harbor"


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def rollout(
    *turns: str, directory: Path = EXAMPLE / "spell-moon", count: int = 1, **keys: Any
) -> tuple[Trajectory, ...]:
    agent = HarborAgent("harbor", HarborConfig(**keys))

    class InFolder:
        async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
            state: Mapping[str, Any] = {"task_directory": str(directory)}
            return await agent.run(replace(prompt, env_state=state), base_url, api_key)

    def say(request: GenerationRequest, text: str) -> str:
        return turns[text.count("<|im_start|>assistant") - 1]

    return rollouts_of(InFolder(), count, say=say, max_new_tokens=1024)


def results(trajectory: Trajectory) -> list[str]:
    return [m.message.content.strip() for m in trajectory.message_log if m.message.role == "tool"]


def test_commands_change_the_files_that_the_tests_reward_each_rollout_its_own() -> None:
    both = rollout(bash("cat word.txt; rev word.txt > answer.txt"), bash("cat answer.txt; exit 3"), "done", count=2)
    for trajectory in both:
        assert trajectory.failure is None
        assert trajectory.rewards == {"harbor": 1.0}
        assert results(trajectory) == ["moon\n\n[exit status 0]", "noom\n\n[exit status 3]"]


def test_the_last_response_can_be_the_answer() -> None:
    right, wrong = rollout("noom", answer_file="answer.txt"), rollout("moon", answer_file="answer.txt")
    assert [right[0].rewards, wrong[0].rewards] == [{"harbor": 1.0}, {"harbor": 0.0}]


def test_a_container_has_no_network_no_files_of_this_machine_and_no_reward_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "hidden")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    command = (
        f"cat {secret}; ls /root /home /tests /logs; touch /usr/x; echo 1 > /logs/verifier/reward.txt; "
        f"ln -s {secret} answer.txt; tr '\\0' ' ' < /proc/1/environ; python3 -c '{CONNECT}'; true"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (trajectory,) = rollout(bash(command % listener.getsockname()[1]), "noom", answer_file="answer.txt")
    (output,) = results(trajectory)
    assert "ConnectionRefusedError" in output
    assert "reached" not in output
    assert "hidden" not in output
    assert output.count("No such file or directory") == 6
    assert "Read-only file system" in output
    assert secret.read_text() == "hidden"
    assert trajectory.rewards == {"harbor": 1.0}


def test_a_command_that_does_not_end_is_killed() -> None:
    (trajectory,) = rollout(bash("sleep 1000 & sleep 1000"), "", command_timeout_s=0.5)
    assert results(trajectory) == ["[killed after 0.5 s]"]


@pytest.mark.parametrize(
    ("file", "text", "cause"),
    [
        ("environment/Dockerfile", "FROM ubuntu\nRUN apt-get install -y cowsay\n", "'RUN apt-get install -y cowsay'"),
        ("tests/test.sh", "echo broken; exit 7\n", "left no reward (exit status 7): broken"),
    ],
)
def test_a_task_that_cannot_be_rewarded_is_a_failure(file: str, text: str, cause: str, tmp_path: Path) -> None:
    directory = shutil.copytree(EXAMPLE / "spell-moon", tmp_path / "task")
    (directory / file).write_text(text)
    (trajectory,) = rollout("noom", directory=directory)
    assert trajectory.failure is not None
    assert cause in trajectory.failure.cause


def test_the_dataset_has_a_row_for_each_folder() -> None:
    rows = list(HARBOR.make(DatasetConfig(dataset_name="harbor", data_path=str(EXAMPLE)), 0))
    assert [Path(row["task_directory"]).name for row in rows] == ["spell-moon"]
    assert rows[0]["messages"][0]["content"].endswith("moon")
