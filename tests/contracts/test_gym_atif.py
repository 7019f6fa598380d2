"""Exported trajectories by Gym's own schema of ATIF v1.7 (nemo-gym 0.7)."""

import subprocess
from pathlib import Path

import pytest

from tests.contracts.real_gym import gym_environment
from tests.unit.collect.test_atif import exported

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

VERSION = "0.7.0"
SCRIPT_TIMEOUT_S = 120.0
VALIDATE = """
import sys, pathlib
from nemo_gym.atif_json import strict_json_loads
from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7
for file in pathlib.Path(sys.argv[1]).glob("*.json"):
    trajectory = AtifTrajectoryV1_7.model_validate(strict_json_loads(file.read_bytes()))
    for other in trajectory.subagent_trajectories or ():
        AtifTrajectoryV1_7.model_validate(other)
    print(file.name)
"""


def test_gyms_schema_accepts_what_is_exported(tmp_path: Path) -> None:
    python = gym_environment(VERSION).python
    exported(tmp_path)
    command = [str(python), "-c", VALIDATE, str(tmp_path / "atif")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.split()) == ["0-0.json", "0-1.json"]
