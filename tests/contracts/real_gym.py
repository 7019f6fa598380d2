"""Real NeMo Gym servers for tests, in seconds: `with real_gym(policy_base_url) as head_url`.

Skipped, with the reason, where Gym's environment cannot be had: no Python 3.12, no uv, or no network to install from.
The environment is the one that runs use, in the cache; the first test that asks makes it.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.machine import unused_ports
from nemo_rl.environments.nemo_gym.workspace import (
    GymPython,
    base_interpreters,
    collect_requirements,
    find_configs,
    resolve_gym_python,
)
from nemo_rl.errors import ConfigError

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
NUM_SERVERS = 9  # an agent and its environment each, and the model
END_TIMEOUT_S = 60.0


@contextlib.contextmanager
def real_gym(policy_base_url: str, **settings: Any) -> Iterator[str]:
    """Return the address of the head server; whoever connects waits for the servers. `settings`: more keys for Gym."""
    python, *ports = gym_environment().python, *unused_ports(NUM_SERVERS + 1)
    given = {
        "config_paths": list(CONFIG_PATHS),
        "policy_base_url": policy_base_url,
        "policy_api_key": POLICY_API_KEY,
        "policy_model_name": "policy",
        "head_server": {"host": "127.0.0.1", "port": ports[0]},
        "ports": ports[1:],
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
            yield f"http://127.0.0.1:{ports[0]}"
        except Exception as error:
            output.seek(0)
            error.add_note(f"NeMo Gym wrote:\n{output.read()[-4000:]}")
            raise
        finally:
            process.communicate(timeout=END_TIMEOUT_S)


def example_rows(environment: str) -> list[dict[str, Any]]:
    """Return the rows that Gym ships with a resources server."""
    file = gym_environment().site_packages / "resources_servers" / environment / "data" / "example.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def gym_environment() -> GymPython:
    """Return an environment with what the four agents need; skip the test where it is not available."""
    found = _environment()
    if isinstance(found, str):
        pytest.skip(f"real NeMo Gym cannot be had: {found}")
    return found


@cache
def _environment() -> GymPython | str:
    if next(base_interpreters(), None) is None:
        return "no Python 3.12 or newer"
    try:
        site_packages = resolve_gym_python(None).site_packages
        configs = find_configs(CONFIG_PATHS, site_packages, key="CONFIG_PATHS")
        return resolve_gym_python(None, collect_requirements(configs.values(), site_packages))
    except ConfigError as error:
        return str(error)
