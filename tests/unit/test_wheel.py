"""The wheel holds what a machine without the repository needs, and two builds of it are identical."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "configs"
NEEDED = (
    "nemo_rl/py.typed",
    "nemo_rl/constraints.txt",
    "nemo_rl/recipes/configs/quickstart.yaml",
    "nemo_rl/recipes/prompts/cot.txt",
    "nemo_rl/recipes/project/grpo.yaml.template",
    "nemo_rl/jobs/shell/job.sh",
    "nemo_rl/compat/keys.yaml",
)

needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")


def build(directory: Path, build_name: str = "build_wheel") -> Path:
    code = f"from hatchling.build import {build_name}; print({build_name}({str(directory)!r}))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return directory / done.stdout.splitlines()[-1]


def call_in_package(directory: Path, function: str, name: str) -> str:
    """Return what a function of nemo_rl.recipes in an unpacked wheel returns or raises, without the repository."""
    code = "\n".join(
        (
            "from nemo_rl import errors, recipes",
            "try:",
            f"    print(recipes.{function}({name!r}))",
            "except errors.ConfigError as error:",
            "    print(error)",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needs_hatchling
def test_two_builds_are_identical_and_hold_what_a_run_needs(tmp_path: Path) -> None:
    first, second = (build(path) for path in (tmp_path / "1", tmp_path / "2") if path.mkdir() is None)
    assert first.read_bytes() == second.read_bytes()
    names = set(zipfile.ZipFile(first).namelist())
    assert set(NEEDED) <= names
    assert {name.split("/")[0] for name in names} == {"nemo_rl", "nemo_rl-0.1.0.dist-info"}
    recipes = {f"nemo_rl/recipes/configs/{path.relative_to(RECIPES)}" for path in RECIPES.rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("nemo_rl/recipes/configs/")} == recipes


@needs_hatchling
def test_an_installed_package_finds_its_recipes_by_name_alone(tmp_path: Path) -> None:
    zipfile.ZipFile(build(tmp_path)).extractall(tmp_path)
    package = tmp_path / "nemo_rl" / "recipes"
    assert call_in_package(tmp_path, "find_recipe", "dapo") == str(package / "configs" / "dapo.yaml")
    assert call_in_package(tmp_path, "find_prompt", "prompts/cot.txt") == str(package / "prompts" / "cot.txt")
    refusal = "a packaged recipe is named dapo (nemo-rl config list)"
    assert call_in_package(tmp_path, "find_recipe", "examples/configs/dapo.yaml").endswith(refusal)


@needs_hatchling
def test_an_editable_installation_holds_no_copies(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build(tmp_path, "build_editable")).namelist()
    assert {Path(name).parts[0] for name in names} == {"_nemo_rl.pth", "nemo_rl-0.1.0.dist-info"}


def test_the_package_has_no_links() -> None:  # which a wheel cannot hold
    found = (path for root in ("nemo_rl", "examples") for path in (ROOT / root).rglob("*"))
    assert [path for path in found if path.is_symlink()] == []
