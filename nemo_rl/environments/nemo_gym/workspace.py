"""The folder that a stack of ours runs in: Gym's configuration as one file, and one environment for all its servers."""

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.distributed.machine import cache_directory
from nemo_rl.environments.nemo_gym.entry import SERVER_KINDS
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

GYM_VERSION = "0.4.0"
MIN_PYTHON = (3, 12)
EXCLUDE_NEWER = "2026-11-15T00:00:00Z"  # what is published later is not looked at: every machine gets the same
CREATE_TIMEOUT_S = 1800.0  # for another process to make the same environment, or for one command of ours
INSPECT_TIMEOUT_S = 60.0
INSPECT_SCRIPT = """
import importlib.metadata, json, sys, sysconfig
try:
    version = importlib.metadata.version("nemo-gym")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([list(sys.version_info[:2]), version, sys.prefix, sysconfig.get_paths()["purelib"]]))
"""


@dataclass(frozen=True, slots=True)
class GymPython:
    """An interpreter with nemo-gym."""

    python: Path
    version: tuple[int, int]
    prefix: Path  # of its environment
    site_packages: Path  # Gym's servers and their configurations lie here

    @property
    def is_virtual(self) -> bool:
        """Whether servers can be told to share it: Gym's command line wants to activate an environment."""
        return (self.prefix / "bin" / "activate").is_file()


def resolve_gym_python(
    path: str | None, requirements: Iterable[str] = (), *, key: str = "env.nemo_gym.python"
) -> GymPython:
    """The interpreter at `path`, taken as it is, or that of the cached environment with these further requirements.

    Blocks for as long as it takes to make an environment. Raises ConfigError naming `key` for one that cannot be had.
    """
    if path is not None:
        return _check_interpreter(path, key)
    lines = sorted(set(requirements))
    suffix = f"-{blake2b(chr(10).join(lines).encode(), digest_size=4).hexdigest()}" if lines else ""
    directory = cache_directory() / "nemo_gym" / f"{GYM_VERSION}{suffix}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(directory.name + ".lock"), key):
        found = _inspect(directory / "bin" / "python")
        if found is None:
            _create_environment(directory, lines, key)
            found = _inspect(directory / "bin" / "python")
    if found is None:
        raise ConfigError(key, None, f"the environment made in {directory} has no nemo-gym")
    return found


def find_uv() -> str | None:
    """uv on PATH, or beside this interpreter."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.is_file() else None)


def base_interpreters() -> Iterator[str]:
    """Pythons that Gym can run on, by what they answer: on PATH, then pyenv's; the oldest first."""
    names = [f"python3.{minor}" for minor in (12, 13, 14)] + ["python3"]
    on_path = [found for name in names if (found := shutil.which(name))]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    with_pyenv = sorted(root.glob("3.1[234].*/bin/python")) if root.is_dir() else []
    for candidate in (*on_path, *map(str, with_pyenv)):
        found = _query_interpreter(candidate)
        if found is not None and tuple(found[0]) >= MIN_PYTHON:
            yield candidate


def _check_interpreter(path: str, key: str) -> GymPython:
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ConfigError(key, path, "no interpreter: give the path of a Python that has nemo-gym")
    answer = _query_interpreter(path)
    if answer is None:
        raise ConfigError(key, path, "does not answer as a Python does")
    version, gym_version, _, _ = answer
    if tuple(version) < MIN_PYTHON:
        raise ConfigError(key, path, f"is Python {version[0]}.{version[1]}; NeMo Gym needs 3.12 or newer")
    found = _inspect(Path(path))
    if found is None or gym_version is None:
        raise ConfigError(key, path, f"has no nemo-gym; install it there: uv pip install nemo-gym=={GYM_VERSION}")
    return found


def _inspect(python: Path) -> GymPython | None:
    """What an interpreter is, if it has nemo-gym."""
    answer = _query_interpreter(str(python)) if python.exists() else None
    if answer is None or answer[1] is None:
        return None
    version, _, prefix, site_packages = answer
    return GymPython(python, (version[0], version[1]), Path(prefix), Path(site_packages))


def _query_interpreter(python: str) -> list | None:
    """What an interpreter says of itself: version, nemo-gym's version, prefix, site-packages. None: nothing."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", INSPECT_SCRIPT], capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S, check=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _create_environment(directory: Path, requirements: Sequence[str], key: str) -> None:
    """Make the environment aside, then rename it: what has the name is whole. Only while holding its lock."""
    uv = find_uv()
    if uv is None:
        raise ConfigError(
            key, None, f"needs uv on PATH to install nemo-gym=={GYM_VERSION}, or the path of a Python with it"
        )
    aside = directory.with_name(directory.name + ".making")
    for leftover in (aside, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info("installing nemo-gym %s into %s", GYM_VERSION, directory)
    base = next(base_interpreters(), "3.12")  # not found: uv looks for one, or fetches it
    _run([uv, "venv", "--relocatable", "--python", base, str(aside)], directory.parent, key)
    requirements_file = directory.with_name(directory.name + ".txt")
    requirements_file.write_text("\n".join([f"nemo-gym=={GYM_VERSION}", *requirements]) + "\n")
    python = str(aside / "bin" / "python")
    newest = ["--exclude-newer", EXCLUDE_NEWER]
    _run([uv, "pip", "install", "--python", python, *newest, "-r", str(requirements_file)], directory.parent, key)
    aside.rename(directory)


def _run(command: Sequence[str], cwd: Path, key: str) -> None:
    """One command of uv, outside of any project's directory, whose settings would be taken for ours."""
    excluded = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    try:
        subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=CREATE_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        stderr_tail = "; ".join(error.stderr.strip().splitlines()[-4:])
        problem = (
            f"no environment with nemo-gym=={GYM_VERSION} can be made: {stderr_tail} (else give a Python that has it)"
        )
        raise ConfigError(key, None, problem) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(key, None, f"no environment with nemo-gym can be made: {error}") from error


@contextmanager
def _lock(path: Path, key: str) -> Iterator[None]:
    """One maker at a time, on this machine; a maker that dies lets go."""
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(key, None, f"another process holds {path} for {CREATE_TIMEOUT_S:g} s") from None
                time.sleep(0.2)
        yield


CONFIG_FILE = "env.yaml"  # Gym reads it from where it is started; it wins over config_paths
POLICY_MODEL = "policy_model"  # the name under which Gym's agents look for the model
POLICY_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"


def find_configs(paths: Sequence[str], site_packages: Path, *, key: str) -> dict[str, DictConfig]:
    """Gym's YAML files by path: those of the user's directory absolute, Gym's own as they are written.

    Files may name further ones in their own `config_paths`. Where none has a model for the policy, Gym's model for
    training is added. Raises ConfigError naming a path that is not found or no mapping.
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


def collect_requirements(configs: Iterable[Mapping[Any, Any]], site_packages: Path) -> list[str]:
    """What the configured servers need beside Gym itself, as lines of a requirements file."""
    lines: set[str] = set()
    for config in configs:
        for entry in config.values():
            for kind in SERVER_KINDS:
                implementations = entry.get(kind) if isinstance(entry, Mapping) else None
                for name in implementations if isinstance(implementations, Mapping) else ():
                    lines.update(_read_requirements(_server_directory(kind, str(name), site_packages)))
    return sorted(lines)


def write_workspace(directory: Path, python: GymPython, settings: Mapping[str, Any]) -> None:
    """Lay out the folder: the configuration, the user's own servers, an environment for each server of Gym.

    `settings` win over the user's own env.yaml in the current directory. It holds keys: nobody else may read it.
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
    if target.is_dir() and not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target, target_is_directory=True)


def _load_config(file: Path, path: str, key: str) -> DictConfig:
    try:
        config = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(key, path, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(key, path, "must hold a mapping")
    return config


def _server_directory(kind: str, name: str, site_packages: Path) -> Path:
    """A server's own files: the user's, else Gym's; the same choice as Gym's."""
    own = Path.cwd() / kind / name
    has_own = (own / "requirements.txt").is_file() or (own / "pyproject.toml").is_file()
    return own if has_own else site_packages / kind / name


def _read_requirements(directory: Path) -> list[str]:
    """Without comments and without Gym itself, which a checkout names by its relative path."""
    if (directory / "pyproject.toml").is_file():
        project = tomllib.loads((directory / "pyproject.toml").read_text()).get("project", {})
        lines = list(project.get("dependencies", ()))
    elif (directory / "requirements.txt").is_file():
        lines = (directory / "requirements.txt").read_text().splitlines()
    else:
        return []
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in stripped if line and "../.." not in line and not re.match(r"nemo[-_]gym\b", line)]
