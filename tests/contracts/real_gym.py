"""Real NeMo Gym servers for tests, in seconds: `with real_gym(policy_base_url) as head_url`.

Skipped, with the reason, where Gym's environment is not available: without a Python that the version installs on, uv,
or a network to install from. The environment is the one that runs use, in the cache; the first test that asks creates
it, within INSTALL_TIMEOUT_S, and no test of the session tries again what failed.
"""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.distributed.machine import unused_ports
from nemo_rl.environments.nemo_gym.configuration import collect_requirements, read_configuration
from nemo_rl.environments.nemo_gym.interpreter import GymPython, base_interpreters, min_python, resolve_gym_python
from nemo_rl.errors import ConfigError

VERSIONS = ("0.4.0", "0.7.0")
CONFIG_PATHS = (
    "resources_servers/reasoning_gym/configs/reasoning_gym.yaml",
    "resources_servers/mcqa/configs/mcqa.yaml",
    "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml",
    "resources_servers/blackjack/configs/blackjack.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
)
REASONING_GYM = "reasoning_gym_simple_agent"
MCQA = "mcqa_simple_agent"
TOOL_CALL = "example_single_tool_call_simple_agent"
BLACKJACK = "blackjack_gymnasium_agent"
AGENTS = (REASONING_GYM, MCQA, TOOL_CALL, BLACKJACK)
POLICY_API_KEY = "key-of-the-run"
NUM_SERVERS = 24  # ports for them: an agent, its environment and in 0.7 its environment server each, and the model
END_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 400.0  # of the limit of a test that asks for the environment, 900 s


@contextlib.contextmanager
def real_gym(
    policy_base_url: str,
    *,
    environment: GymPython | None = None,
    config_paths: Sequence[str] = CONFIG_PATHS,
    **settings: Any,
) -> Iterator[str]:
    """Return the address of the head server; whoever connects waits for the servers.

    `environment`: where Gym is installed, by default that of runs; `settings`: more keys for Gym.
    """
    python = (environment or gym_environment()).python
    head_port, *ports = unused_ports(NUM_SERVERS + 1)
    given = {
        "config_paths": list(config_paths),
        "policy_base_url": policy_base_url,
        "policy_api_key": POLICY_API_KEY,
        "policy_model_name": "policy",
        "head_server": {"host": "127.0.0.1", "port": head_port},
        "ports": ports,
        **settings,
    }
    script = Path(__file__).with_name("gym_servers.py")
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "gym.log").open("w+") as output:
        process = subprocess.Popen(
            [str(python), "-I", str(script), json.dumps(given)],
            cwd=directory,  # Gym makes directories where it runs
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{head_port}"
        except Exception as error:
            output.seek(0)
            error.add_note(f"NeMo Gym wrote:\n{output.read()[-4000:]}")
            raise
        finally:
            try:
                process.communicate(timeout=END_TIMEOUT_S)
            finally:
                process.kill()


def example_rows(environment: str, gym: GymPython | None = None) -> list[dict[str, Any]]:
    """Return the rows that Gym ships with a resources server."""
    file = (gym or gym_environment()).site_packages / "resources_servers" / environment / "data" / "example.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def stack_processes(env_file: Path) -> list[int]:
    """Return the ids of the live processes of a started stack, whose configuration file is given."""
    wanted = f"NEMO_RL_GYM_STACK={yaml.safe_load(env_file.read_text())['nemo_rl_stack_id']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def gym_environment(version: str = VERSIONS[0]) -> GymPython:
    """Return an environment with what the four agents need; skip the test where it is not available."""
    found = _environment(version)
    if isinstance(found, str):
        pytest.skip(f"NeMo Gym {version} is not available: {found}")
    return found


@cache
def _environment(version: str) -> GymPython | str:
    if next(base_interpreters(version), None) is None:
        return f"no Python {'.'.join(map(str, min_python(version)))} or newer (scripts/python313 unpacks one)"
    ends_at = time.monotonic() + INSTALL_TIMEOUT_S
    try:
        site_packages = resolve_gym_python(None, version=version, timeout_s=INSTALL_TIMEOUT_S).site_packages
        merged = read_configuration(CONFIG_PATHS, {}, site_packages, key="real_gym").merged
        requirements = collect_requirements(merged, site_packages)
        return resolve_gym_python(None, requirements, version=version, timeout_s=ends_at - time.monotonic())
    except ConfigError as error:
        return str(error)
