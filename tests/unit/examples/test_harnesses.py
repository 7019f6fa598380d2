"""examples/agents/harnesses: layers that load over a recipe, each with a command that its harness needs."""

from pathlib import Path

import pytest

from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.environments.ecosystem.harbor import HarborConfig
from tests.contracts.test_harbor import has_containers

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "examples" / "agents" / "harnesses"


@pytest.mark.skipif(not has_containers(), reason="bubblewrap starts no container on this machine")
@pytest.mark.parametrize("name", sorted(path.stem for path in DIRECTORY.glob("*.yaml")))
def test_a_layer_loads_over_a_recipe_and_its_resolved_form_is_the_same_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults:\n  - quickstart.yaml\n  - {DIRECTORY / name}.yaml\n"
        "data: {train: {task: null, task_kwargs: {}, size: null}, validation: null}\n"
        "checkpointing: {metric_name: null}\n"
    )
    config = load_config(recipe)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(resolved_yaml(config))
    assert load_config(resolved) == config
    section = config.env[name]
    assert isinstance(section, HarborConfig)
    assert section.is_harness
