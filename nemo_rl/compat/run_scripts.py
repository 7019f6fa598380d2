"""NeMo-RL's names in run scripts: configuration, tokenizer, `setup` and `grpo_train`, which runs our job.

A run script loads a recipe, makes datasets and environments, and hands them to `setup` and `grpo_train`. Nothing is set
up here before `grpo_train`: it writes the script's configuration as a recipe, with its datasets and environments as
entries of this process, and runs `nemo-rl grpo` over it.
"""

import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.compat.script_data import RecipeData, check_origin, open_datasets, open_processors
from nemo_rl.compat.script_environments import BuiltIn, name_environments, open_environments
from nemo_rl.compat.translation import PASS_THROUGH
from nemo_rl.config import loading
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.overrides import apply_override
from nemo_rl.config.recipe_files import (
    ENVIRONMENT,
    find_environment_values,
    register_resolvers,
    resolve_interpolations,
    unresolve,
)
from nemo_rl.distributed.machine import write_private
from nemo_rl.errors import ConfigError
from nemo_rl.launch.recipe_commands import GRPO_JOB
from nemo_rl.recipes import find_packaged, find_recipe

logger = logging.getLogger(__name__)

RECIPE_FILE = "run_script.yaml"  # in logger.log_dir
# What `setup` returns, up to release 0.6 and since.
OLD_RESULTS = (
    "policy", "policy_generation", "cluster", "dataloader", "val_dataloader", "loss_fn", "logger", "checkpointer",
    "grpo_state", "master_config",
)  # fmt: skip
RESULTS = (*OLD_RESULTS[:2], "nemo_gym", *OLD_RESULTS[2:], "teacher_worker_groups", "alias_to_group_alias")


class Values(dict[str, Any]):
    """A section, whose keys are attributes too; one that is not set is an empty section, which is false."""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__({key: _as_values(value) for key, value in dict(*arguments, **values).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name, Values())

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class MasterConfig(Values):
    """NeMo-RL's configuration of a run (since 0.7); before, scripts have a dict."""


def _as_values(value: Any) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, Values):
        return Values(value)
    return [_as_values(item) for item in value] if isinstance(value, list) else value


def load_config(config_path: str | Path) -> DictConfig:
    """Return a recipe, by the path or name that the command line takes, merged over the files that `defaults:` names.

    If examples/configs/<name>, the default of NeMo-RL's own scripts, is missing, the packaged recipe of that name takes
    its place, with a warning. Raises ConfigError for any other missing file.
    """
    path = Path(config_path)
    is_default = path.parts[-3:-1] == ("examples", "configs") and not path.is_file()
    if is_default and (packaged := find_packaged(path.name)) is not None:
        logger.warning("%s is missing; using the packaged recipe %s", path, packaged.stem)
        path = packaged
    return _conceal_environment(loading.read_raw(GRPORunConfig, find_recipe(path), ()))


def parse_hydra_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a configuration with overrides in Hydra's grammar."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    for text in overrides:
        apply_override(raw, text)
    return _conceal_environment(raw)


def _conceal_environment(raw: dict[str, Any]) -> DictConfig:
    """Return a recipe whose values from the environment are known, since scripts resolve it: `unresolve` names them."""
    try:
        resolved = resolve_interpolations(raw) if ENVIRONMENT in str(raw) else raw
    except ConfigError:  # a script or an override sets a value later
        resolved = raw
    find_environment_values(raw, resolved)
    return DictConfig(raw)


def register_omegaconf_resolvers() -> None:
    """Make `mul` and the other resolvers of recipes known to OmegaConf."""
    register_resolvers()


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Return the directory itself: a run makes exp_<number> in it."""
    return base_log_dir


def log_container_init_timing() -> None:
    """Do nothing: the start of a container is not this process's."""


class Timer:
    """Seconds by label, summed."""

    def __init__(self, context: Mapping[str, str] | None = None) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.record(label, time.perf_counter() - start)

    def record(self, label: str, elapsed: float) -> None:
        self._seconds[label] = self._seconds.get(label, 0.0) + elapsed

    def get_timing_metrics(self, reduction_op: str = "sum") -> dict[str, float]:
        """Return the sums; no other reduction is kept."""
        return dict(self._seconds)


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_tokenizer(tokenizer_config: Mapping[str, Any], get_processor: bool = False) -> Any:
    """Return the tokenizer that the section names; without `chat_template` it has its own, with null none.

    `chat_template` is a Jinja text or a file; `chat_template_kwargs` are variables of every rendering.
    """
    from transformers import AutoTokenizer

    from nemo_rl.data.tokenizer import read_template

    if get_processor:
        raise ConfigError("policy.tokenizer", tokenizer_config.get("name"), "only text is trained on")
    variables = tokenizer_config.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise ConfigError("policy.tokenizer.chat_template_kwargs", variables, "must be a mapping of variables")
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_config["name"])
    template = tokenizer_config.get("chat_template", "default")
    if template is None:
        tokenizer.chat_template = PASS_THROUGH
    elif template != "default":
        tokenizer.chat_template = read_template(template, "policy.tokenizer.chat_template")
    if variables:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **variables)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def configure_generation_config(config: Any, tokenizer: Any, **options: Any) -> Any:
    """Return the section as it is: stop tokens are found when the run starts."""
    return config


class HandedOver:
    """Stands in a run script for what the run makes itself, and carries what the script made."""

    def __init__(self, name: str, content: Any = None) -> None:
        self.name, self.content = name, content

    def shutdown(self) -> None:
        """Do nothing: a run closes what it opened."""

    def __enter__(self) -> "HandedOver":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        problem = f"the run makes its {self.__dict__['name']} itself; it has no {name!r} in a run script"
        raise AttributeError(f"{problem} (docs/from_nemo_rl.md)", name=name)


def setup(master_config: Any, tokenizer: Any, dataset: Any, val_dataset: Any = None, **options: Any) -> tuple[Any, ...]:
    """Return the values of NeMo-RL's `setup`, in its order; nothing is set up yet."""
    content = {"dataloader": dataset, "val_dataloader": val_dataset}
    names = RESULTS if isinstance(master_config, MasterConfig) else OLD_RESULTS
    return tuple(master_config if name == "master_config" else HandedOver(name, content.get(name)) for name in names)


def grpo_train(
    policy: HandedOver,
    policy_generation: HandedOver,
    dataloader: HandedOver,
    val_dataloader: HandedOver | None,
    tokenizer: Any,
    loss_fn: HandedOver,
    task_to_env: Mapping[str, Any] | None,
    val_task_to_env: Mapping[str, Any] | None,
    logger: HandedOver,
    checkpointer: HandedOver,
    grpo_save_state: Any,
    master_config: Mapping[str, Any],
    **options: Any,
) -> None:
    """Train as `nemo-rl grpo` does; exits with its code if it does not end well."""
    recipe = _plain(master_config)
    with ExitStack() as stack:
        name_environments(recipe)
        stack.enter_context(open_processors(recipe, tokenizer))
        train, held_out = dataloader.content, None if val_dataloader is None else val_dataloader.content
        environments = [one for one in (task_to_env, val_task_to_env) if one is not None]  # a defaultdict is empty
        check_origin(train, held_out)
        if isinstance(train, RecipeData):
            _refuse_environments(recipe, *environments)
        else:
            tasks = stack.enter_context(open_datasets(recipe, tokenizer, train, held_out))
            stack.enter_context(open_environments(recipe, tasks, *environments))
        path = Path(recipe["logger"]["log_dir"]) / RECIPE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, yaml.safe_dump(unresolve(recipe, {}, escaped=True), sort_keys=False))
        code = run_command(GRPO_JOB.command("", path), ["--config", str(path)])
    if code != ExitCode.DONE:
        sys.exit(code)


def _refuse_environments(recipe: Mapping[str, Any], *by_task: Mapping[str, Any]) -> None:
    """Raise ConfigError for an environment of the script beside the recipe's datasets, which name entries of `env`.

    One that the script made from an entry of `env` is the recipe's; one of `setup` is made by the run.
    """
    sections = (recipe.get("env") or {}).items()
    known = [{"type": name, **section} for name, section in sections if isinstance(section, Mapping)]
    for task, environment in (item for environments in by_task for item in _list_environments(environments)):
        if isinstance(environment, BuiltIn) and {**environment.section, "type": environment.type} in known:
            continue
        if isinstance(environment, HandedOver):
            continue
        problem = (
            f"data of setup_response_data has the recipe's environments, so this {type(environment).__name__} is never "
            "used; write env.<name>.type: <dotted path of its class> and data.default.env_name: <name>"
        )
        raise ConfigError("task_to_env", task, problem)


def _list_environments(by_task: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from by_task.items()
    if isinstance(by_task, defaultdict) and by_task.default_factory is not None:
        yield "any task", by_task.default_factory()


def _plain(value: Any) -> Any:
    """Return a configuration as plain mappings and lists."""
    if OmegaConf.is_config(value):
        raw, value = (OmegaConf.to_container(value, resolve=is_resolved) for is_resolved in (False, True))
        find_environment_values(raw, value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


async_grpo_train = grpo_train


def shutdown_environments(*tasks_to_env: Any) -> None:
    """Do nothing: a run closes its environments."""
