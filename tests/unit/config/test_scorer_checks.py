import pytest

from nemo_rl.errors import ConfigError
from tests.unit.config.conftest import Load

RULE = "++scorers.rule={type: function, function: 'mine:rule'}"
MODEL = "++scorers.rm={type: reward_model, model_name: m}"
USES_MODEL = "++env.math.scorers=[rm]"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([RULE], "scorers.rule", "never used"),
        ([RULE, "++env.math.scorers=[rules]"], "env.math.scorers", "did you mean .*rule"),
        (["++env.rm={type: reward_model}"], "env.rm.scorers", "must name one or more"),
        ([MODEL + "", USES_MODEL, "++scorers.rm.timeout_s=600"], "scorers.rm.timeout_s", "stall_timeout_s"),
        (["++reward_model.enable=true"], "reward_model.enable", "no scorer of type reward_model"),
        (
            [MODEL, USES_MODEL, "++reward_model={enable: true, enable_resource_pool: true, nnodes: 1}"],
            "reward_model.n_gpus_per_node",
            "at least 1",
        ),
        (
            [MODEL, USES_MODEL, "++reward_model={enable: true, enable_resource_pool: true, n_gpus_per_node: 1}"],
            "reward_model.nnodes",
            "at least 1",
        ),
        (
            [
                *(MODEL, USES_MODEL, "++reward_model.enable=true", "grpo.async_grpo.enabled=true"),
                "loss_fn.use_importance_sampling_correction=true",
            ],
            "reward_model.enable_resource_pool",
            "background",
        ),
        ([MODEL, USES_MODEL, "++reward_model.nnodes=-1"], "reward_model.nnodes", "enable_resource_pool: true"),
        (
            [MODEL, USES_MODEL, "++reward_model={enable: true, n_gpus_per_node: 2}"],
            "reward_model.n_gpus_per_node",
            "there is none: set reward_model.enable_resource_pool: true",
        ),
        (
            [MODEL, USES_MODEL, "++reward_model={enable: true, enable_resource_pool: true, n_gpus_per_node: -1}"],
            "reward_model.n_gpus_per_node",
            "at least 1",
        ),
        (
            ["++scorers.j={type: judge, base_urls: [localhost], model: m, prompt: p}", "++env.math.scorers=[j]"],
            "scorers.j.base_urls",
            "http://",
        ),
    ],
)
def test_scorers_that_cannot_score_are_refused(load: Load, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load("", *overrides)
    assert caught.value.key == key


def test_an_unknown_key_of_a_scorer_names_the_nearest(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"did you mean scorers\.rm\.model_name"):
        load("", "++scorers.rm={type: reward_model, model_nam: m}")


@pytest.mark.parametrize("key", ["timeout_s", "batching"])
def test_a_server_is_bounded_by_its_limits_alone(load: Load, key: str) -> None:
    judge = "{type: judge, base_urls: ['http://localhost'], model: m, prompt: p}"
    value = {"timeout_s": "5.0", "batching": "{enabled: true}"}[key]
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load("", f"++scorers.j={judge}", "++env.math.scorers=[j]", f"++scorers.j.{key}={value}")
    assert caught.value.key == f"scorers.j.{key}"
