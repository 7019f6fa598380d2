"""NeMo Gym itself for tests: its own servers, in one process under its own Python."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from nemo_rl.environments.nemo_gym.python_env import base_interpreters, gym_python
from nemo_rl.environments.nemo_gym.workspace import find_configs, requirements_of

SERVERS = Path(__file__).with_name("servers.py")
START_S = 300.0  # for all servers to listen, on a machine that may be busy
KEY = "tests.real_gym"


def config_of(name: str) -> str:
    """The configuration that ships with an environment of Gym."""
    return f"resources_servers/{name}/configs/{name}.yaml"


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@cache
def python_with(configs: tuple[str, ...]) -> str:
    """An interpreter with all that these configurations need; the first call of a machine installs it."""
    if next(base_interpreters(), None) is None:
        pytest.skip("NeMo Gym needs Python 3.12, which this machine does not have")
    bare = gym_python(None, key=KEY)
    parts = find_configs(configs, bare.site_packages, key=KEY).values()
    return str(gym_python(None, requirements_of(parts, bare.site_packages), key=KEY).python)


@contextmanager
def running_gym(environments: Sequence[str], policy_base_url: str, policy_api_key: str = "unused") -> Iterator[str]:
    """The address of the head of a stack that runs; its agents call the policy at `policy_base_url`, ending in /v1."""
    configs = tuple(config_of(name) for name in environments)
    python, port = python_with(configs), unused_port()
    asked = {"policy_base_url": policy_base_url, "policy_api_key": policy_api_key}
    arguments = json.dumps({**asked, "head_port": port, "configs": configs})
    process = subprocess.Popen([python, str(SERVERS), arguments], stdout=subprocess.PIPE, text=True)
    deadline = threading.Timer(START_S, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "up\n", f"NeMo Gym did not start: {line}"
        deadline.cancel()
        yield f"http://127.0.0.1:{port}"
    finally:
        deadline.cancel()
        process.kill()
        process.communicate()
