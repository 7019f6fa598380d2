"""The wheel holds what a machine without the repository needs, and two builds of it are identical."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    "nemo_rl/py.typed",
    "nemo_rl/constraints.txt",
    "nemo_rl/recipes/quickstart.yaml",
    "nemo_rl/recipes/prompts/cot.txt",
    "nemo_rl/recipes/project/grpo.yaml.template",
    "nemo_rl/jobs/shell/job.sh",
    "nemo_rl/config/nemo_rl_keys.yaml",
)


def build(directory: Path) -> Path:
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(directory)!r}))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return directory / done.stdout.splitlines()[-1]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_two_builds_are_identical_and_hold_what_a_run_needs(tmp_path: Path) -> None:
    first, second = (build(path) for path in (tmp_path / "1", tmp_path / "2") if path.mkdir() is None)
    assert first.read_bytes() == second.read_bytes()
    names = set(zipfile.ZipFile(first).namelist())
    assert set(NEEDED) <= names
    assert {name.split("/")[0] for name in names} == {"nemo_rl", "nemo_rl-0.1.0.dist-info"}


def test_every_data_file_of_the_package_is_reachable_without_the_repository() -> None:
    links = [path for path in (ROOT / "nemo_rl").rglob("*") if path.is_symlink()]
    assert links == []  # a wheel has no links
    assert all((ROOT / name).is_file() for name in NEEDED)
