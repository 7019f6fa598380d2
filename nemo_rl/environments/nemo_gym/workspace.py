"""The folder that a stack of ours runs in: Gym's configuration as one file, and one environment for all its servers."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.config.nemo_gym import SERVER_KINDS
from nemo_rl.environments.nemo_gym.python_env import GymPython
from nemo_rl.errors import ConfigError

CONFIG_FILE = "env.yaml"  # Gym reads it from where it is started; it wins over config_paths
POLICY_MODEL = "policy_model"  # the name under which Gym's agents look for the model
POLICY_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def find_configs(paths: Sequence[str], site_packages: Path, *, key: str) -> dict[str, DictConfig]:
    """Gym's YAML files by path: those of the user's directory absolute, Gym's own as they are written.

    Files may name further ones in their own `config_paths`. Where none has a model for the policy, Gym's model for
    training is added. Raises ConfigError naming a path that is not found or no mapping.
    """
    found: dict[str, DictConfig] = {}
    waiting = list(paths)
    while waiting:
        path = waiting.pop(0)
        own, installed = Path.cwd() / path, site_packages / path
        name, file = (str(own), own) if own.is_file() else (path, installed)
        if name in found:
            continue
        if not file.is_file():
            raise ConfigError(key, path, f"no such file, neither in {Path.cwd()} nor in NeMo Gym ({site_packages})")
        found[name] = _load(file, path, key)
        waiting += found[name].get("config_paths") or []
        if not waiting and POLICY_MODEL not in OmegaConf.merge(*found.values()):
            waiting.append(POLICY_MODEL_CONFIG)
    return found


def requirements_of(configs: Iterable[Mapping[Any, Any]], site_packages: Path) -> list[str]:
    """What the configured servers need beside Gym itself, as lines of a requirements file."""
    lines: set[str] = set()
    for config in configs:
        for entry in config.values():
            for kind in SERVER_KINDS:
                implementations = entry.get(kind) if isinstance(entry, Mapping) else None
                for name in implementations if isinstance(implementations, Mapping) else ():
                    lines.update(_requirements(_server_folder(kind, str(name), site_packages)))
    return sorted(lines)


def write_workspace(folder: Path, python: GymPython, settings: Mapping[str, Any]) -> None:
    """Lay out the folder: the configuration, the user's own servers, an environment for each server of Gym.

    `settings` win over the user's own env.yaml in the current directory. It holds keys: nobody else may read it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = Path.cwd() / CONFIG_FILE
    environments = folder / "environments"
    shared: dict[str, Any] = {"skip_venv_if_present": True, "uv_venv_dir": str(environments)}
    configs = [OmegaConf.load(own)] if own.is_file() else []
    merged = OmegaConf.merge(*configs, shared, dict(settings))
    file = folder / CONFIG_FILE
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(OmegaConf.to_yaml(merged))
    for kind in SERVER_KINDS:
        _link(folder / kind, Path.cwd() / kind)
        for server in _servers(kind, python.site_packages):
            _link(environments / kind / server / ".venv", python.prefix)


def _servers(kind: str, site_packages: Path) -> list[str]:
    roots = (Path.cwd() / kind, site_packages / kind)
    return sorted({path.name for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()})


def _link(link: Path, target: Path) -> None:
    if target.is_dir() and not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target, target_is_directory=True)


def _load(file: Path, path: str, key: str) -> DictConfig:
    try:
        config = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(key, path, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(key, path, "must hold a mapping")
    return config


def _server_folder(kind: str, name: str, site_packages: Path) -> Path:
    """A server's own files: the user's, else Gym's; the same choice as Gym's."""
    own = Path.cwd() / kind / name
    has_own = (own / "requirements.txt").is_file() or (own / "pyproject.toml").is_file()
    return own if has_own else site_packages / kind / name


def _requirements(folder: Path) -> list[str]:
    """Without comments and without Gym itself, which a checkout names by its relative path."""
    if (folder / "pyproject.toml").is_file():
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
        lines = list(project.get("dependencies", ()))
    elif (folder / "requirements.txt").is_file():
        lines = (folder / "requirements.txt").read_text().splitlines()
    else:
        return []
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in stripped if line and "../.." not in line and not re.match(r"nemo[-_]gym\b", line)]
