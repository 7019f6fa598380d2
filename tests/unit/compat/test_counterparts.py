import copy
from typing import Any

import pytest

from nemo_rl.compat import counterparts
from nemo_rl.compat.tables import Report
from nemo_rl.errors import ConfigError


def report() -> Report:
    return Report(release="main")


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ({"name": "in_order", "max_lookahead_versions": 0}, {"enabled": False}),
        ({"name": "in_order", "max_lookahead_versions": 2}, {"max_trajectory_age_steps": 2, "stale_groups": "wait"}),
        ({"name": "weight_fifo", "max_staleness_versions": 3}, {"max_trajectory_age_steps": 3, "stale_groups": "wait"}),
        ({"name": "ready_first"}, {"max_trajectory_age_steps": 1, "stale_groups": "wait"}),
        ({"name": "windowed", "max_staleness_versions": 4}, {"max_trajectory_age_steps": 4, "stale_groups": "drop"}),
    ],
)
def test_single_controller_is_background_collection(sampler: dict[str, Any], expected: dict[str, Any]) -> None:
    config: dict[str, Any] = {"grpo": {}, "async_rl": {"sampler": sampler, "max_inflight_prompts": 8}}
    notes = report()
    counterparts.translate_single_controller(config, notes)
    if expected.get("enabled", True):
        expected = {"enabled": True, "recompute_kv_cache_after_weight_updates": False, **expected}
    assert config == {"grpo": {"async_grpo": expected}}
    assert "async_rl.max_inflight_prompts = 8" in str(notes.switches)


@pytest.mark.parametrize("sampler", [{"name": "custom"}, {"name": "windowed", "sample_freshest_first": True}, "newest"])
def test_a_sampler_without_counterpart_is_left_to_be_refused(sampler: Any) -> None:
    config = {"grpo": {}, "async_rl": {"sampler": sampler}}
    counterparts.translate_single_controller(config, report())
    assert "async_rl" in config


@pytest.mark.parametrize("bound", [None, "two", True, 1.5])
def test_a_bound_that_is_no_whole_number_is_refused_by_its_key(bound: Any) -> None:
    config = {"grpo": {}, "async_rl": {"sampler": {"name": "in_order", counterparts.SAMPLERS["in_order"][0]: bound}}}
    with pytest.raises(ConfigError, match=r"async_rl\.sampler\..*must be a whole number"):
        counterparts.translate_single_controller(config, report())


@pytest.mark.parametrize(
    "config",
    [
        {"grpo": {}, "async_rl": {"sampler": {"name": ["a"]}}},
        {"on_policy_distillation": {"enabled": True, "teacher_model_by_agent_name": {"a": ["x"]}}},
        {"on_policy_distillation": {"enabled": True, "non_colocated_teachers": "text"}},
        {"on_policy_distillation": {"enabled": True, "non_colocated_teachers": {"default_teacher_cfg": 3}}},
        {"env": {"nemo_gym": {"effort_levels": {"low_string": "low", "low_weight": "much"}}}},
    ],
)
def test_values_of_wrong_types_are_left_to_be_refused(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    for step in counterparts.STEPS:
        step(config, report())
    assert config == before


def agents_config(models: dict[str, str]) -> dict[str, Any]:
    placement = {
        "enabled": True,
        "default_teacher_cfg": {"tensor_model_parallel_size": 2, "precision": "bf16", "num_nodes": 1},
    }
    return {
        "grpo": {"adv_estimator": {"name": "opd"}},
        "on_policy_distillation": {
            "enabled": True,
            "teacher_model_by_agent_name": models,
            "non_colocated_teachers": placement,
        },
    }


def test_one_teacher_of_all_agents_is_the_teacher() -> None:
    config = agents_config({"default_teacher": "org/teacher", "coder": "org/teacher"})
    counterparts.translate_teachers_by_agent(config, report())
    assert config["teacher"] == {
        "model_name": "org/teacher",
        "precision": "bfloat16",
        "logprob_batch_size": 1,
        "dtensor_cfg": {},
        "megatron_cfg": {"enabled": True, "tensor_model_parallel_size": 2},
        "colocated": {"enabled": False, "resources": {"num_nodes": 1}},
    }
    assert "on_policy_distillation" not in config


def test_two_teachers_by_agent_are_left_to_be_refused() -> None:
    config = agents_config({"default_teacher": "org/teacher", "coder": "org/coder"})
    counterparts.translate_teachers_by_agent(config, report())
    assert "on_policy_distillation" in config
    assert "teacher" not in config


def test_a_reward_model_environment_is_a_scorer() -> None:
    section = {
        "model_name": "org/reward",
        "tokenizer": {"name": "org/tokenizer"},
        "precision": "bfloat16",
        "batch_size": 4,
        "max_model_len": 2048,
        "checkpoint_path": None,
        "resources": {"gpus_per_node": 2, "num_nodes": 1},
    }
    config: dict[str, Any] = {"env": {"reward_model": section}}
    counterparts.translate_scoring_environments(config, report())
    assert config["env"] == {"reward_model": {"scorers": ["reward_model"]}}
    assert config["scorers"]["reward_model"] == {
        "type": "reward_model",
        "model_name": "org/reward",
        "tokenizer_name": "org/tokenizer",
        "precision": "bfloat16",
        "micro_batch_size": 4,
        "max_length": 2048,
    }
    assert config["reward_model"]["n_gpus_per_node"] == 2


def test_several_mathematical_rewards_are_a_function() -> None:
    config: dict[str, Any] = {"env": {"math_multi_reward": {"num_workers": 8, "math_verify_impl": "hf_math_verify"}}}
    counterparts.translate_scoring_environments(config, report())
    assert config["env"] == {"math_multi_reward": {"type": counterparts.TAGGED_ANSWERS}}


@pytest.mark.parametrize(("weight", "is_left"), [(0.0, False), (0.1, True)])
def test_effort_is_left_to_be_refused_where_it_shapes_rewards(weight: float, is_left: bool) -> None:
    config = {"env": {"nemo_gym": {"effort_levels": {"low_weight": weight, "low_string": "brief"}}}}
    counterparts.translate_gym_options(config, report())
    assert ("effort_levels" in config["env"]["nemo_gym"]) is is_left


@pytest.mark.parametrize(
    ("options", "is_left"),
    [({}, True), ({"mtp_detach_heads": True}, False), ({"mtp_loss_scaling_factor": 0}, False)],
)
def test_further_heads_are_left_out_where_they_do_not_train_the_policy(options: dict[str, Any], is_left: bool) -> None:
    config = {"policy": {"megatron_cfg": {"mtp_num_layers": 5, **options}, "sequence_packing": {}}}
    config["policy"]["sequence_packing"] = {"algorithm": "modified_ffd"}
    counterparts.translate_models(config, report())
    assert ("mtp_num_layers" in config["policy"]["megatron_cfg"]) is is_left
    assert config["policy"]["sequence_packing"]["algorithm"] == "modified_first_fit_decreasing"


@pytest.mark.parametrize(("val_period", "metric"), [(0, None), (10, "val:accuracy")])
def test_a_validation_that_never_runs_ranks_nothing(val_period: int, metric: str | None) -> None:
    config = {"grpo": {"val_period": val_period}, "checkpointing": {"metric_name": "val:accuracy"}}
    counterparts.translate_ranking(config, report())
    assert config["checkpointing"]["metric_name"] == metric


@pytest.mark.parametrize(
    ("data", "metric"),
    [
        ({"train": {"dataset_name": "x"}, "validation": None}, None),
        ({"train": {"dataset_name": "x"}, "validation": {"dataset_name": "y"}}, "val:loss"),
        ({"train": [{}, {"split_validation_size": 0.05}]}, "val:loss"),
        ({"train": {}, "default": {"split_validation_size": 8}}, "val:loss"),
    ],
)
def test_without_rows_to_validate_on_nothing_is_ranked(data: dict[str, Any], metric: str | None) -> None:
    config = {"sft": {"val_period": 10}, "checkpointing": {"metric_name": "val:loss"}, "data": data}
    counterparts.translate_ranking(config, report())
    assert config["checkpointing"]["metric_name"] == metric


def test_variables_of_a_recipe_are_left_out_of_its_sections() -> None:
    config = {"model_dir": "/models", "data": {"train": {}, "dataset_name": "DAPOMath17K"}, "grpo": {}}
    counterparts.translate_variables(config, report())
    assert config == {"data": {"train": {}}, "grpo": {}}
    own = {"model_dir": "/models"}
    counterparts.translate_variables(own, Report())
    assert own == {"model_dir": "/models"}  # a mistake in a recipe of this project


def test_transformer_engines_adam_is_torchs_with_its_own_defaults() -> None:
    kwargs = {"lr": 1e-6, "weight_decay": 0.1, "master_weights": True, "exp_avg_dtype": "torch.bfloat16"}
    config: dict[str, Any] = {
        "policy": {"optimizer": {"name": counterparts.FUSED_ADAM, "kwargs": kwargs}},
        "teacher": {},
    }
    notes = report()
    counterparts.translate_models(config, notes)
    assert config["policy"]["optimizer"] == {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "weight_decay": 0.1}}
    assert "policy.optimizer.kwargs.exp_avg_dtype = 'torch.bfloat16'" in str(notes.switches)
    bare = {"policy": {"optimizer": {"name": counterparts.FUSED_ADAM}}}
    counterparts.translate_models(bare, report())
    assert bare["policy"]["optimizer"]["kwargs"] == {"lr": 1e-3, "weight_decay": 0.0}
