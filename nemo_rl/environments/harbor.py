"""The environment `harbor`: directories of Harbor tasks (harborframework.com), each run in a bubblewrap container.

A task is a directory: `instruction.md` is the prompt, `environment/` holds the files of the working directory /app, and
`tests/test.sh` leaves the reward in /logs/verifier/reward.txt, a number, or reward.json, numbers by name. The policy is
offered one tool, `bash`; a response without a call ends its turn, then the tests run. The prompts come from the dataset
`harbor` (data/sources.py).
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.environments.chat_client import ChatClient, converse_with_tools
from nemo_rl.environments.sandbox import temporary_directory, truncate_middle
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

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
# Instructions of a Dockerfile that a copy of environment/ in /app stands for.
HARMLESS = re.compile(r"\s*(?:#|$|FROM\s|WORKDIR\s+/app/?\s*$|COPY\s+\.\s+(?:\.|/app)/?\s*$|(?:CMD|LABEL|ARG)\b)", re.I)
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # of /, links to /usr where the two are merged
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
LIMITS = "ulimit -f 262144 -v 8388608 -u 4096"  # of each process: KiB of a file and of its memory; processes of a user
TMP_BYTES = 512 * 1024 * 1024  # of /tmp, which is in memory
START_S = 30.0
MAX_OUTPUT_BYTES = 1024 * 1024  # of a command, or of a file with rewards; what is beyond is never read
MAX_COMMAND_BYTES = 100_000  # the kernel takes 128 KiB


class HarborConfig(AgentRunnerConfig):
    """Containers of this machine's programs, without network. The deadlines of task.toml hold within `timeout_s`."""

    max_turns: int = Field(default=20, gt=0)  # responses of the policy
    command_timeout_s: float = Field(default=60.0, gt=0)  # of one command of the policy
    max_output_chars: int = Field(default=8192, gt=0)  # of one command; the middle is cut
    timeout_s: float = Field(default=480.0, gt=0)  # per rollout, tests included
    answer_file: str | None = None  # in /app: gets the text of the last response, before the tests run
    ignore_dockerfile: bool = False  # run tasks whose Dockerfile does more than to copy environment/


class HarborError(Exception):
    """A task that cannot be run, or whose tests leave no reward."""


def check_harbor(key: str, section: HarborConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError where containers cannot be started, or tools not be called."""
    if config.gateway.tool_parser is None:
        raise ConfigError("gateway.tool_parser", None, f"{key} needs one: the policy calls bash")
    if section.answer_file is not None and Path(section.answer_file).name != section.answer_file:
        raise ConfigError(f"{key}.answer_file", section.answer_file, "must be the name of a file, which is put in /app")
    if shutil.which("bwrap") is None:
        raise ConfigError(f"{key}.type", "harbor", "needs the program bwrap (bubblewrap) in PATH")
    with tempfile.TemporaryDirectory() as work:
        argv = Container(Path(work)).argv("true")
        try:
            tried = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{key}.type", "harbor", f"bwrap did not start a container in {START_S:g} s") from error
    if tried.returncode:
        raise ConfigError(f"{key}.type", "harbor", f"bwrap cannot start a container: {tried.stderr.strip()[:300]}")
    check_agent_runner(key, section, config)


class Container:
    """The files of one rollout, and commands in namespaces of their own: no network, /usr read-only, /app kept."""

    def __init__(self, work: Path) -> None:
        self._work = work
        for name in ("app", "logs/verifier"):
            (work / name).mkdir(parents=True)

    @property
    def app(self) -> Path:
        return self._work / "app"

    @property
    def rewards(self) -> Path:
        return self._work / "logs" / "verifier"

    def argv(self, command: str, *, tests: Path | None = None) -> list[str]:
        """Return the program that runs a command; with `tests`, these and /logs are there too."""
        argv = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000"]
        argv += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        argv += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
        for name in SYSTEM:
            path = Path("/") / name
            if path.is_symlink():
                argv += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                argv += ["--ro-bind", str(path), str(path)]
        for name in ("/etc/alternatives", "/etc/ld.so.cache"):
            argv += ["--ro-bind-try", name, name]
        argv += ["--bind", str(self.app), "/app"]
        if tests is not None:
            argv += ["--ro-bind", str(tests), "/tests", "--bind", str(self._work / "logs"), "/logs"]
        argv += ["--chdir", "/app", "--clearenv"]
        for name, value in VARIABLES.items():
            argv += ["--setenv", name, value]
        return [*argv, "/bin/bash", "-c", f"{LIMITS}; {command}"]

    async def run(self, command: str, *, timeout_s: float, tests: Path | None = None) -> tuple[int | None, str]:
        """Return exit status and output; status None where the command was killed at its deadline."""
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *self.argv(command, tests=tests),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},  # the container can read it: /proc/1 is bwrap
            )
            status: int | None = None
            try:
                async with asyncio.timeout(timeout_s):
                    status = await process.wait()
            except TimeoutError:
                pass
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # bwrap; its namespace ends with it
                    await process.wait()
            output.seek(0)
            return status, output.read(MAX_OUTPUT_BYTES).decode(errors="replace")


class HarborAgent:
    """The loop of one rollout. The tests run whatever the policy did; what they leave is the reward."""

    def __init__(self, name: str, section: HarborConfig) -> None:
        self._name = name
        self._section = section

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        section = self._section
        directory = prompt.env_state.get("task_directory")
        if directory is None:
            raise HarborError("the prompt has no task_directory: its dataset must be dataset_name: harbor")
        task = read_task(Path(directory), ignore_dockerfile=section.ignore_dockerfile)
        with temporary_directory() as work:
            container = Container(Path(work))
            copy_environment(Path(directory), container.app)
            answer = await self._converse_in_time(prompt, container, base_url, api_key, _deadline(task, "agent"))
            if section.answer_file is not None:
                replace_file(container.app / section.answer_file, answer or "")
            timeout_s = _deadline(task, "verifier") or section.timeout_s
            tests = Path(directory) / "tests"
            status, output = await container.run("bash /tests/test.sh", timeout_s=timeout_s, tests=tests)
            rewards = read_rewards(container.rewards, self._name)
        if rewards is None:
            raise HarborError(f"tests/test.sh left no reward (exit status {status}): {output.strip()[-300:]}")
        return AgentResult(rewards, answer)

    async def _converse_in_time(
        self, prompt: Prompt, container: Container, base_url: str, api_key: str, timeout_s: float | None
    ) -> str | None:
        """Converse until the task's own deadline for agents, at which the tests run on what there is."""
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


HARBOR = Entry(HarborConfig, make=HarborAgent, check=check_harbor)


def read_task(directory: Path, *, ignore_dockerfile: bool) -> Mapping[str, Any]:
    """Return task.toml; raises HarborError for a task that needs more than this machine's programs."""
    task = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
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
    """Copy the files of environment/ but the description of its image."""
    source = directory / "environment"
    if source.is_dir():
        ignored = shutil.ignore_patterns("Dockerfile", "docker-compose.yaml")
        shutil.copytree(source, app, ignore=ignored, dirs_exist_ok=True, symlinks=True)


def replace_file(path: Path, text: str) -> None:
    """Write a file in place of whatever the policy may have put there: a link leads out of the container."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.parent.parent / f"replaced-{path.name}")
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def read_rewards(directory: Path, name: str) -> dict[str, float] | None:
    """Return the rewards that the tests wrote; None where there are none, or no numbers."""
    try:
        if (text := _read_regular(directory, "reward.json")) is not None:
            return {str(key): float(value) for key, value in json.loads(text).items()}
        text = _read_regular(directory, "reward.txt")
        return None if text is None else {name: float(text)}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None


def _read_regular(directory: Path, name: str) -> str | None:
    """Return the beginning of a regular file; None where there is none of that name.

    Raises OSError for a link, which leads out of the container, and for a pipe or device, which may have no end.
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
        return opened.read(MAX_OUTPUT_BYTES).decode()


def _deadline(task: Mapping[str, Any], part: str) -> float | None:
    seconds: Any = task.get(part, {}).get("timeout_sec")
    return None if seconds is None else float(seconds)
