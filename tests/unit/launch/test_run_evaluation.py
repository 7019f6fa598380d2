"""The recipe that evaluates a run: its model, its validation sets with their seeds, its sampling and its engine."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.config.loading import load_config, load_eval_config
from nemo_rl.data.prompt_sets import load_input, load_prompt_sets
from nemo_rl.errors import ConfigError
from nemo_rl.generation.engines import AdapterSlots
from nemo_rl.launch.model_files import check_model_names
from nemo_rl.launch.run_evaluation import write_evaluation_recipe
from nemo_rl.launch.starting_adapters import adapter_slots, adapter_versions
from nemo_rl.recipes import find_recipe
from tests.trained_runs import write_lora_run, write_policies_run, write_run

SECOND = "{dataset_name: reasoning_gym, task: chain_sum, size: 30, env_name: reasoning_gym}"
FIRST = "{dataset_name: reasoning_gym, task: spell_backward, size: 30, env_name: reasoning_gym}"
ChangedRun = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "exp_001", {3: 0.5, 6: 0.75})


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> ChangedRun:
    """Return a copy of the run's checkpoint whose configuration has other values, loaded as a recipe."""
    from nemo_rl.checkpoint import write_manifest

    def change(*overrides: str, drop: str | None = None, add: dict[str, Any] | None = None) -> Path:
        from nemo_rl.config.loading import resolved_yaml

        copied = Path(shutil.copytree(run / "checkpoints" / "step_6", tmp_path / "step_6"))
        values = yaml.safe_load(resolved_yaml(load_config(find_recipe("quickstart"), list(overrides))))
        values.pop(drop or "", None)
        (copied / "config.yaml").write_text(yaml.safe_dump({**values, **(add or {})}))
        write_manifest(copied, 6)
        return copied

    return change


def test_a_run_is_evaluated_as_it_validates(run: Path, tmp_path: Path) -> None:
    config = load_eval_config(write_evaluation_recipe(run, tmp_path))
    assert config.policy.model_name == str(run / "checkpoints" / "step_6")
    assert (config.policy.precision, config.policy.max_total_sequence_length) == ("float32", 64)
    assert (config.policy.generation.max_new_tokens, config.policy.generation.temperature) == (8, 1.0)
    assert (config.eval.num_tests_per_prompt, config.eval.limit, config.eval.seed) == (1, 200, 42)
    assert config.server.backend == "vllm"
    trained = load_config(find_recipe("quickstart"))
    _, (validation,) = load_prompt_sets(trained.data, trained.seed)
    expected = [prompt.messages for prompt in validation.prompts]
    assert [prompt.messages for prompt in load_input(config.data).prompts] == expected


def test_an_adapter_alone_is_evaluated_on_its_base(tmp_path: Path) -> None:
    run = write_lora_run(tmp_path / "exp_002", {3: 0.75, 6: 0.5})
    config = load_eval_config(write_evaluation_recipe(run, tmp_path))
    assert config.policy.model_name == str(tmp_path / "base")
    assert config.server.adapters == {"exp_002-step_3": str(run / "checkpoints/step_3/policy/adapter")}
    assert config.sampled_name == f"{tmp_path / 'base'}/exp_002-step_3"
    assert (adapter_slots(config), adapter_versions(config)) == (AdapterSlots(4, 1), {"exp_002-step_3": 1})
    two = ["++server.adapters.other=" + str(run / "checkpoints/step_6"), "eval.baseline=other"]
    compared = load_eval_config(write_evaluation_recipe(run, tmp_path), two)
    assert [model.server.model for model in compared.models] == ["other", "exp_002-step_3"]
    assert adapter_versions(compared.models[0]) == {"exp_002-step_3": 1, "other": 2}
    assert len({model.collection.output_dir for model in compared.models}) == 2
    base = load_eval_config(write_evaluation_recipe(run, tmp_path), [f"eval.baseline={config.policy.model_name}"])
    assert [model.server.adapters for model in base.models] == [{}, config.server.adapters]


def test_several_policies_play_the_game_of_their_run(tmp_path: Path) -> None:
    run = write_policies_run(tmp_path / "exp_003", [3])
    config = load_eval_config(write_evaluation_recipe(run, tmp_path))
    names = {policy: f"exp_003-step_3-{policy}" for policy in ("first", "second", "start")}
    adapters = run / "checkpoints/step_3/policy/adapters"
    assert config.server.adapters == {name: str(adapters / policy) for policy, name in names.items()}
    assert config.server.model == names["first"]
    assert config.speakers["duel_with_start"] == (names["first"], names["start"])
    assert config.eval.max_rollout_turns == 2
    assert adapter_slots(config) == AdapterSlots(16, 3)
    check_model_names(config)
    for override, said in (
        ("eval.baseline=exp_003-step_3-second", r"eval\.baseline = .*policies names the adapters that play"),
        ("env.duel_with_start.policies=[first]", r"'first': is not in `server.adapters`"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_eval_config(write_evaluation_recipe(run, tmp_path), [override])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["server.model=step_9"], "server.model = 'step_9': names the adapter .*known: exp_002-step_3"),
        (["server.backend=hf"], "server.adapters = .*: the hf engine holds whole weights"),
        (["++server.adapters.policy=x"], "'policy': is the name of the sampled model"),
        (["++server.adapters.b=nowhere"], "server.adapters.b = 'nowhere': .*holds no adapter"),
    ],
)
def test_adapters_that_cannot_be_sampled_are_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    run = write_lora_run(tmp_path / "exp_002", {3: 0.75})
    recipe = write_evaluation_recipe(run, tmp_path)
    with pytest.raises(ConfigError, match=said):
        check_model_names(load_eval_config(recipe, overrides))


def test_sets_without_a_seed_get_the_rows_that_the_run_had(changed: ChangedRun, tmp_path: Path) -> None:
    overrides = [f"data.validation=[{FIRST},{SECOND}]", "data.disjoint=false", "grpo.max_val_samples=20"]
    path = changed(*overrides, "grpo.val_temperature=0.5", "policy.generation.backend=hf", "grpo.seed=7")
    config = load_eval_config(write_evaluation_recipe(path, tmp_path))
    trained = load_config(find_recipe("quickstart"), [*overrides, "grpo.seed=7"])
    _, sets = load_prompt_sets(trained.data, trained.seed)
    expected = [prompt.messages for one in sets for prompt in one.prompts]
    assert [prompt.messages for prompt in load_input(config.data).prompts] == expected
    assert (config.policy.generation.temperature, config.server.backend, config.eval.limit) == (0.5, "hf", None)


@pytest.mark.parametrize(
    ("overrides", "drop", "said"),
    [(["data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false",
       "checkpointing.metric_name=null"], None, "no validation set of its own"),
     ([], "grpo", "trained on no prompts")],
)  # fmt: skip
def test_a_run_that_has_nothing_to_evaluate_on_is_refused(
    changed: ChangedRun, tmp_path: Path, overrides: list[str], drop: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        write_evaluation_recipe(changed(*overrides, drop=drop), tmp_path)


def test_the_command_takes_a_run_and_overrides(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nemo_rl.cli import run as run_cli

    assert run_cli(["eval", str(run), "eval.num_tests_per_prompt=4", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "num_tests_per_prompt: 4" in shown
    assert f"model_name: {run}/checkpoints/step_6" in shown
    assert run_cli(["eval", str(run), "--config", "eval"]) == 2
    assert "allowed without the run" in capsys.readouterr().err
    assert run_cli(["eval", str(run / "tables")]) == 2  # no path, so an override without its value
