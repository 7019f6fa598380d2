import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.environment import CustomEnvironmentConfig
from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.environments.math_answers import MathEnvironmentConfig
from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironmentConfig
from nemo_rl.errors import ConfigError
from tests.unit.config.conftest import Load


def test_defaults_are_merged_in_order_below_the_file_itself(recipe: Path) -> None:
    directory = recipe.parent / "deeper"
    directory.mkdir()
    (directory / "one.yaml").write_text("grpo: {max_num_steps: 1, val_period: 1, seed: 1}")
    (directory / "two.yaml").write_text("defaults: ../base.yaml\ngrpo: {val_period: 2, seed: 2}")
    (directory / "top.yaml").write_text("defaults: [one.yaml, two.yaml]\ngrpo: {seed: 3}")
    grpo = load_config(directory / "top.yaml").grpo
    assert (grpo.num_prompts_per_step, grpo.max_num_steps, grpo.val_period, grpo.seed) == (4, 1, 2, 3)


def test_defaults_that_name_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_override_marker_replaces_a_mapping(load: Load) -> None:
    config = load("policy: {optimizer: {kwargs: {lr: 1}}}", "policy.optimizer.kwargs={_override_:true,eps:2}")
    assert config.policy.optimizer.kwargs == {"eps": 2}


def test_interpolations_and_resolvers_see_overrides(load: Load) -> None:
    config = load(
        """
        policy:
          train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}
          train_micro_batch_size: ${div:${policy.train_global_batch_size},3}
          max_total_sequence_length: ${add:${max:30,20},10}
        """,
        "grpo.num_prompts_per_step=6",
    )
    policy = config.policy
    assert (policy.train_global_batch_size, policy.train_micro_batch_size) == (12, 4)
    assert policy.max_total_sequence_length == 40


def test_numbers_with_an_exponent_and_no_point_are_numbers(load: Load) -> None:
    assert load("policy: {optimizer: {kwargs: {lr: 5e-6}}}").policy.optimizer.kwargs["lr"] == 5e-6


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_misspelt_override_names_the_key_the_value_and_the_nearest_key(load: Load, sign: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("", f"{sign}grpo.num_prompt_per_step=4")
    assert str(error.value) == ("grpo.num_prompt_per_step = 4: unknown key; did you mean grpo.num_prompts_per_step?")


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("polcy: {}", "polcy", "did you mean policy?"),
        ("policy: {generation: {vllm_cfg: {max_modl: 3}}}", "policy.generation.vllm_cfg.max_modl", "max_model_len?"),
        ("env: {math: {num_worker: 4}}", "env.math.num_worker", "did you mean env.math.num_workers?"),
        ("env: {sums: {type: math, num_worker: 4}}", "env.sums.num_worker", "did you mean env.sums.num_workers?"),
        ("env: {mth: {num_workers: 4}}", "env.mth.type", "did you mean math?"),
        ("env: {math: {batching: {max_batch: 4}}}", "env.math.batching.max_batch", "max_batch_size?"),
        ("env: {math: {num_workers: many}}", "env.math.num_workers", "valid integer"),
        ("env: {math: 3}", "env.math", "must be a mapping"),
        ("env: [math]", "env", "must be a mapping"),
        ("data: {train: {dataset_nam: x}}", "data.train.dataset_nam", "did you mean data.train.dataset_name?"),
        ("data: {train: [{dataset_nam: x}]}", "data.train.0.dataset_nam", "did you mean data.train.0.dataset_name?"),
        ("data: {train: [{dataset_name: x, size: 0}]}", "data.train.0.size", "greater than 0"),
        ("data: {train: 3}", "data.train", "must be a mapping"),
        ("grpo: {num_prompts_per_step: four}", "grpo.num_prompts_per_step", "valid integer"),
        ("grpo: {max_val_samples: None}", "grpo.max_val_samples", "write null for no value"),
        ("grpo: {num_prompts_per_step: 0}", "grpo.num_prompts_per_step", "greater than 0"),
        ("grpo: {num_prompts_per_step: true}", "grpo.num_prompts_per_step", "whole number"),
        ("data: {train: [{dataset_name: x, seed: false}]}", "data.train.0.seed", "whole number"),
        ("grpo: 3", "grpo", "must be a mapping"),
        ("loss_fn: {reference_policy_kl_type: k4}", "loss_fn.reference_policy_kl_type", "'k1', 'k2' or 'k3'"),
        ("policy: {scheduler: [{nam: x}]}", "policy.scheduler.0.nam", "did you mean policy.scheduler.0.name?"),
        ("policy: {precision: '???'}", "policy.precision", "must be set"),
    ],
)  # fmt: skip
def test_what_the_schema_refuses_is_named_in_full(load: Load, text: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(text)
    assert error.value.key == key
    assert said in str(error.value)


def test_missing_required_key_is_named(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name = None: required"):
        load("", "~policy.model_name")


def test_misspelt_required_key_is_said_to_be_misspelt_rather_than_missing(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("grpo: {}\npolicy: {model_nam: m}\ndata: {train: {dataset_name: gsm8k}}")
    with pytest.raises(ConfigError, match=r"model_nam = 'm': unknown key; did you mean policy\.model_name\?"):
        load_config(path)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${policy.no_such}", "'policy.no_such' not found"),
        ("${nul:1,2}", "Unsupported interpolation type nul"),
        ("${mul:1,2", "BRACE_CLOSE"),
        ("${div:1,0}", "ZeroDivisionError"),
        ("${grpo.seed}", "Recursive interpolation"),
    ],
)
def test_unresolved_interpolation_names_its_key(load: Load, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.seed") as error:
        load(f"grpo: {{seed: '{value}'}}")
    assert said in str(error.value)


def test_missing_files_are_named_with_who_asked_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config = '.*nowhere\.yaml': no such file"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "recipe.yaml").write_text("defaults: nowhere.yaml")
    with pytest.raises(ConfigError, match=r"defaults of .*recipe\.yaml = '.*nowhere\.yaml': no such file"):
        load_config(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("text", ["grpo:\n  a: 1\n b: 2\n", "grpo: {}\npolicy: [1\ndata: {}\n", "a: 1\nb: 2\na: 3\n"])
def test_malformed_yaml_is_named_by_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml:3': malformed YAML"):
        load_config(path)


@pytest.mark.parametrize("text", ["- 1\n", "5\n", "defaults: {a: 1}\n", "defaults: [1]\n"])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_config(path)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load_config(path)


def test_environments_are_validated_by_the_section_of_their_type(load: Load) -> None:
    env = load(
        "env: {reasoning_gym: null, sums: {type: math, num_workers: 3}, "
        "own: {type: 'tests.unit.environments.custom:EchoEnvironment', kwargs: {a: 1}}}"
    ).env
    assert env["sums"] == MathEnvironmentConfig(type="math", num_workers=3)
    assert env["own"] == CustomEnvironmentConfig(type="tests.unit.environments.custom:EchoEnvironment", kwargs={"a": 1})
    assert env["math"].type == "math"
    assert env["reasoning_gym"] == ReasoningGymEnvironmentConfig(type="reasoning_gym")


def test_resolved_yaml_loads_to_an_equal_config(load: Load, tmp_path: Path) -> None:
    config = load(
        r"""
        policy:
          tokenizer: {chat_template: "{{ x }} \\${a} 'é'", name: '007'}
          hf_config_overrides: {a: '1e-5', b: 'true', d: ['${policy.model_name}', 1.0e-5], e: '', f: {1: .inf}}
          scheduler: [{name: a.B, kwargs: {x: 1}}, {name: a.C}, {milestones: [5]}]
        data:
          train: [{dataset_name: reasoning_gym, task: gcd, task_kwargs: {a: 1}}, {dataset_name: gsm8k}]
          validation: {dataset_name: gsm8k}
        env: {own: {type: 'tests.unit.environments.custom:EchoEnvironment', kwargs: {a: null}}}
        """
    )
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    again = load_config(path)
    assert again == config
    assert again.policy.tokenizer.chat_template == "{{ x }} ${a} 'é'"
    assert resolved_yaml(again) == resolved_yaml(config)


def test_resolved_yaml_leaves_data_sets_what_they_inherit(load: Load, tmp_path: Path) -> None:
    config = load("data: {default: {task: gcd, task_kwargs: {max_n: 9}}, train: {dataset_name: reasoning_gym}}")
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    train = load_config(path).data.train
    assert not isinstance(train, list)
    assert train.model_fields_set == {"dataset_name"}


def test_overrides_apply_to_a_resolved_config_too(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(load()))
    config: Any = load_config(path, ["grpo.normalize_rewards=false", "grpo.max_num_steps=7"])
    assert not config.grpo.adv_estimator.normalize_rewards
    assert config.grpo.max_num_steps == 7


def test_loading_imports_neither_torch_nor_an_engine() -> None:
    heavy = "torch transformers vllm ray datasets reasoning_gym numpy"
    code = f"import sys, nemo_rl.config.loading; print([m for m in '{heavy}'.split() if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
