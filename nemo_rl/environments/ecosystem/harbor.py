"""Environment and dataset `harbor`: directories of Harbor tasks (harborframework.com), run in bubblewrap containers.

A task is a directory: `instruction.md` is the prompt, `environment/` holds the files of the working directory /app, and
`tests/test.sh` writes the reward: a number to /logs/verifier/reward.txt, or numbers by name to reward.json. The policy
is offered one tool, `bash`, and a response without a call ends its turn; or a harness, `command`, works on the files in
its place. Then the tests run.

Tests run programs of the policy, as their own user, so what they leave is checked: one file, names and range of its
rewards, an end by themselves. What the policy's files cause is a wrong answer; tests that fail on the task's untouched
files, too, fail the rollout.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.config.entry_checks import check_agent_runner
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.value_types import Seconds
from nemo_rl.data.row_sources import require_data_path
from nemo_rl.data.rows import Row
from nemo_rl.environments.ecosystem.chat_client import ChatClient, converse_with_tools
from nemo_rl.environments.ecosystem.containers import Container
from nemo_rl.environments.ecosystem.relayed_port import interpreter_directories
from nemo_rl.environments.harness import (
    HARNESS_FAILED,
    HARNESS_TIMEOUT,
    Harness,
    HarnessConfig,
    check_harness,
    find_program,
)
from nemo_rl.environments.sandbox import temporary_directory, truncate_middle
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

logger = logging.getLogger(__name__)

TASK_FILE, INSTRUCTION_FILE = "task.toml", "instruction.md"  # files of every task's directory
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in /app and return its output. Files persist, the shell does not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}
# Dockerfile instructions that copying environment/ to /app makes unnecessary.
HARMLESS = re.compile(r"\s*(?:#|$|FROM\s|WORKDIR\s+/app/?\s*$|COPY\s+\.\s+(?:\.|/app)/?\s*$|(?:CMD|LABEL|ARG)\b)", re.I)
START_S = 30.0
MAX_REWARD_BYTES = 1024 * 1024  # read from a reward file; the rest never is
MAX_COMMAND_BYTES = 100_000  # the kernel accepts 128 KiB
REWARD_FILES = ("reward.json", "reward.txt")  # tests write one of them
REWARD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_REWARDS = 32
FIRST_SIGNAL_STATUS = 128  # exit status of a shell that a signal ended, and above
# Ends of the parts of a rollout as shares of its deadline, which nothing that the policy runs may use up.
CONVERSATION_SHARE, TESTS_SHARE, UNTOUCHED_TESTS_SHARE = 0.5, 0.8, 0.95


class HarborConfig(HarnessConfig):
    """Containers with this machine's programs, without network. Deadlines in task.toml apply within `timeout_s`.

    `command`: a harness that works in the container, in place of the tool bash; of the network it reaches the gateway.
    """

    max_turns: int = Field(default=20, gt=0)  # responses of the policy
    command_timeout_s: Seconds = 60.0  # per command of the policy
    max_output_chars: int = Field(default=8192, gt=0)  # per command; longer output is cut in the middle
    timeout_s: Seconds = 480.0  # per rollout; half of it for the policy, the rest for tests
    # lowest reward of tests; a response that breaks them earns it
    reward_min: float = Field(default=0.0, allow_inf_nan=False)
    # highest reward of tests; a higher one earns reward_min
    reward_max: float = Field(default=1.0, allow_inf_nan=False)
    mounts: list[str] = Field(default_factory=list)  # directories that a harness needs, read-only at the same paths
    # address space of each process, which Node and Bun reserve far more of than they use; null: unlimited
    address_space_gb: float | None = Field(default=8.0, gt=0)
    answer_file: str | None = None  # file in /app that gets the text of the last response before the tests run
    ignore_dockerfile: bool = False  # run tasks whose Dockerfile does more than copy environment/


class HarborError(Exception):
    """A task cannot be run, or its tests give no reward on its untouched files."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a run of the tests: rewards, or the reason that they do not count."""

    status: int | None  # exit status; None: killed at the deadline
    output: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    fault: str | None = None  # as EnvStep.response_fault, if the policy's files caused it


def check_harbor(key: str, section: HarborConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError if containers cannot be started or tools cannot be called."""
    if section.command is None and config.gateway.tool_parser is None:
        raise ConfigError("gateway.tool_parser", None, f"{key} needs one: the policy calls bash")
    if section.answer_file is not None and Path(section.answer_file).name != section.answer_file:
        raise ConfigError(f"{key}.answer_file", section.answer_file, "must be the name of a file, which is put in /app")
    if shutil.which("bwrap") is None:
        raise ConfigError(f"{key}.type", "harbor", "needs the program bwrap (bubblewrap) in PATH")
    with tempfile.TemporaryDirectory() as work:
        argv = Container(Path(work), section.address_space_gb).argv("true")
        try:
            tried = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{key}.type", "harbor", f"bwrap did not start a container in {START_S:g} s") from error
    if tried.returncode:
        raise ConfigError(f"{key}.type", "harbor", f"bwrap cannot start a container: {tried.stderr.strip()[:300]}")
    if section.command is None:
        _check_has_no_harness(key, section)
    else:
        _check_contained_harness(key, section, section.command)
    check_agent_runner(key, section, config)


def _check_contained_harness(key: str, section: HarborConfig, command: Sequence[str]) -> None:
    """Raise ConfigError for a harness that would not run in the container."""
    check_harness(key, section)
    if not section.is_harness:
        raise ConfigError(f"{key}.command", section.command, "needs {prompt} or {prompt_file}, which is the task")
    if section.answer_file is not None:
        raise ConfigError(f"{key}.answer_file", section.answer_file, "a harness writes its files itself; allowed: null")


def _check_has_no_harness(key: str, section: HarborConfig) -> None:
    for name in ("inherited_variables", "variables", "files", "mounts"):
        if value := getattr(section, name):
            raise ConfigError(f"{key}.{name}", value, "the tool bash does not use it; only with command")


def _find_installed(key: str, section: HarborConfig, command: Sequence[str]) -> str:
    """Return a harness's path; raises ConfigError for one or a directory that this machine or the container lacks."""
    for directory in section.mounts:
        if not os.path.isabs(directory) or not os.path.isdir(directory) or directory == "/":
            raise ConfigError(f"{key}.mounts", directory, "must be the absolute path of a directory other than /")
    program = find_program(key, command)
    mounted = ("/usr", "/bin", "/sbin", *interpreter_directories(), *section.mounts)
    for path, roots in ((program, mounted), (os.path.realpath(program), (*mounted, *map(os.path.realpath, mounted)))):
        if not any(Path(path).is_relative_to(directory) for directory in roots):
            raise ConfigError(f"{key}.mounts", section.mounts, f"no directory in it has the program {path}")
    return program


class HarborAgent:
    """The loop of one rollout. The tests always run at its end, and write the reward."""

    def __init__(self, name: str, section: HarborConfig) -> None:
        """Make the agent of `env.<name>`; raises ConfigError for a harness that is not installed."""
        self._name = name
        self._section = section
        self._harness: Harness | None = None
        if section.command is not None:
            program = _find_installed(f"env.{name}", section, section.command)
            self._harness = Harness(section.model_copy(update={"command": [program, *section.command[1:]]}))
        self._has_logged_failure = False
        self._sound: set[Path] = set()  # tasks whose tests gave a reward on their untouched files

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        if "task_directory" not in prompt.env_state:
            raise HarborError("the prompt has no task_directory: its dataset must be dataset_name: harbor")
        started_at = time.monotonic()

        def remaining_s(share: float) -> float:
            return max(0.0, share * self._section.timeout_s - (time.monotonic() - started_at))

        directory = Path(prompt.env_state["task_directory"])
        task = read_task(directory, ignore_dockerfile=self._section.ignore_dockerfile)
        with self._open_container(directory) as container:
            timeout_s = min(_deadline(task, "agent"), remaining_s(CONVERSATION_SHARE))
            if self._harness is None:
                answer, fault = await self._converse_in_time(prompt, container, base_url, api_key, timeout_s), None
            else:
                run = partial(container.run_harness, self._harness, prompt, base_url, api_key)
                answer, fault = None, await self._run_harness(run, timeout_s)
            timeout_s = min(_deadline(task, "verifier"), remaining_s(TESTS_SHARE))
            verdict = await self._verify(directory, container, answer, timeout_s=timeout_s)
        if verdict.fault is None:
            return AgentResult(verdict.rewards, answer, fault)
        if directory not in self._sound:
            with self._open_container(directory) as container:
                timeout_s = min(_deadline(task, "verifier"), remaining_s(UNTOUCHED_TESTS_SHARE))
                untouched = await self._verify(directory, container, "", timeout_s=timeout_s)
            if untouched.fault is not None:
                cause = f"tests/test.sh left no reward (exit status {verdict.status}): {verdict.output.strip()[-300:]}"
                raise HarborError(f"{cause} [{verdict.fault}; on the task's untouched files: {untouched.fault}]")
            self._sound.add(directory)
        return AgentResult({self._name: self._section.reward_min}, answer, verdict.fault)

    @contextlib.contextmanager
    def _open_container(self, directory: Path) -> Iterator[Container]:
        """Yield a container with the task's files."""
        with temporary_directory() as work:
            container = Container(Path(work), self._section.address_space_gb)
            copy_environment(directory, container.app)
            yield container

    async def _verify(self, directory: Path, container: Container, answer: str | None, *, timeout_s: float) -> Verdict:
        if self._section.answer_file is not None:
            replace_file(container.app / self._section.answer_file, answer or "")
        section, name = self._section, self._name
        logs = container.make_logs()
        status, output = await container.run("bash /tests/test.sh", timeout_s=timeout_s, tests=directory / "tests")
        if status is None or status >= FIRST_SIGNAL_STATUS:
            return Verdict(status, output, fault="tests_timeout" if status is None else "tests_killed")
        try:
            return Verdict(status, output, read_rewards(logs, name, section.reward_min, section.reward_max))
        except RewardFault as fault:
            return Verdict(status, output, fault=str(fault))

    async def _run_harness(
        self, run: Callable[..., Awaitable[tuple[int | None, str, bool]]], timeout_s: float
    ) -> str | None:
        """Run the harness; return why it did not end well, if so, since the tests run all the same.

        Raises HarborError if it ended before it called the policy.
        """
        status, output, has_called = await run(mounts=self._section.mounts, timeout_s=timeout_s)
        if status == 0:
            return None
        ended = f"did not end in {timeout_s:g} s" if status is None else f"ended with exit status {status}"
        if not has_called:
            raise HarborError(f"the harness {ended} before it called the policy: {output.strip()[-500:]}")
        if not self._has_logged_failure:
            self._has_logged_failure = True
            log = "env.%s: a harness %s; further ones are counted as response faults alone. %s"
            logger.warning(log, self._name, ended, output.strip()[-2000:])
        return HARNESS_TIMEOUT if status is None else HARNESS_FAILED

    async def _converse_in_time(
        self, prompt: Prompt, container: Container, base_url: str, api_key: str, timeout_s: float
    ) -> str | None:
        """Converse until the deadline; the tests then run on the files as they are."""
        try:
            async with (
                asyncio.timeout(timeout_s) as deadline,
                ChatClient(base_url, api_key, timeout_s=self._section.timeout_s) as policy,
            ):
                call = partial(self._call, container)
                return await converse_with_tools(policy, prompt, [BASH_TOOL], call, max_turns=self._section.max_turns)
        except TimeoutError:
            if not deadline.expired():
                raise
            return None

    async def _call(self, container: Container, function: Mapping[str, Any]) -> str:
        if function["name"] != "bash":
            return f"error: there is no tool {function['name']!r}; tools: bash"
        try:
            command = json.loads(function["arguments"])["command"]
        except (ValueError, RecursionError, LookupError, TypeError):
            command = None
        if not isinstance(command, str) or "\0" in command:
            return "error: bash takes one argument, 'command', a string"
        encoded = command.encode(errors="replace")  # lone surrogates
        if len(encoded) > MAX_COMMAND_BYTES:
            return f"error: the command has {len(encoded)} bytes; at most {MAX_COMMAND_BYTES}"
        timeout_s = self._section.command_timeout_s
        status, output = await container.run(encoded.decode(), timeout_s=timeout_s)
        ended = f"killed after {timeout_s:g} s" if status is None else f"exit status {status}"
        return f"{truncate_middle(output, self._section.max_output_chars)}\n[{ended}]".lstrip("\n")


def read_task(directory: Path, *, ignore_dockerfile: bool) -> Mapping[str, Any]:
    """Return the content of task.toml; raises HarborError if the task needs more than this machine's programs."""
    task = tomllib.loads((directory / TASK_FILE).read_text(encoding="utf-8"))
    if not (directory / "tests" / "test.sh").is_file():
        raise HarborError(f"{directory}: there is no tests/test.sh")
    dockerfile = directory / "environment" / "Dockerfile"
    if ignore_dockerfile or not dockerfile.is_file():
        return task
    for line in dockerfile.read_text(encoding="utf-8").splitlines():
        if not HARMLESS.match(line):
            problem = f"{line.strip()[:80]!r} is not executed; to run the task without it: ignore_dockerfile: true"
            raise HarborError(f"{dockerfile}: {problem}")
    return task


def copy_environment(directory: Path, app: Path) -> None:
    """Copy the files of environment/ except the description of its image."""
    source = directory / "environment"
    if source.is_dir():
        ignored = shutil.ignore_patterns("Dockerfile", "docker-compose.yaml")
        shutil.copytree(source, app, ignore=ignored, dirs_exist_ok=True, symlinks=True)


def replace_file(path: Path, text: str) -> None:
    """Write a file in place of anything the policy put there: a link could lead out of the container."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.parent.parent / f"replaced-{path.name}")
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


class RewardFault(Exception):
    """Reward files that do not count; the message is the response fault."""


def read_rewards(directory: Path, name: str, low: float, high: float) -> dict[str, float]:
    """Return the rewards that the tests wrote: each of them, and their sum, between `low` and `high`.

    Raises RewardFault for none, for two files, for other names than REWARD_NAME, and for other values.
    """
    try:
        texts = {file: text for file in REWARD_FILES if (text := _read_regular(directory, file)) is not None}
        if len(texts) != 1:
            raise RewardFault("two_reward_files" if texts else "no_reward_file")
        ((file, text),) = texts.items()
        rewards = json.loads(text) if file == "reward.json" else {name: float(text)}
        values = [float(value) for value in rewards.values()]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, OverflowError) as error:
        raise RewardFault("invalid_reward_file") from error
    if not 0 < len(values) <= MAX_REWARDS or not all(map(REWARD_NAME.fullmatch, rewards)):
        raise RewardFault("invalid_reward_names")
    if not all(low <= value <= high for value in (*values, sum(values))):
        raise RewardFault("reward_out_of_range")
    return dict(zip(rewards, values, strict=True))


def _read_regular(directory: Path, name: str) -> str | None:
    """Return the first MAX_REWARD_BYTES of a regular file; None if it does not exist.

    Raises OSError for a link, which could lead out of the container, and for a pipe or device, which may be endless.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
    except FileNotFoundError:
        return None
    finally:
        os.close(top)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is no regular file")
        return opened.read(MAX_REWARD_BYTES).decode()


def _deadline(task: Mapping[str, Any], part: str) -> float:
    """Return the task's own deadline in seconds; infinite if it has none."""
    return float(task.get(part, {}).get("timeout_sec", math.inf))


def find_task_directories(root: Path) -> list[Path]:
    """Return the directories under `root`, or `root` itself, that hold a task, sorted."""
    return sorted(file.parent for file in root.rglob(TASK_FILE) if (file.parent / INSTRUCTION_FILE).is_file())


def check_task_directories(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` contains a task."""
    path = require_data_path(section, f"{key}.data_path")
    if not find_task_directories(Path(path)):
        problem = f"no directory in it has both {TASK_FILE} and {INSTRUCTION_FILE}"
        raise ConfigError(f"{key}.data_path", path, problem)


def read_task_directories(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield one row per task directory under `data_path`: its instruction and its path."""
    for directory in find_task_directories(Path(require_data_path(section))):
        instruction = (directory / INSTRUCTION_FILE).read_text(encoding="utf-8").strip()
        yield {"messages": [{"role": "user", "content": instruction}], "task_directory": str(directory.resolve())}


HARBOR_DATASET = DatasetEntry(
    DatasetConfig, make=read_task_directories, check=check_task_directories, env_name="harbor"
)
HARBOR = Entry(HarborConfig, make=HarborAgent, check=check_harbor)
