"""Loading: from a recipe and the command line to a checked configuration.

`defaults:` files are merged below the recipe, overrides above it; then interpolations are resolved, other programs'
recipes translated, and the rest validated by the schema and by the cross-section checks.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import ValidationError

from nemo_rl.config.checks import check, check_reward_model, check_supervised
from nemo_rl.config.collect import CollectRunConfig, EvalRunConfig, check_evaluation, check_sampled, quote_seeds
from nemo_rl.config.keys import (
    ERROR_MESSAGES,
    UNKNOWN_KEY,
    dotted,
    kind_of_field,
    make_schema_error,
    name_source,
    reject_booleans,
    reject_unusable_values,
    sections_in,
)
from nemo_rl.config.keys import Path as KeyPath
from nemo_rl.config.kinds import Kind, Section
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig
from nemo_rl.config.overrides import apply_override, merge_layers
from nemo_rl.config.recipe_files import (
    COMMANDS,
    Family,
    at,
    find_environment_values,
    find_family,
    names_below,
    read_layer,
    resolve_interpolations,
    unresolve,
)
from nemo_rl.config.supervised_runs import DPORunConfig, RewardModelRunConfig, SFTRunConfig, SupervisedRunConfig
from nemo_rl.config.translators import recipe_translators
from nemo_rl.errors import ConfigError, flatten_config_errors, raise_config_errors
from nemo_rl.ray_environment import set_ray_variables

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 500  # schema problems reported per recipe

ConfigT = TypeVar("ConfigT", bound=Section)


@contextmanager
def _without_pydantic_plugins() -> Iterator[None]:
    """Keep pydantic from searching all installed distributions for plugins, which takes longer than a validation."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _loader(schema: type[ConfigT], family: Family, check_config: Callable[[ConfigT], None]) -> Callable[..., ConfigT]:
    """Return the function that loads the configuration of a command."""

    def load(path: Path, overrides: Sequence[str] = (), *, allow_unsupported: bool = False) -> ConfigT:
        """Load a configuration from a recipe with overrides in Hydra's grammar.

        Raises ConfigError for all problems at once. With `allow_unsupported`, keys of NeMo-RL's recipes that only
        concern layout, scale or speed are removed if they are not supported. Notes are logged.

        Example: `load_config(find_recipe("quickstart"), ["grpo.max_num_steps=2"])`
        """
        return read_config(
            schema, path, overrides, family=family, check_config=check_config, allow_unsupported=allow_unsupported
        )

    return load


load_config = _loader(GRPORunConfig, "grpo", check)
load_distillation_config = _loader(DistillationRunConfig, "distillation", check)
load_sft_config = _loader(SFTRunConfig, "sft", check_supervised)
load_dpo_config = _loader(DPORunConfig, "dpo", check_supervised)
load_reward_model_config = _loader(RewardModelRunConfig, "rm", check_reward_model)
load_eval_config = _loader(EvalRunConfig, "eval", check_evaluation)
load_collect_config = _loader(CollectRunConfig, "collect", check_sampled)
LOADERS: Mapping[str, Callable[..., Any]] = {  # by the verb of `nemo-rl`
    "grpo": load_config,
    "distill": load_distillation_config,
    "sft": load_sft_config,
    "dpo": load_dpo_config,
    "rm": load_reward_model_config,
    "eval": load_eval_config,
    "collect": load_collect_config,
}


def resolved_yaml(config: Section) -> str:
    from omegaconf import OmegaConf  # here: a configuration that is refused needs none

    return OmegaConf.to_yaml(OmegaConf.create(resolved_values(config)))


def resolved_values(config: Section) -> dict[str, Any]:
    """Return every key with its value, as a recipe that `load_config` reads to an equal configuration.

    Values that depend on the environment are the recipe's text, `${oc.env:NAME}`, which a second load resolves again.
    The algorithm's own sections come first. Datasets show only the keys that are set; the others come from
    `data.default` or from the dataset's preset.
    """
    values = config.model_dump()
    if isinstance(config, RolloutRunConfig | SupervisedRunConfig | RewardModelRunConfig):
        set_values = config.data.model_dump(exclude_unset=True)
        names = (*config.data.dataset_fields, "default")
        values["data"] |= {name: set_values[name] for name in names if name in set_values}
    declared = (name for cls in type(config).__mro__ for name in vars(cls).get("__annotations__", {}))
    own_first = {name: values[name] for name in dict.fromkeys(declared) if name in values}
    return unresolve(own_first, config.environment_texts, escaped=True)


def shown_values(config: Section) -> dict[str, Any]:
    """Return every key with its value for loggers, as JSON: what depends on the environment is the recipe's text."""
    return unresolve(config.model_dump(mode="json"), config.environment_texts)


@_without_pydantic_plugins()
def read_config(
    schema: type[ConfigT],
    path: Path,
    overrides: Sequence[str],
    *,
    family: Family,
    prepare: Callable[[dict[str, Any]], None] = lambda resolved: None,
    check_config: Callable[[ConfigT], None] = lambda config: None,
    allow_unsupported: bool = False,
) -> ConfigT:
    """Read a recipe with overrides, translate it, let `prepare` change it in place, validate and check it.

    Raises ConfigError that lists every obstacle.
    """
    set_ray_variables()  # before the recipe's dotted paths are imported, which may import Ray
    raw = read_raw(schema, path, quote_seeds(overrides))
    resolved = resolve_interpolations(raw, Path(path))
    texts = find_environment_values(raw, resolved)
    _check_family(resolved, family, schema)
    translations = [
        translator.translate_resolved(resolved, family, allow_unsupported=allow_unsupported)
        for translator in recipe_translators()
    ]
    prepare(resolved)
    config, found = _validate_all(schema, resolved)
    problems = [*(problem for translation in translations for problem in translation.problems), *found]
    if config is not None:
        try:
            check_config(config)
        except ConfigError as error:
            problems.append(error)
    raise_config_errors(_name_text(name_source(one, raw), texts) for one in flatten_config_errors(problems))
    assert config is not None
    config.set_environment_texts(texts)
    for line in (line for translation in translations for line in translation.lines()):
        logger.warning("%s", line)
    return config


@_without_pydantic_plugins()
def read_overrides(schema: type[ConfigT], overrides: Sequence[str]) -> ConfigT:
    """Return a configuration of overrides alone; raises ConfigError that lists every obstacle."""
    raw: dict[str, Any] = {}
    for text in overrides:
        apply_override(raw, text, schema)
    resolved = resolve_interpolations(raw)
    texts = find_environment_values(raw, resolved)
    config, problems = _validate_all(schema, resolved)
    raise_config_errors(_name_text(problem, texts) for problem in problems)
    assert config is not None
    config.set_environment_texts(texts)
    return config


def read_raw(schema: type[Section], path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a recipe merged over the files below it and with its overrides, before interpolations are resolved."""
    raw = merge_layers(None, _read_recipe(Path(path), ()))
    for text in overrides:
        apply_override(raw, text, schema)
    return raw


def _name_text(error: ConfigError, texts: Mapping[tuple[str, ...], str]) -> ConfigError:
    """Return the error with the recipe's text in place of a value that depends on the environment."""
    value = unresolve(error.value, texts, tuple(error.key.split(".")))
    return ConfigError(error.key, value, error.problem, known=error.known)


def _check_family(resolved: dict[str, Any], family: Family, schema: type[Section]) -> None:
    """Raise ConfigError for a recipe of another command."""
    found = find_family(resolved)
    if found is not None and family not in resolved and found not in schema.model_fields:
        problem = f"unknown key of `nemo-rl {COMMANDS[family]}`: it belongs to recipes of `nemo-rl {COMMANDS[found]}`"
        raise ConfigError(found, resolved[found], problem)


def _validate_all(schema: type[ConfigT], resolved: dict[str, Any]) -> tuple[ConfigT | None, list[ConfigError]]:
    """Return the configuration with all problems of the schema; None if other values than unknown keys are wrong.

    A wrong value is removed and the rest validated again, so that each problem is found once.
    """
    problems: list[ConfigError] = []
    data, only_unknown = copy.deepcopy(resolved), True
    for _ in range(MAX_PROBLEMS):
        try:
            config = _validate(schema, data)
        except ConfigError as error:
            removed = [problem.key for problem in problems]
            is_missing = error.problem == ERROR_MESSAGES["missing"]
            if error.key not in removed:  # else it follows from what was removed
                problems.append(error)
            if is_missing or not _remove(data, error.key):
                return None, problems
            only_unknown = only_unknown and error.problem.startswith(UNKNOWN_KEY)
        else:
            return config if only_unknown else None, problems
    return None, problems


def _remove(data: Any, key: str) -> bool:
    """Remove the value at a dotted key, in place, or the list that it is in; return whether there was one."""
    *parent, name = key.split(".")
    holder = at(data, parent)
    if isinstance(holder, list):
        return _remove(data, ".".join(parent))
    if isinstance(holder, dict) and name in holder:
        del holder[name]
        return True
    return False


def _read_recipe(path: Path, include_chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file merged over the files that its `defaults:` names."""
    path = path.resolve()
    if path in include_chain:
        cycle = " -> ".join(p.name for p in (*include_chain[include_chain.index(path) :], path))
        raise ConfigError("defaults", path.name, f"recipes include each other: {cycle}")
    layer = read_layer(path, include_chain[-1] if include_chain else None)
    base: dict[str, Any] = {}
    for below in names_below(path, layer):
        base = merge_layers(base, _read_recipe(below, (*include_chain, path)))
    layer.pop("defaults", None)
    for translator in recipe_translators():
        translator.copy_moved_keys(layer)
    return merge_layers(base, layer)


def _validate(schema: type[ConfigT], resolved: dict[str, Any]) -> ConfigT:
    """Return `resolved` as the schema; sections of kinds come first, so that an error keeps its full key."""
    data = _read_kinds(schema, resolved, (), resolved, schema)
    try:
        config = schema.model_validate(data)
    except ValidationError as error:
        raise make_schema_error(error, resolved, schema=schema) from error
    values = config.model_dump()
    reject_booleans(resolved, values)
    reject_unusable_values(values)
    return config


def _read_kinds(
    section: type[Section], data: dict[str, Any], path: KeyPath, resolved: dict[str, Any], root: type[Section]
) -> dict[str, Any]:
    """Return the section's data with every value of a kind, at any depth, as the section of its entry."""
    read = dict(data)
    for name, info in section.model_fields.items():
        value, here = data.get(name), (*path, name)
        if (kind := kind_of_field(info)) is None:
            for inner in sections_in(info.annotation):
                if isinstance(value, dict) and get_origin(info.annotation) is dict:
                    read[name] = {
                        key: _read_kinds(inner, item, (*here, key), resolved, root) if isinstance(item, dict) else item
                        for key, item in value.items()
                    }
                elif isinstance(value, dict):
                    read[name] = _read_kinds(inner, value, here, resolved, root)
                elif isinstance(value, list):
                    read[name] = [
                        _read_kinds(inner, item, (*here, index), resolved, root) if isinstance(item, dict) else item
                        for index, item in enumerate(value)
                    ]
        elif get_origin(info.annotation) is dict and isinstance(value, dict):
            read[name] = {key: _read_entry(kind, item, (*here, key), resolved, root) for key, item in value.items()}
        elif isinstance(value, dict):
            read[name] = _read_entry(kind, value, here, resolved, root)
    return read


def _read_entry(kind: Kind, data: Any, path: KeyPath, resolved: dict[str, Any], root: type[Section]) -> Any:
    """Return `data`, null for all defaults, as the section of the entry of `kind` that it names."""
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(dotted(path), data, "must be a mapping")
    kind.refuse_name(data, key=dotted(path))
    name = kind.name_of(data, str(path[-1])) or ""
    section = kind.section(name, key=f"{dotted(path)}.{kind.name_key}")
    read = _read_kinds(section, data, path, resolved, root)
    try:
        return section.model_validate({**read, kind.name_key: name})
    except ValidationError as error:
        raise make_schema_error(error, resolved, path, root) from error
