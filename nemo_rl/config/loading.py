"""Loading: from a recipe and the command line to a checked configuration.

`defaults:` files are merged below the recipe, overrides above it; then interpolations are resolved, NeMo-RL's keys
translated or removed, and the rest validated by the schema and by the cross-section checks.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nemo_rl.config.checks import check
from nemo_rl.config.collect import CollectRunConfig, check_sampled, quote_seeds
from nemo_rl.config.compatibility import (
    SFT_RULES,
    apply_moved_keys,
    normalize_dataset_names,
    normalize_metric_name,
    remove_unsupported_keys,
    translate_loss_switches,
)
from nemo_rl.config.evaluation import EvalRunConfig, check_evaluation, rename_legacy_keys
from nemo_rl.config.keys import Path as KeyPath
from nemo_rl.config.keys import (
    dotted,
    kind_of_field,
    make_interpolation_error,
    make_schema_error,
    reject_booleans,
    sections_in,
)
from nemo_rl.config.kinds import Kind
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig
from nemo_rl.config.overrides import apply_override, merge_layers
from nemo_rl.config.reward_model import RewardModelRunConfig, check_reward_model
from nemo_rl.config.section import Section
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.config.sft_checks import check_sft
from nemo_rl.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Section)


def load_config(path: Path, overrides: Sequence[str] = ()) -> GRPORunConfig:
    """Load the configuration of `examples/run_grpo.py` from a recipe with overrides in Hydra's grammar; raises
    ConfigError.

    Example: `load_config(Path("examples/configs/quickstart.yaml"), ["grpo.max_num_steps=2"])`
    """
    config = read_config(GRPORunConfig, path, overrides, prepare=translate_nemo_rl_keys)
    check(config)
    return config


def load_distillation_config(path: Path, overrides: Sequence[str] = ()) -> DistillationRunConfig:
    """Load the configuration of `examples/run_distillation.py`."""
    config = read_config(DistillationRunConfig, path, overrides, prepare=translate_nemo_rl_keys)
    check(config)
    return config


def load_sft_config(path: Path, overrides: Sequence[str] = ()) -> SFTRunConfig:
    """Load the configuration of `examples/run_sft.py`."""
    config = read_config(SFTRunConfig, path, overrides, prepare=translate_sft_keys)
    check_sft(config)
    return config


def load_reward_model_config(path: Path, overrides: Sequence[str] = ()) -> RewardModelRunConfig:
    """Load the configuration of `examples/run_rm.py`."""
    config = read_config(RewardModelRunConfig, path, overrides)
    check_reward_model(config)
    return config


def load_collect_config(path: Path, overrides: Sequence[str] = ()) -> CollectRunConfig:
    """Load the configuration of `nemo-rl collect`."""
    config = read_config(CollectRunConfig, path, quote_seeds(overrides), prepare=translate_nemo_rl_keys)
    check_sampled(config)
    return config


def load_eval_config(path: Path, overrides: Sequence[str] = ()) -> EvalRunConfig:
    """Load the configuration of `examples/run_eval.py`."""

    def prepare(resolved: dict[str, Any]) -> None:
        translate_nemo_rl_keys(resolved)
        rename_legacy_keys(resolved)

    config = read_config(EvalRunConfig, path, overrides, prepare=prepare)
    check_evaluation(config)
    return config


def resolved_yaml(config: Section) -> str:
    """Return every key with its value, as YAML that `load_config` reads to an equal configuration.

    The algorithm's own sections come first. Datasets show only the keys that are set; the others come from
    `data.default` or from the dataset's preset.
    """
    values = config.model_dump()
    if isinstance(config, RolloutRunConfig | SFTRunConfig):
        set_values = config.data.model_dump(exclude_unset=True)
        names = (*config.data.dataset_fields, "default")
        values["data"] |= {name: set_values[name] for name in names if name in set_values}
    declared = (name for cls in type(config).__mro__ for name in vars(cls).get("__annotations__", {}))
    own_first = {name: values[name] for name in dict.fromkeys(declared) if name in values}
    return OmegaConf.to_yaml(OmegaConf.create(_escape_interpolations(own_first)))


def read_config(
    schema: type[ConfigT],
    path: Path,
    overrides: Sequence[str],
    *,
    prepare: Callable[[dict[str, Any]], None] = lambda resolved: None,
) -> ConfigT:
    """Read a recipe with overrides, resolve interpolations, let `prepare` change it in place, and validate it."""
    raw = merge_layers(None, _read_recipe(Path(path), ()))
    for text in overrides:
        apply_override(raw, text, schema)
    resolved = _resolve(raw)
    prepare(resolved)
    return _validate(schema, resolved)


def translate_nemo_rl_keys(resolved: dict[str, Any]) -> None:
    """Translate NeMo-RL's keys and names, in place."""
    remove_unsupported_keys(resolved)
    translate_loss_switches(resolved)
    normalize_dataset_names(resolved)


def translate_sft_keys(resolved: dict[str, Any]) -> None:
    """Translate NeMo-RL's keys of supervised training, in place: some have other names or no meaning there."""
    remove_unsupported_keys(resolved, SFT_RULES)
    normalize_dataset_names(resolved)
    normalize_metric_name(resolved)


def _read_recipe(path: Path, include_chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file merged over the files that its `defaults:` names."""
    path = path.resolve()
    if path in include_chain:
        cycle = " -> ".join(p.name for p in (*include_chain[include_chain.index(path) :], path))
        raise ConfigError("defaults", path.name, f"recipes include each other: {cycle}")
    layer = _read_layer(path, include_chain[-1] if include_chain else None)
    names = layer.pop("defaults", None) or []
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError("defaults", names, f"must be a file name or a list of file names (in {path})")
    base: dict[str, Any] = {}
    for name in names:
        base = merge_layers(base, _read_recipe(path.parent / name, (*include_chain, path)))
    apply_moved_keys(layer)
    return merge_layers(base, layer)


def _read_layer(path: Path, include_chain: Path | None) -> dict[str, Any]:
    key = f"defaults of {include_chain}" if include_chain else "config"
    if not path.is_file():
        raise ConfigError(key, str(path), "no such file")
    try:
        layer = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(key, where, f"malformed YAML: {error.problem or error.context}") from error
    except OmegaConfBaseException as error:
        raise make_interpolation_error(error, None, source=str(path)) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(key, str(path), f"cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(layer, dict):
        raise ConfigError(key, str(path), "a recipe must be a mapping of sections")
    return layer  # pyright: ignore[reportReturnType]


def _resolve(raw: dict[str, Any]) -> dict[str, Any]:
    _register_resolvers()
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)  # pyright: ignore
    except OmegaConfBaseException as error:
        raise make_interpolation_error(error, raw) from error


def _validate(schema: type[ConfigT], resolved: dict[str, Any]) -> ConfigT:
    """Return `resolved` as the schema; sections of kinds come first, so that an error keeps its full key."""
    data = _read_kinds(schema, resolved, (), resolved, schema)
    try:
        config = schema.model_validate(data)
    except ValidationError as error:
        raise make_schema_error(error, resolved, schema=schema) from error
    reject_booleans(resolved, config.model_dump())
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
                if isinstance(value, dict):
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
    name = kind.name_of(data, str(path[-1])) or ""
    section = kind.section(name, key=f"{dotted(path)}.{kind.name_key}")
    read = _read_kinds(section, data, path, resolved, root)
    try:
        return section.model_validate({**read, kind.name_key: name})
    except ValidationError as error:
        raise make_schema_error(error, resolved, path, root) from error


def _register_resolvers() -> None:
    """Register `${mul:${a},${b}}` and the like, as NeMo-RL's recipes use them; once per process."""
    resolvers = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": _divide, "max": lambda a, b: max(a, b)}
    for name, resolver in resolvers.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)


def _divide(a: float, b: float) -> float:
    """Divide, to an integer where it comes out even, since most keys are counts."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


def _escape_interpolations(value: Any) -> Any:
    """Escape strings so that a second load does not read them as interpolations."""
    if isinstance(value, dict):
        return {key: _escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
