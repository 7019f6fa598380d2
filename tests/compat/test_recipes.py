"""Recipes in the shapes of NeMo-RL's releases, written for this test: each loads, or lists everything in its way."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.loading import (
    format_translation,
    load_config,
    load_distillation_config,
    load_eval_config,
    load_sft_config,
)
from nemo_rl.errors import CombinedConfigError, ConfigError

RECIPES = sorted((Path(__file__).parent / "recipes").rglob("*.yaml"))
LOADERS: dict[str, Callable[..., Any]] = {
    "distillation": load_distillation_config,
    "eval": load_eval_config,
    "sft": load_sft_config,
}
ENGINE = "policy.generation.vllm_cfg"
OBSTACLES = {  # by name, in every release
    "fp8_rollouts": [f"{ENGINE}.precision", f"{ENGINE}.kv_cache_dtype"],
    "megatron_experts": ["policy.megatron_cfg.expert_model_parallel_size"],
}


def load(path: Path, **options: Any) -> Any:
    return LOADERS.get(path.stem, load_config)(path, (), **options)


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


def test_a_translation_loads_without_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Path(__file__).parent / "recipes" / "main" / "grpo.yaml"
    translated = tmp_path / "grpo.yaml"
    translated.write_text(format_translation(source))
    assert translated.read_text().startswith("# translated from grpo.yaml\n# read as a recipe of NeMo-RL main")
    assert load_config(translated) == load_config(source)
