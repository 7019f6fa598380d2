"""A NeMo Gym stack that the run starts, with its own processes and environment, and ends with all its processes."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import aiohttp
from omegaconf import OmegaConf

from nemo_rl.distributed.machine import unused_port
from nemo_rl.distributed.processes import find_processes
from nemo_rl.environments.nemo_gym import supervisor
from nemo_rl.environments.nemo_gym.configuration import collect_requirements, read_configuration
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig, ServedPolicy
from nemo_rl.environments.nemo_gym.interpreter import GymPython, resolve_gym_python
from nemo_rl.environments.nemo_gym.reply import GymError, GymStackEnded, GymUnavailable
from nemo_rl.environments.nemo_gym.servers import STACK_ID_KEY, discover, find_unresponsive_servers
from nemo_rl.environments.nemo_gym.workspace import write_workspace
from nemo_rl.errors import ConfigError
from nemo_rl.tracing import collector_address

STACK_ID_VARIABLE = "NEMO_RL_GYM_STACK"  # the stack's id in the environment of each of its processes, to find them
START_SCRIPT = "import sys; sys.argv = ['gym', 'env', 'start']; from nemo_gym.cli.main import main; sys.exit(main())"
IN_GYM = Path(__file__).with_name("in_gym")  # modules for Gym's processes
TRACED = IN_GYM / "traced"  # those of a stack whose spans are sent
TRACE_VARIABLES = {  # variables of FastAPI, which makes the spans of Gym's servers
    "FASTAPI_OTEL_AUTO_CONFIGURE": "true",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",  # spans of rollouts; those of probes have no parent
    "OTEL_BSP_SCHEDULE_DELAY": "500",  # milliseconds between two exports
    "OTEL_BSP_MAX_QUEUE_SIZE": "65536",  # spans between two exports; later ones are dropped
}
POLL_S = 0.5
CLOSE_TIMEOUT_S = supervisor.INTERRUPT_GRACE_S + supervisor.KILL_TIMEOUT_S + 10.0  # time for the supervisor to end
RAY_IS_LATE = "The current node timed out during startup"  # Ray's error at its limits for its own start
RAY_STARTS = 4  # a Ray whose agents need over 15 s is dead, which it notices at its limit alone: another is started
RAY_LIMITS = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_request_timeout_seconds")  # 30 and 60 s by default
TAIL_BYTES = 4096
TAIL_LINES = 25

logger = logging.getLogger(__name__)


class GymStack:
    """A running stack, made by `start` and ended by `close`; it also ends with this process."""

    def __init__(self, process: "subprocess.Popen[bytes]", head_url: str, log_file: Path, stack_id: str) -> None:
        """Use `start`."""
        self.head_url = head_url
        self.log_file = log_file
        self.stack_id = stack_id  # shown in the configuration of its head server
        self._process = process

    @classmethod
    async def start(
        cls,
        section: NemoGymConfig,
        *,
        policy: ServedPolicy,
        run_dir: Path,
        key: str = "env.nemo_gym",
    ) -> "GymStack":
        """Start a stack and wait until all its servers respond; its files and `gym.log` are in `run_dir/nemo_gym`.

        Gym's Ray has limits of its own, a fourth of `start_timeout_s`; if it gives up, the stack is started again.
        Raises ConfigError for an invalid configuration, GymUnavailable with the end of the log for a stack that is not
        up within `start_timeout_s`, which does not count the creation of its environment.
        """
        for _ in range(RAY_STARTS - 1):
            try:
                return await cls._start_once(section, policy, run_dir, key)
            except GymStackEnded as error:
                if RAY_IS_LATE not in str(error):
                    raise
                logger.warning("NeMo Gym's Ray did not start within its limits; starting the stack again")
        return await cls._start_once(section, policy, run_dir, key)

    def check(self) -> None:
        """Raise GymStackEnded, with the end of the log, if the stack has ended: Gym stops when a server dies."""
        status = self._process.poll()
        if status is not None:
            raise GymStackEnded(f"the stack has ended with status {status}{self._log_tail()}", url=self.head_url)

    async def close(self) -> None:
        """End every process of the stack; idempotent."""
        await asyncio.to_thread(self._terminate)

    @classmethod
    async def _start_once(cls, section: NemoGymConfig, policy: ServedPolicy, run_dir: Path, key: str) -> "GymStack":
        stack = await asyncio.to_thread(cls._launch, section, policy, run_dir / "nemo_gym", key)
        try:
            await stack._wait_until_ready(section.start_timeout_s, key)
        except BaseException:
            await stack.close()
            raise
        return stack

    @classmethod
    def _launch(cls, section: NemoGymConfig, policy: ServedPolicy, directory: Path, key: str) -> "GymStack":
        assert section.config_paths is not None  # check_nemo_gym
        directory = directory.absolute()  # Gym runs in it
        python = resolve_gym_python(section.python, version=section.version, key=f"{key}.python")
        configuration = read_configuration(section.config_paths, section.overrides, python.site_packages, key=key)
        if section.python is None:
            requirements = collect_requirements(configuration.merged, python.site_packages)
            python = resolve_gym_python(None, requirements, version=section.version, key=f"{key}.python")
        if not python.is_virtual:
            raise ConfigError(f"{key}.python", section.python, "must be the Python of a virtual environment")
        head_port = unused_port()
        settings = {
            **configuration.settings,
            "config_paths": list(configuration.paths),
            "policy_base_url": policy.base_url,
            "policy_api_key": policy.api_key,
            "policy_model_name": policy.model_name,
            "head_server": {"host": "127.0.0.1", "port": head_port},
            "port_range_low": section.port_range_low,
            "port_range_high": section.port_range_high,
            "server_spinup_timeout_seconds": section.start_timeout_s,  # Gym 0.7 has a limit of its own
        }
        stack_id, log_file = uuid4().hex, directory / "gym.log"
        merged = OmegaConf.merge(settings, section.overrides, {STACK_ID_KEY: stack_id})
        head = merged.head_server
        write_workspace(directory, python, OmegaConf.to_container(merged, resolve=False))  # pyright: ignore
        logger.info("starting NeMo Gym; its log is %s", log_file)
        ray_limits = dict.fromkeys(RAY_LIMITS, str(math.ceil(section.start_timeout_s / RAY_STARTS)))
        collector = None if OmegaConf.select(merged, "telemetry.enabled") else collector_address()  # Gym's own
        variables = {**ray_limits, **trace_variables(collector), **os.environ, STACK_ID_VARIABLE: stack_id}
        modules = [IN_GYM] if collector is None else [TRACED, IN_GYM]
        process = _spawn(python, directory, log_file, variables, modules)
        return cls(process, f"http://{head.host}:{head.port}", log_file, stack_id)

    async def _wait_until_ready(self, timeout_s: float, key: str) -> None:
        pending = "its head server"
        try:
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
                while True:
                    self.check()
                    with contextlib.suppress(GymUnavailable):
                        servers = await discover(http, self.head_url, stack_id=self.stack_id)
                        silent = await find_unresponsive_servers(http, list(servers.by_name.values()))
                        if not silent:
                            return
                        pending = ", ".join(silent)
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            problem = f"not up within {key}.start_timeout_s = {timeout_s:g} s; no response from {pending}"
            raise GymUnavailable(f"{problem}{self._log_tail()}", url=self.head_url) from error
        except GymStackEnded:
            raise
        except GymError as error:
            raise type(error)(f"{error.problem}{self._log_tail()}", url=error.url) from error

    def _terminate(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # tells the supervisor to end
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("killing NeMo Gym, which did not end by itself")
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + supervisor.KILL_TIMEOUT_S
        while (
            left := find_processes(STACK_ID_VARIABLE, self.stack_id)
        ) and time.monotonic() < deadline:  # only if the supervisor was killed
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if left:
            logger.error("processes of NeMo Gym are still running: %s", left)

    def _log_tail(self) -> str:
        """Return the end of the log, to be appended to an error."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, self.log_file.stat().st_size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
        except OSError:
            lines = []
        return f"; the end of {self.log_file}:\n" + "\n".join(lines or ["(empty)"])


def trace_variables(collector: str | None) -> dict[str, str]:
    """Return the variables by which the spans of a stack go to a collector; none without one."""
    return {} if collector is None else {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector, **TRACE_VARIABLES}


def _spawn(
    python: GymPython, directory: Path, log_file: Path, variables: Mapping[str, str], modules: Sequence[Path]
) -> "subprocess.Popen[bytes]":
    # Excluded: modules of this Python, an environment of uv, a Ray cluster of another Python version. Without bytecode
    # each of the processes would compile all that it imports, at every start.
    excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in variables.items() if name not in excluded}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
        "RAY_ADDRESS": "local",  # even if a cluster runs on this machine
        "PATH": f"{python.prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-I", supervisor.__file__, str(python.python), "-c", START_SCRIPT]
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
