"""What `examples/run_eval.py` accepts, and where each model's evaluation goes."""

from pathlib import Path

import pytest

from nemo_rl.config.collect import EvalRunConfig, model_directory_name
from nemo_rl.config.loading import load_eval_config, resolved_yaml
from nemo_rl.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "eval.yaml"


def load(*overrides: str) -> EvalRunConfig:
    return load_eval_config(RECIPE, overrides)


def test_a_resolved_recipe_is_the_same_configuration(tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(resolved_yaml(load("eval.baseline=other")))
    assert load_eval_config(written) == load("eval.baseline=other")


def test_an_evaluation_is_a_collection_of_one_seed_in_its_models_directory() -> None:
    config = load("eval.num_tests_per_prompt=8", "eval.output_dir=out", "eval.seed=3")
    assert (config.collection.all_seeds, config.collection.num_repeats, config.seed) == ((3,), 8, 3)
    assert config.collection.output_dir == f"out/{model_directory_name('nemo_rl/quickstart')}"


def test_a_baseline_is_evaluated_alike_in_a_directory_of_its_own() -> None:
    first, second = load("eval.baseline=runs/a/step_50", "policy.model_name=runs/b/step_50").models
    assert (first.policy.model_name, second.policy.model_name) == ("runs/a/step_50", "runs/b/step_50")
    assert first.collection.output_dir != second.collection.output_dir
    assert first.collection.output_dir.startswith("evaluations/a_step_50-")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["eval.metric=pass@k"], "pass@4"),
        (["eval.metric=pass@k", "~eval.k_value", "++eval.pass_k_value=2"], "pass@2"),
        (["eval.metric=pass@k", "eval.k_value=1"], "pass@1[avg-of-4]"),
        (["eval.metric=pass@1"], "pass@1[avg-of-4]"),
        (["eval.metric=cons@k", "eval.k_value=null"], "majority@4"),
    ],
)
def test_nemo_rls_metrics_are_scores_of_a_profile(overrides: list[str], name: str) -> None:
    assert load(*overrides).eval.score_name == name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["eval.k_value=5"], r"eval\.k_value = 5: must be at most eval\.num_tests_per_prompt = 4"),
        (["policy.generation.temperature=0"], r"eval\.num_tests_per_prompt = 4: greedy"),
        (["eval.num_tests_per_prompt=1", "eval.k_value=1", "eval.metric=cons@k"], r"eval\.metric"),
        (["eval.baseline=nemo_rl/quickstart"], r"eval\.baseline"),
        (["eval.baseline=x", "server.address=http://a"], r"a server has one model"),
        (["eval.metrics=pass@1"], r"did you mean eval\.metric\?"),
        (["collect.num_repeats=1"], r"collect"),
    ],
)
def test_what_says_nothing_is_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(*overrides)
