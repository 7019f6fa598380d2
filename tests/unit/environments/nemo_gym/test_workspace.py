"""The directory of a NeMo Gym stack."""

import stat
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.interpreter import GymPython
from nemo_rl.environments.nemo_gym.workspace import write_workspace
from tests.unit.environments.nemo_gym.conftest import MATH


def test_the_directory_has_keys_nobody_else_may_read_and_an_environment_a_server(site_packages: Path) -> None:
    Path("env.yaml").write_text("judge_key: secret\npolicy_model_name: mine\n")
    Path("resources_servers/own").mkdir(parents=True)
    prefix = site_packages.parent / "environment"
    prefix.mkdir()
    directory = site_packages.parent / "run" / "nemo_gym"
    for used in (site_packages, prefix):  # a resumed run finds its directory, made with another Python
        python = GymPython(used / "bin" / "python", "0.4.0", used, site_packages)
        write_workspace(directory, python, {"policy_model_name": "policy", "config_paths": [MATH]})
    written = OmegaConf.load(directory / "env.yaml")
    assert (written.judge_key, written.policy_model_name, written.skip_venv_if_present) == ("secret", "policy", True)
    assert stat.S_IMODE((directory / "env.yaml").stat().st_mode) == 0o600
    servers = ("resources_servers/math", "resources_servers/own", "responses_api_models/vllm_model")
    for server in (*servers, "environment_servers/legacy_agent"):
        assert (Path(written.uv_venv_dir) / server / ".venv").resolve() == prefix
    assert (directory / "resources_servers" / "own").is_dir()


def test_nothing_of_gym_is_needed_to_import_ours() -> None:
    code = (
        "import sys, nemo_rl.environments.nemo_gym.client, nemo_rl.environments.nemo_gym.stack\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('nemo_gym', 'torch', 'ray', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
