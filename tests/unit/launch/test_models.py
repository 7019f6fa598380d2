import asyncio
from pathlib import Path

import pytest

from nemo_rl.distributed.machine import cache_directory
from nemo_rl.errors import ConfigError
from nemo_rl.launch import models
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.quickstart_training import _StepProgress
from nemo_rl.observability import heartbeat
from nemo_rl.quickstart.models import Recipe, student, teacher


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, Recipe]]:
    """Directory and recipe of the quickstart's models that would have been made."""
    calls: list[tuple[Path, Recipe]] = []

    async def prepare_model(directory: Path, recipe: Recipe) -> Path:
        calls.append((directory, recipe))
        return directory

    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "prepare_model", prepare_model)
    return calls


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "/some/directory", "nemo_rl"])
def test_names_of_others_are_left_to_transformers(name: str, made: list[tuple[Path, Recipe]]) -> None:
    assert asyncio.run(resolve_model(name)) == name
    assert made == []


@pytest.mark.parametrize(
    ("name", "directory", "recipe"),
    [
        ("nemo_rl/quickstart", "quickstart-0", student(0)),
        ("nemo_rl/quickstart-7", "quickstart-7", student(7)),
        ("nemo_rl/quickstart-teacher", "quickstart-teacher-0", teacher(0)),
        ("nemo_rl/quickstart-teacher-7", "quickstart-teacher-7", teacher(7)),
    ],
)
def test_the_quickstarts_models_are_made_in_the_cache_by_their_recipe(
    name: str, directory: str, recipe: Recipe, made: list[tuple[Path, Recipe]], tmp_path: Path
) -> None:
    assert asyncio.run(resolve_model(name)) == str(tmp_path / directory)
    assert made == [(tmp_path / directory, recipe)]


@pytest.mark.parametrize("suffix", ["2", "-", "-x", "--1", "-1.5", "-²", "-teacher-x", "-teachers"])
def test_other_names_of_ours_are_refused(suffix: str, made: list[tuple[Path, Recipe]]) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name.*nemo_rl/quickstart-N for a seed N"):
        asyncio.run(resolve_model(f"nemo_rl/quickstart{suffix}"))
    assert made == []


def test_a_checkpoint_is_the_policy_that_was_saved_in_it(tmp_path: Path) -> None:
    (tmp_path / "step_5" / "policy" / "weights").mkdir(parents=True)
    assert asyncio.run(resolve_model(str(tmp_path / "step_5"))) == str(tmp_path / "step_5/policy/weights")


def test_without_the_variable_the_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_CACHE", raising=False)
    assert cache_directory() == Path.home() / ".cache" / "nemo_rl"


def test_making_a_model_is_progress_of_the_run_but_none_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "heartbeat.json"))
    with heartbeat.beating():
        progress = _StepProgress(None)
        progress.start(step=0, total=2)
        progress.step(1, metrics={"loss": 1.0}, seconds={})
    state = heartbeat.read(tmp_path / "heartbeat.json")
    assert (state["phase"], state["step"], state["progress"]) == ("starting", 0, 1)
