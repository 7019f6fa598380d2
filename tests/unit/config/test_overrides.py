from typing import Any

import pytest

from nemo_rl.config.overrides import apply_override
from nemo_rl.errors import ConfigError


def applied(text: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    config = {} if config is None else config
    apply_override(config, text)
    return config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("grpo.seed=3", 3),
        ("++grpo.seed=3", 3),
        ("+grpo.seed=3", 3),
        ("grpo.seed=null", None),
        ("grpo.seed=1e-4", 1e-4),
        ("grpo.seed=true", True),
        ("grpo.seed=Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("grpo.seed=[1,{a: 2}]", [1, {"a": 2}]),
        ("grpo.seed='${mul:${a},2}'", "${mul:${a},2}"),
        ("grpo.seed=${a.b}", "${a.b}"),
        ("grpo.seed=", ""),
    ],
)
def test_values_follow_hydras_grammar(text: str, value: object) -> None:
    assert applied(text) == {"grpo": {"seed": value}}


def test_items_of_lists_are_named_by_index() -> None:
    assert applied("data.train.1.size=5", {"data": {"train": [{}, {"task": "a"}]}}) == {
        "data": {"train": [{}, {"task": "a", "size": 5}]}
    }
    assert applied("~data.train.0", {"data": {"train": [1, 2]}}) == {"data": {"train": [2]}}
    with pytest.raises(ConfigError, match=r"data\.train\.2 .*items are 0 to 1"):
        applied("data.train.2.size=5", {"data": {"train": [{}, {}]}})
    with pytest.raises(ConfigError, match=r"policy\.scheduler = None: the recipe has no list here"):
        applied("policy.scheduler.0.name=x")


def test_a_list_where_a_mapping_by_name_is_read_may_be_indexed() -> None:
    """NeMo-RL's recipes have a list of teachers, which the translation refuses by name."""
    assert applied("teachers.0.model_name=b", {"teachers": [{"model_name": "a"}]}) == {
        "teachers": [{"model_name": "b"}]
    }
    with pytest.raises(ConfigError, match=r"teachers\.1 .*items are 0 to 0"):
        applied("teachers.1.model_name=b", {"teachers": [{"model_name": "a"}]})
    with pytest.raises(ConfigError, match=r"teachers\.0 .*the recipe has no such key"):
        applied("teachers.0.model_name=b", {"teachers": {"math": {"model_name": "a"}}})


def test_mapping_is_merged_and_list_replaced() -> None:
    config = {"policy": {"optimizer": {"kwargs": {"lr": 1, "betas": [1, 2]}}}}
    applied("policy.optimizer.kwargs={betas:[3],eps:4}", config)
    assert config["policy"]["optimizer"]["kwargs"] == {"lr": 1, "betas": [3], "eps": 4}


def test_mappings_in_between_are_made_where_the_recipe_has_null() -> None:
    assert applied("data.validation.size=3", {"data": {"validation": None}}) == {"data": {"validation": {"size": 3}}}


def test_tilde_takes_out_what_is_there() -> None:
    assert applied("~grpo.seed", {"grpo": {"seed": 1, "val_period": 2}}) == {"grpo": {"val_period": 2}}
    assert applied("~grpo.seed=1", {"grpo": {"seed": 1}}) == {"grpo": {}}
    with pytest.raises(ConfigError, match=r"grpo\.seed = 1: is not 2"):
        applied("~grpo.seed=2", {"grpo": {"seed": 1}})
    with pytest.raises(ConfigError, match=r"no such key to remove; did you mean grpo\.seed\?"):
        applied("~grpo.sed", {"grpo": {"seed": 1}})


def test_plus_refuses_a_key_that_is_there() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.seed = 2: .*already"):
        applied("+grpo.seed=2", {"grpo": {"seed": 1}})


def test_free_mapping_catches_misspelt_keys_unless_they_are_added() -> None:
    recipe: dict[str, Any] = {"policy": {"optimizer": {"kwargs": {"lr": 1, "eps": 2}}}}
    with pytest.raises(
        ConfigError, match=r"kwargs\.ep = 3: .*\+\+ adds it; did you mean policy\.optimizer\.kwargs\.eps\?"
    ):
        applied("policy.optimizer.kwargs.ep=3", recipe)
    assert applied("++policy.optimizer.kwargs.fused=true", recipe)["policy"]["optimizer"]["kwargs"]["fused"] is True
    assert applied("policy.optimizer.kwargs.lr=3", {}) == {"policy": {"optimizer": {"kwargs": {"lr": 3}}}}


def test_environment_must_be_in_the_recipe_or_built_in() -> None:
    assert applied("env.math.num_workers=1") == {"env": {"math": {"num_workers": 1}}}
    assert applied("++env.own.type=a.b") == {"env": {"own": {"type": "a.b"}}}
    with pytest.raises(ConfigError, match=r"env\.mth = .*did you mean env\.math\?"):
        applied("env.mth.num_workers=1")


def test_value_that_is_no_mapping_has_no_keys() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.seed = 1: no mapping, so that it has no key 'x'"):
        applied("grpo.seed.x=2", {"grpo": {"seed": 1}})


@pytest.mark.parametrize(
    "text", ["grpo.seed", "=3", "a..b=1", "a=f(x)", "a=1,2", "a=range(1,3)", "a@b=c", "a=(", "", "a=b=c"]
)
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        applied(text)


def test_flat_advantage_key_of_nemo_rl_overrides_the_recipes_own() -> None:
    recipe: dict[str, Any] = {"grpo": {"adv_estimator": {"normalize_rewards": True}}}
    written = applied("grpo.normalize_rewards=false", recipe)["grpo"]
    assert written == {"normalize_rewards": False, "adv_estimator": {"normalize_rewards": False}}
