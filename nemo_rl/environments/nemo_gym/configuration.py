"""Gym's configuration of a started stack: its YAML files, what they leave unset, their servers' requirements."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.environments.nemo_gym.interpreter import find_gym_python
from nemo_rl.errors import ConfigError

AGENT_SERVERS = "responses_api_agents"
MODEL_SERVERS = "responses_api_models"
ENVIRONMENT_SERVERS = "environment_servers"  # since Gym 0.7
SERVER_KINDS = (AGENT_SERVERS, MODEL_SERVERS, "resources_servers", ENVIRONMENT_SERVERS)
CONFIG_FILE = "env.yaml"  # Gym reads it from its working directory; it takes precedence over config_paths
POLICY_MODEL = "policy_model"  # the name under which Gym's agents look for the model
POLICY_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
TOKENS_KEY = "return_token_id_information"  # a model server's: whether its items carry the tokens of their call
REWRITES = re.compile(r"_inherit_from|_copy\b|_delete_key|\$\{(?:inherit_from|copy):")
REWRITE_SOURCES = re.compile(r'(?:"_inherit_from": "|"_copy": "|\$\{inherit_from:|\$\{copy:)(\w+)')


@dataclass(frozen=True, slots=True)
class GymConfiguration:
    """The configuration of a stack, checked; `read_configuration` makes it."""

    paths: tuple[str, ...]  # its files: the user's as absolute paths, Gym's own as written
    merged: Mapping[str, Any]  # the files, the user's env.yaml and the overrides; interpolations as written
    settings: Mapping[str, Any]  # keys that the policy's model needs


def read_configuration(
    config_paths: Sequence[str], overrides: Mapping[str, Any], site_packages: Path, *, key: str
) -> GymConfiguration:
    """Read the files of a stack and check them, as far as that can be done without Gym.

    Raises ConfigError with keys below `key`, of the entry: for a file that is not found, a required value that is not
    set, or a model server of the policy that returns no tokens.
    """
    files = find_configs(config_paths, site_packages, key=f"{key}.config_paths")
    own = Path.cwd() / CONFIG_FILE
    configs = [*files.values(), *([_load_config(own, CONFIG_FILE, key)] if own.is_file() else [])]
    merged = _as_mapping(OmegaConf.merge(*configs, OmegaConf.create(dict(overrides))))
    for name in find_missing_values(merged):
        remedy = f"{key}.overrides.{name}"
        problem = f"required by config_paths and not set; set it, e.g. ++{remedy}=..."
        raise ConfigError(remedy, "???", problem + _list_candidates(merged, name))
    return GymConfiguration(tuple(files), merged, token_settings(merged, overrides, site_packages, key=key))


def check_configuration(
    key: str, config_paths: Sequence[str], overrides: Mapping[str, Any], python: str | None, version: str | None
) -> None:
    """Check a stack's files if NeMo Gym is installed; otherwise they are checked when it has been."""
    installed = find_gym_python(python, version)
    if installed is not None:
        read_configuration(config_paths, overrides, installed.site_packages, key=key)


def find_configs(paths: Sequence[str], site_packages: Path, *, key: str) -> dict[str, DictConfig]:
    """Return Gym's YAML files by path: the user's as absolute paths, Gym's own as written.

    Files may name further ones in their own `config_paths`. If none configures a model for the policy, Gym's model for
    training is added. Raises ConfigError for a path that is not found or not a mapping.
    """
    found: dict[str, DictConfig] = {}
    pending = list(paths)
    while pending:
        path = pending.pop(0)
        own, installed = Path.cwd() / path, site_packages / path
        name, file = (str(own), own) if own.is_file() else (path, installed)
        if name in found:
            continue
        if not file.is_file():
            raise ConfigError(key, path, f"no such file, neither in {Path.cwd()} nor in NeMo Gym ({site_packages})")
        found[name] = _load_config(file, path, key)
        pending += found[name].get("config_paths") or []
        if not pending and POLICY_MODEL not in OmegaConf.merge(*found.values()):
            pending.append(POLICY_MODEL_CONFIG)
    return found


def find_missing_values(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of required values (`???`) that nothing sets.

    Entries that inherit, copy or delete keys, and those that they name, are left to Gym, which rewrites them first. So
    is an agent without a resources server, which Gym may put in the place of others.
    """
    texts = {name: json.dumps(entry, default=str) for name, entry in config.items()}
    rewritten = {name for name, text in texts.items() if REWRITES.search(text)}
    rewritten.update(source for text in texts.values() for source in REWRITE_SOURCES.findall(text))
    found = (path for name, entry in config.items() if name not in rewritten for path in _walk_missing(entry, name))
    return [path for path in found if not (f".{AGENT_SERVERS}." in path and path.endswith(".resources_server.name"))]


def token_settings(
    merged: Mapping[str, Any], overrides: Mapping[str, Any], site_packages: Path, *, key: str
) -> dict[str, Any]:
    """Return settings with which the policy's model server returns the tokens of each call.

    Raises ConfigError for overrides that forbid it, or a model server of Gym that cannot.
    """
    name, model = next(iter(_entry(merged, POLICY_MODEL, MODEL_SERVERS).items()), ("", None))
    if isinstance(model, Mapping) and TOKENS_KEY in model:
        if _entry(overrides, POLICY_MODEL, MODEL_SERVERS, name).get(TOKENS_KEY) is False:
            path = f"{key}.overrides.{POLICY_MODEL}.{MODEL_SERVERS}.{name}.{TOKENS_KEY}"
            raise ConfigError(path, False, "must be true: rollouts are trained on their tokens")
        return {POLICY_MODEL: {MODEL_SERVERS: {name: {TOKENS_KEY: True}}}}
    if name and (site_packages / MODEL_SERVERS / name).is_dir():
        problem = f"{POLICY_MODEL} is a {name}, which returns no tokens; use {POLICY_MODEL_CONFIG}"
        raise ConfigError(f"{key}.config_paths", name, problem)
    return {}


def collect_requirements(config: Mapping[str, Any], site_packages: Path) -> list[str]:
    """Return the requirements of the configured servers, without Gym itself, as lines of a requirements file."""
    lines: set[str] = set()
    for entry in config:
        for kind in SERVER_KINDS:
            for name in _entry(config, entry, kind):
                lines.update(_read_requirements(_server_directory(kind, name, site_packages)))
    return sorted(lines)


def _walk_missing(value: Any, path: str) -> Iterator[str]:
    if value == "???":
        yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk_missing(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _walk_missing(inner, f"{path}.{i}")


def _list_candidates(merged: Mapping[str, Any], path: str) -> str:
    """Return the servers that the name in a reference `{type: <kind>, name: ???}` may be, for an error."""
    *parents, last = path.split(".")
    kind = _entry(merged, *parents).get("type") if last == "name" else None
    names = [name for name in merged if kind in _entry(merged, name)]
    return f" with one of: {', '.join(names)}" if names else ""


def _entry(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path of keys, empty if there is none."""
    for name in path:
        found = config.get(name)
        config = found if isinstance(found, Mapping) else {}
    return config


def _as_mapping(config: DictConfig | ListConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}


def _load_config(file: Path, path: str, key: str) -> DictConfig:
    try:
        config = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(key, path, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(key, path, "must hold a mapping")
    return config


def _server_directory(kind: str, name: str, site_packages: Path) -> Path:
    """Return the directory of a server's files: the user's, else Gym's, as Gym chooses."""
    own = Path.cwd() / kind / name
    has_own = (own / "requirements.txt").is_file() or (own / "pyproject.toml").is_file()
    return own if has_own else site_packages / kind / name


def _read_requirements(directory: Path) -> list[str]:
    """Return a server's requirements, without Gym itself, which a checkout names by its relative path."""
    if (directory / "pyproject.toml").is_file():
        project = tomllib.loads((directory / "pyproject.toml").read_text()).get("project", {})
        lines = list(project.get("dependencies", ()))
    elif (directory / "requirements.txt").is_file():
        lines = (directory / "requirements.txt").read_text().splitlines()
    else:
        return []
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in stripped if line and "../.." not in line and not re.match(r"nemo[-_]gym\b", line)]
