"""The directory of a started stack: Gym's configuration as one file, and one Python environment for all its servers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.configuration import CONFIG_FILE, SERVER_KINDS
from nemo_rl.environments.nemo_gym.interpreter import GymPython


def write_workspace(directory: Path, python: GymPython, settings: Mapping[str, Any]) -> None:
    """Create the directory: the configuration, the user's own servers, and an environment for each server of Gym.

    `directory` is absolute, since Gym's servers resolve paths in directories of their own. `settings` take precedence
    over the user's env.yaml in the current directory. The file holds API keys, so only its owner may read it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own = Path.cwd() / CONFIG_FILE
    environments = directory / "environments"
    shared: dict[str, Any] = {"skip_venv_if_present": True, "uv_venv_dir": str(environments)}
    configs = [OmegaConf.load(own)] if own.is_file() else []
    merged = OmegaConf.merge(*configs, shared, dict(settings))
    file = directory / CONFIG_FILE
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(OmegaConf.to_yaml(merged))
    for kind in SERVER_KINDS:
        _symlink_directory(directory / kind, Path.cwd() / kind)
        for server in _list_servers(kind, python.site_packages):
            _symlink_directory(environments / kind / server / ".venv", python.prefix)


def _list_servers(kind: str, site_packages: Path) -> list[str]:
    roots = (Path.cwd() / kind, site_packages / kind)
    return sorted({path.name for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()})


def _symlink_directory(link: Path, target: Path) -> None:
    if target.is_dir():
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():  # left by an earlier start, maybe of another Python
            link.unlink()
        link.symlink_to(target, target_is_directory=True)
