"""Recipes in the shapes of NeMo-RL's releases, written for this test: each loads, or lists everything in its way."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.compat.recipe_writer import format_translation
from nemo_rl.config.data import resolve_dataset
from nemo_rl.config.loading import (
    load_config,
    load_distillation_config,
    load_dpo_config,
    load_eval_config,
    load_reward_model_config,
    load_sft_config,
)
from nemo_rl.errors import CombinedConfigError, ConfigError

RECIPES = sorted((Path(__file__).parent / "recipes").rglob("*.yaml"))
LOADERS: dict[str, Callable[..., Any]] = {
    "distillation": load_distillation_config,
    "dpo": load_dpo_config,
    "eval": load_eval_config,
    "rm": load_reward_model_config,
    "sft": load_sft_config,
}
ENGINE = "policy.generation.vllm_cfg"
OBSTACLES = {  # by name, in every release
    "fp8_rollouts": [f"{ENGINE}.precision", f"{ENGINE}.kv_cache_dtype"],
    "megatron_experts": ["policy.megatron_cfg.enabled"],
}


def load(path: Path, overrides: Sequence[str] = (), **options: Any) -> Any:
    return LOADERS.get(path.stem.partition("_")[0], load_config)(path, overrides, **options)


def obstacles(path: Path, **options: Any) -> list[str]:
    """Return the keys that a recipe is refused for."""
    try:
        load(path, **options)
    except CombinedConfigError as error:
        return [one.key for one in error.errors]
    except ConfigError as error:
        return [error.key]
    return []


def test_there_are_sixty_recipes() -> None:
    assert len(RECIPES) >= 60


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_loads_or_lists_every_obstacle(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = OBSTACLES.get(path.stem, [])
    assert obstacles(path) == expected
    assert obstacles(path, allow_unsupported=True) == []
    if not expected:
        assert caplog.records[0].levelno == logging.WARNING
        release = path.parent.name if path.stem != "eval" or path.parent.name == "main" else "0.4"  # unchanged since
        assert f"read as a recipe of NeMo-RL {release}" in caplog.text


@pytest.mark.parametrize("release", ["0.5", "0.6", "0.7", "main"])
def test_values_are_the_recipes_own(release: str) -> None:
    directory = Path(__file__).parent / "recipes" / release
    config = load(directory / "grpo.yaml")
    assert config.grpo.adv_estimator.use_leave_one_out_baseline
    assert config.loss_fn.reference_policy_kl_penalty == 0.01
    assert not config.grpo.val_at_end
    assert config.data.train.split_validation_size == 0.05
    assert config.env["math"].num_workers == 8
    assert load(directory / "top_p.yaml").policy.generation.top_p < 1
    assert load(directory / "gspo.yaml").loss_fn.type == "gspo"
    assert load(directory / "dapo.yaml").env["math"].verifier == "last_answer"
    assert load(directory / "grpo_env_vars.yaml").cluster.env_vars == {"NCCL_ALGO": "Ring"}
    sft = load(directory / "sft.yaml")
    assert (sft.data.add_bos, sft.data.add_generation_prompt, sft.data.validation.split) == (True, False, "validation")
    evaluation = load(directory / "eval.yaml")
    assert evaluation.policy.model_name == "org/model"
    assert evaluation.data.input.dataset_name == "AIME2024"


@pytest.mark.parametrize("release", ["0.5", "0.6", "0.7", "main"])
def test_preference_recipes_keep_their_values(release: str) -> None:
    directory = Path(__file__).parent / "recipes" / release
    dpo = load(directory / "dpo.yaml")
    assert (dpo.dpo.reference_policy_kl_penalty, dpo.dpo.preference_loss_weight, dpo.dpo.sft_loss_weight) == (
        0.05,
        1,
        0,
    )
    assert (dpo.policy.train_global_batch_size, dpo.val_micro_batch_size) == (128, 2)  # rows of one pair
    assert (dpo.dpo.val_at_end, dpo.checkpointing.metric_name) == (False, "val:loss")
    assert (dpo.data.train.dataset_name, dpo.data.validation.split) == ("HelpSteer3", "validation")
    rm = load(directory / "rm.yaml")
    assert (rm.rm.val_batches, rm.rm.val_micro_batch_size, rm.policy.precision) == (None, 1, "bfloat16")
    assert rm.rm.max_num_steps == 1_000_000
    assert (rm.checkpointing.checkpoint_dir, rm.checkpointing.metric_name) == ("results/rm", "val:loss")
    assert (rm.data.train.dataset_name, rm.data.validation.split) == ("HelpSteer3", "validation")


def test_preference_data_keep_their_fields_and_sets() -> None:
    binary = load(Path(__file__).parent / "recipes" / "0.5" / "dpo_binary.yaml")
    (_, train), (_, held_out) = binary.data.datasets
    assert (train.data_path, train.split, held_out.data_path, held_out.split) == (
        "org/train", "train", "org/held_out", "test",
    )  # fmt: skip
    sections = [resolve_dataset(each, binary.data.default, key="data")[1] for each in (train, held_out)]
    assert [each.dataset_name for each in sections] == ["huggingface"] * 2
    assert {(each.input_key, each.chosen_key, each.rejected_key) for each in sections} == {
        ("question", "better", "worse")
    }
    several = load(Path(__file__).parent / "recipes" / "main" / "dpo_pairs.yaml")
    assert [each.name for _, each in several.data.datasets_of("validation")] == ["first", "second"]
    assert several.checkpointing.metric_name == "val:second/loss"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("null", "{% for message in messages %}{{ message['content'] }}{% endfor %}"), ("default", None), ("t.j", "t.j")],
)
@pytest.mark.parametrize("family", ["grpo", "sft", "eval"])
def test_a_null_chat_template_passes_the_contents_through(
    family: str, written: str, meant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{'' if family == 'eval' else 'policy.'}tokenizer.chat_template"
    config = load(Path(__file__).parent / "recipes" / "main" / f"{family}.yaml", [f"++{key}={written}"])
    assert config.policy.tokenizer.chat_template == meant
    assert ("chat_template: null joins the contents of messages" in caplog.text) == (written == "null")


def test_a_null_chat_template_of_a_recipe_of_this_project_is_the_tokenizers() -> None:
    recipe = Path(__file__).parents[2] / "examples" / "configs" / "quickstart.yaml"
    assert load(recipe, ["policy.tokenizer.chat_template=null"]).policy.tokenizer.chat_template is None


OWN = sorted((Path(__file__).parent / "own").glob("*.yaml"))
FLAT = {  # what the flat `data` section of 0.5 does not say, in this project's terms
    "dpo": ["~data.train.split", "++data.default={}"],
    "rm": ["~data.train.split", "++data.default={}"],
    "sft": ["~data.train.split"],
}


@pytest.mark.parametrize("release", ["0.5", "0.6", "0.7", "main"])
@pytest.mark.parametrize("own", OWN, ids=lambda path: path.stem)
def test_a_recipe_is_the_configuration_of_one_written_by_hand_in_our_terms(
    own: Path, release: str, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = FLAT.get(own.stem, ["~data.train.seed"]) if release == "0.5" else []
    written = load(own, overrides)
    assert caplog.text == ""  # nothing is translated
    assert load(own.parents[1] / "recipes" / release / own.name).model_dump() == written.model_dump()


def test_reward_models_of_several_ranks_are_refused() -> None:
    path = Path(__file__).parent / "recipes" / "main" / "rm.yaml"
    with pytest.raises(ConfigError, match=r"policy\.dtensor_cfg\.tensor_parallel_size = 2.*one process"):
        load_reward_model_config(path, ["policy.dtensor_cfg.tensor_parallel_size=2"])
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node = 8.*one process"):
        load_reward_model_config(path, ["cluster.gpus_per_node=8"])
    assert load_reward_model_config(path, ["cluster.gpus_per_node=8"], allow_unsupported=True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("++policy.dtensor_cfg.cpu_ofload=true", r"cpu_ofload = True: unknown key .*; did you mean .*cpu_offload\?"),
        ("++policy.dtensor_cfg.lora_cfg={enabled: true}", "all weights are trained"),
        ("policy.dtensor_cfg.enabled=false", "the training backend"),
        ("++policy.dynamic_batching.tokens=8", r"policy\.dynamic_batching\.tokens = 8: unknown key"),
        ("++cluster.gpus=8", r"cluster\.gpus = 8: unknown key"),
        ("++cluster.env_vars={A: b}", "set them in the environment of the command"),
        ("++checkpointing.keep_top=3", r"checkpointing\.keep_top = 3: unknown key"),
        ("checkpointing.metric_name=val:los", "the mean over the validation sets"),
        ("checkpointing.higher_is_better=true", "better when it is lower"),
        ("policy.reward_model_cfg.reward_model_type=regression", "learn from pairs"),
        ("++policy.reward_model_cfg.typo=1", r"policy\.reward_model_cfg\.typo = 1: unknown key; known: enabled, "),
        ("policy.reward_model_cfg=regression", r"policy\.reward_model_cfg = 'regression': must be a mapping of"),
        ("++policy.megatron_cfg.typo=1", r"policy\.megatron_cfg\.typo = 1: unknown key"),
        ("policy.megatron_cfg=off", r"policy\.megatron_cfg = .*must be a mapping"),
        ("policy.megatron_cfg.enabled=true", "Megatron's optimizer and schedule are not read"),
    ],
)
@pytest.mark.parametrize("allow_unsupported", [False, True])
def test_nothing_that_a_reward_model_does_not_read_is_dropped(
    override: str, said: str, allow_unsupported: bool
) -> None:
    path = Path(__file__).parent / "recipes" / "main" / "rm.yaml"
    if allow_unsupported and "the training backend" in said:
        return  # a layout, which may be left out
    with pytest.raises(ConfigError, match=said):
        load_reward_model_config(path, [override], allow_unsupported=allow_unsupported)


def test_a_reward_model_is_written_where_nothing_is_to_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    path = Path(__file__).parent / "recipes" / "main" / "rm.yaml"
    config = load_reward_model_config(path, ["checkpointing.enabled=false"])
    assert config.checkpointing.checkpoint_dir is None
    assert "the trained model is always written, to model/ in the run directory" in caplog.text


@pytest.mark.parametrize(
    ("given", "metric", "expected"),
    [
        ("[{name: one}]", "validation-one_loss", "val:loss"),
        ("[{name: one}, {name: two}]", "val:validation-two_sft_loss", "val:two/sft_loss"),
        ("[{name: one_sft}, {name: two}]", "val:validation-one_sft_loss", "val:one_sft/loss"),
        ("{}", "val:validation-default_preference_loss", "val:preference_loss"),
        ("{}", "val:validation-default_rewards_chosen_mean", "val:rewards_chosen_mean"),
    ],
)
def test_metrics_of_validation_sets_are_found(given: str, metric: str, expected: str) -> None:
    path = Path(__file__).parent / "recipes" / "main" / "dpo.yaml"
    overrides = ["++data.default={dataset_name: HelpSteer3}", f"data.validation={given}"]
    config = load_dpo_config(path, [*overrides, f"checkpointing.metric_name={metric!r}"])
    assert config.checkpointing.metric_name == expected


def test_the_metric_of_a_set_that_does_not_exist_is_refused_before_a_model_loads() -> None:
    path = Path(__file__).parent / "recipes" / "main" / "dpo.yaml"
    with pytest.raises(ConfigError, match="HelpSteer3 is the only validation dataset"):
        load_dpo_config(path, ["checkpointing.metric_name='val:validation-other_loss'"])


def test_a_recipe_of_another_command_is_named_with_it() -> None:
    path = Path(__file__).parent / "recipes" / "main" / "sft.yaml"
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith("sft = {'max_num_epochs': 1, ")
    assert "characters ...]" in str(error.value)
    assert str(error.value).endswith("}: unknown key of `nemo-rl grpo`: it belongs to recipes of `nemo-rl sft`")


def test_ppo_is_refused_in_one_sentence(tmp_path: Path) -> None:
    recipe = tmp_path / "ppo.yaml"
    base = Path(__file__).parent / "recipes" / "main" / "grpo.yaml"
    recipe.write_text(
        f"defaults: {base}\nppo: {{gae_lambda: 1}}\nvalue: {{model_name: m}}\nvalue_loss_fn: {{scale: 1}}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(recipe)
    cause = "not available: PPO with a value model is not implemented; nearest: grpo.adv_estimator.name: "
    assert str(error.value) == f"ppo = {{'gae_lambda': 1}}: {cause}reinforce_plus_plus"


@pytest.mark.parametrize("name", ["grpo", "async", "distillation", "sft", "dpo", "rm", "eval"])
@pytest.mark.parametrize("release", ["0.5", "main"])
def test_a_translation_loads_without_a_note(
    name: str, release: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(__file__).parent / "recipes" / release / f"{name}.yaml"
    translated = tmp_path / f"{name}.yaml"
    translated.write_text(format_translation(source))
    assert translated.read_text().startswith(f"# translated from {name}.yaml\n# read as a recipe of NeMo-RL")
    config = load(translated)
    assert caplog.text == ""
    assert config == load(source)
