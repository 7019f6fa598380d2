"""The evaluation of a run on its own validation sets: `nemo-rl eval RUN`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.data import DataConfig, DatasetConfig, InputDataConfig, resolve_dataset
from nemo_rl.config.kinds import Section
from nemo_rl.config.policy import SampledModelConfig, SamplingConfig
from nemo_rl.config.server import ServerConfig
from nemo_rl.data.prompt_sets import SEED_STRIDE
from nemo_rl.errors import ConfigError
from nemo_rl.launch.trained_model import TrainedModel, find_trained_model

logger = logging.getLogger(__name__)

RECIPE_FILE = "evaluation.yaml"
SHARED_MEMORY_KEYS = ("gpu_memory_utilization", "kv_cache_memory_bytes")  # chosen for an engine beside the trainer
ALGORITHMS = ("grpo", "distillation")  # whose runs have prompts and environments


def write_evaluation_recipe(path: Path, directory: Path) -> Path:
    """Write a recipe of `nemo-rl eval` for the run or checkpoint at `path` to `directory`; return the file.

    Model, environments, scorers, sampling, datasets and their order are those of the run's validation.

    Raises:
        ConfigError: there is no such checkpoint, or the run has no validation set of prompts.
        CheckpointError: it is damaged.
    """
    file = directory / RECIPE_FILE
    recipe = evaluation_recipe(find_trained_model(path))
    file.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return file


def evaluation_recipe(trained: TrainedModel) -> dict[str, Any]:
    """Return the values of an EvalRunConfig."""
    config = trained.config
    algorithm: Any = next((config[name] for name in ALGORITHMS if name in config), None)
    if algorithm is None:
        raise ConfigError(
            "RUN", str(trained.checkpoint.path), "trained on no prompts; expected a run of grpo or distill"
        )
    adapters = {} if trained.has_weights else trained.own_adapters
    policy, server = _of_schema(trained.policy, SampledModelConfig), _engine(trained.policy["generation"])
    if not adapters:
        policy["model_name"] = str(trained.checkpoint.path)
    else:
        server |= {"adapters": {name: str(adapter) for name, adapter in adapters.items()}, "model": _first(trained)}
    policy["generation"] = _of_schema(trained.policy["generation"], SamplingConfig) | _validation_sampling(algorithm)
    shared = {name: config[name] for name in ("env", "scorers", "reward_model", "gateway") if name in config}
    if "env" in shared:
        shared["env"] = {name: _play_by_adapters(section, trained) for name, section in shared["env"].items()}
    data = _validation_data(config["data"], algorithm)
    return {
        "policy": policy,
        "server": server,
        "data": data,
        **shared,
        "eval": {
            "num_tests_per_prompt": algorithm["val_num_generations_per_prompt"],
            "limit": algorithm["max_val_samples"] if len(data["input"]) == 1 else None,  # a run's is that of each set
            "max_rollout_turns": algorithm["max_rollout_turns"],
            "seed": algorithm["seed"],
        },
    }


def _first(trained: TrainedModel) -> str:
    """Return the name of the adapter that plays environments without `policies`: the only one, or that of the first."""
    table = trained.config.get("policies")
    return trained.name_of_policy(next(iter(table))) if table else trained.name


def _play_by_adapters(section: Mapping[str, Any], trained: TrainedModel) -> dict[str, Any]:
    """Return an entry of `env` whose policies have the names of the checkpoint's adapters."""
    players = section.get("policies") or []
    return {**section, **({"policies": [trained.name_of_policy(name) for name in players]} if players else {})}


def _engine(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `server`: the run's engine, with the memory of a device that no training shares."""
    of_engine = _of_schema(generation.get("vllm_cfg") or {}, ServerConfig)
    kept = {name: value for name, value in of_engine.items() if name not in SHARED_MEMORY_KEYS}
    return _of_schema(generation, ServerConfig) | kept


def _validation_sampling(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: algorithm[f"val_{name}"] for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in chosen.items() if value is not None}


def _validation_data(data: Mapping[str, Any], algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `data`: the validation sets, with the seeds that the run derived for them."""
    config = DataConfig.model_validate(data)
    sets = config.datasets_of("validation")
    splits = [key for key, own in config.datasets_of("train") if _is_split(own, config.default)]
    if splits and sets:
        logger.warning("rows that were split off %s for validation are not evaluated", ", ".join(splits))
    if not sets:
        problem = "the run has no validation set of its own; expected --config RECIPE with the data to evaluate on"
        raise ConfigError("data.validation", data.get("validation"), problem)
    first = len(config.datasets_of("train"))  # a run counts its datasets over both fields
    inputs = []
    for index, (key, own) in enumerate(sets, start=first):
        _, section = resolve_dataset(own, config.default, key=key)
        seed = algorithm["seed"] + SEED_STRIDE * index if section.seed is None else section.seed
        inputs.append({**own.model_dump(exclude_none=True), "seed": seed})
    return _of_schema(data, InputDataConfig) | {"input": inputs}


def _is_split(own: DatasetConfig, default: DatasetConfig) -> bool:
    return bool(own.split_validation_size or default.split_validation_size)


def _of_schema(values: Mapping[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Return the values whose keys a section has, and that are set."""
    return {name: values[name] for name in schema.model_fields if values.get(name) is not None}
