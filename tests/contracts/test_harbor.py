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
from nemo_rl.environments.ecosystem.harbor import HARBOR_DATASET, HarborAgent, HarborConfig
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


RUN = "bash /app/answer.sh"  # the tests run a program of the policy
WRITE = "echo %s > /logs/verifier/%s"
FORGERIES: list[tuple[str, str, str]] = [  # the policy's program, what the tests do after it, the fault
    (WRITE % ("1", "reward.txt"), "echo '{\"harbor\": 0}' > /logs/verifier/reward.json", "two_reward_files"),
    (WRITE % ("'{\"harbor\": 1}'", "reward.json"), "echo 0 > /logs/verifier/reward.txt", "two_reward_files"),
    (WRITE % ("1e300", "reward.txt"), "", "reward_out_of_range"),
    (WRITE % ("nan", "reward.txt"), "", "reward_out_of_range"),
    (WRITE % ('\'{"a": 1, "b": 1}\'', "reward.json"), "", "reward_out_of_range"),
    (WRITE % ("'{\"a/b\": 1}'", "reward.json"), "", "invalid_reward_names"),
    (WRITE % ("'{\"a\": [1]}'", "reward.json"), "", "invalid_reward_file"),
    ("printf '[%.0s' {1..5000} > /logs/verifier/reward.json", "", "invalid_reward_file"),
    ("ln -s /etc/hostname /logs/verifier/reward.txt", "", "invalid_reward_file"),
    ("mkfifo /logs/verifier/reward.txt", "", "invalid_reward_file"),
    ("rm -r /logs/verifier; ln -s /tmp /logs/verifier", "", "invalid_reward_file"),
    (WRITE % ("1", "reward.txt") + "; kill -9 $PPID", "echo 0 > /logs/verifier/reward.txt", "tests_killed"),
    (WRITE % ("1", "reward.txt") + "; kill -9 -1", "echo 0 > /logs/verifier/reward.txt", "tests_killed"),
    (WRITE % ("1", "reward.txt") + "; kill -STOP $PPID; sleep 60", "", "tests_timeout"),
    ("exit 1", "[ $? = 0 ] && echo 1 > /logs/verifier/reward.txt", "no_reward_file"),
]


@pytest.mark.parametrize(("program", "tests", "fault"), FORGERIES)
def test_a_program_that_the_tests_run_cannot_write_a_reward_that_is_not_theirs(
    program: str, tests: str, fault: str, tmp_path: Path
) -> None:
    directory = shutil.copytree(EXAMPLE / "spell-moon", tmp_path / "task")
    unanswered = f"[ -s /app/answer.sh ] || exec bash -c '{WRITE % ('0', 'reward.txt')}'"
    (directory / "tests" / "test.sh").write_text(f"{unanswered}\n{RUN}\n{tests}\n")
    timeout_s = 4.0 if fault == "tests_timeout" else 60.0
    (trajectory,) = rollout(program, directory=directory, answer_file="answer.sh", timeout_s=timeout_s)
    assert (trajectory.failure, trajectory.rewards) == (None, {"harbor": 0.0})
    assert trajectory.response_faults == (fault,)


def test_a_reward_in_the_range_of_the_configuration_counts(tmp_path: Path) -> None:
    directory = shutil.copytree(EXAMPLE / "spell-moon", tmp_path / "task")
    (directory / "tests" / "test.sh").write_text('echo \'{"a": 3, "b": 4.5}\' > /logs/verifier/reward.json')
    (trajectory,) = rollout("noom", directory=directory, reward_max=10.0)
    assert trajectory.rewards == {"a": 3.0, "b": 4.5}


def test_tests_can_hide_their_directories_from_a_program(tmp_path: Path) -> None:
    directory = shutil.copytree(EXAMPLE / "spell-moon", tmp_path / "task")
    bubblewrap = shutil.which("bwrap")
    assert bubblewrap is not None
    shutil.copy(bubblewrap, directory / "tests" / "bwrap")
    hidden = "/tests/bwrap --dev-bind / / --tmpfs /logs --tmpfs /tests --unshare-pid --proc /proc --die-with-parent"
    (directory / "tests" / "test.sh").write_text(
        f"{hidden} bash /app/answer.sh && ls /logs/verifier | grep -q . || echo 0 > /logs/verifier/reward.txt"
    )
    program = f"mkdir -p /logs/verifier; {WRITE % ('1', 'reward.txt')}; ls /tests | grep -q . && kill -9 -1; true"
    (trajectory,) = rollout(program, directory=directory, answer_file="answer.sh")
    assert (trajectory.rewards, trajectory.response_faults) == ({"harbor": 0.0}, ())


def test_a_policy_that_uses_up_its_time_is_rewarded_for_what_there_is() -> None:
    (trajectory,) = rollout(bash("sleep 60"), "", timeout_s=4.0)
    assert (trajectory.failure, trajectory.rewards) == (None, {"harbor": 0.0})


def test_the_dataset_has_a_row_for_each_folder() -> None:
    rows = list(HARBOR_DATASET.make(DatasetConfig(dataset_name="harbor", data_path=str(EXAMPLE)), 0))
    assert [Path(row["task_directory"]).name for row in rows] == ["spell-moon"]
    assert rows[0]["messages"][0]["content"].endswith("moon")
