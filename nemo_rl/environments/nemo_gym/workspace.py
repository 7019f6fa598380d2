"""The directory of a started stack: Gym's configuration as one file, and one Python environment for all its servers."""

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

CONFIG_FILE = "env.yaml"  # Gym reads it from its working directory; it takes precedence over config_paths
POLICY_MODEL = "policy_model"  # the name under which Gym's agents look for the model
POLICY_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
GYM_VERSION = "0.4.0"
MIN_PYTHON = (3, 12)
EXCLUDE_NEWER = "2026-11-15T00:00:00Z"  # ignores later releases, so that every machine installs the same
CREATE_TIMEOUT_S = 1800.0  # for another process to create the same environment, or for one command
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
    """A Python interpreter with nemo-gym."""

    python: Path
    version: tuple[int, int]
    prefix: Path  # root of its environment
    site_packages: Path  # contains Gym's servers and their configurations

    @property
    def is_virtual(self) -> bool:
        """Return whether servers can share it: Gym's command line activates a virtual environment."""
        return (self.prefix / "bin" / "activate").is_file()


def resolve_gym_python(
    path: str | None, requirements: Iterable[str] = (), *, key: str = "env.nemo_gym.python"
) -> GymPython:
    """Return the interpreter at `path`, else that of the cached environment with these further requirements.

    Blocks while the environment is created. Raises ConfigError naming `key` for an unsuitable interpreter, or an
    environment that cannot be created.
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
        raise ConfigError(key, None, f"the environment created in {directory} has no nemo-gym")
    return found


def find_uv() -> str | None:
    """Return the path of uv, on PATH or next to this interpreter; None if not found."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.is_file() else None)


def base_interpreters() -> Iterator[str]:
    """Yield the Pythons that Gym can run on: those on PATH, then pyenv's; oldest first."""
    names = [f"python3.{minor}" for minor in (12, 13, 14)] + ["python3"]
    on_path = [found for name in names if (found := shutil.which(name))]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    with_pyenv = sorted(root.glob("3.1[234].*/bin/python")) if root.is_dir() else []
    for candidate in (*on_path, *map(str, with_pyenv)):
        found = _query_interpreter(candidate)
        if found is not None and tuple(found[0]) >= MIN_PYTHON:
            yield candidate


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


def collect_requirements(configs: Iterable[Mapping[Any, Any]], site_packages: Path) -> list[str]:
    """Return the requirements of the configured servers, without Gym itself, as lines of a requirements file."""
    lines: set[str] = set()
    for config in configs:
        for entry in config.values():
            for kind in SERVER_KINDS:
                implementations = entry.get(kind) if isinstance(entry, Mapping) else None
                for name in implementations if isinstance(implementations, Mapping) else ():
                    lines.update(_read_requirements(_server_directory(kind, str(name), site_packages)))
    return sorted(lines)


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


def _check_interpreter(path: str, key: str) -> GymPython:
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ConfigError(key, path, "not an interpreter: give the path of a Python that has nemo-gym")
    answer = _query_interpreter(path)
    if answer is None:
        raise ConfigError(key, path, "does not run as a Python interpreter")
    version, gym_version, _, _ = answer
    if tuple(version) < MIN_PYTHON:
        raise ConfigError(key, path, f"is Python {version[0]}.{version[1]}; NeMo Gym needs 3.12 or newer")
    found = _inspect(Path(path).absolute())  # not resolved: a link in an environment is the environment's Python
    if found is None or gym_version is None:
        raise ConfigError(key, path, f"has no nemo-gym; install it there: uv pip install nemo-gym=={GYM_VERSION}")
    return found


def _inspect(python: Path) -> GymPython | None:
    """Return the interpreter's properties; None without nemo-gym."""
    answer = _query_interpreter(str(python)) if python.exists() else None
    if answer is None or answer[1] is None:
        return None
    version, _, prefix, site_packages = answer
    return GymPython(python, (version[0], version[1]), Path(prefix), Path(site_packages))


def _query_interpreter(python: str) -> list | None:
    """Ask an interpreter for its version, nemo-gym's version, prefix and site-packages; None if it cannot say."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", INSPECT_SCRIPT], capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S, check=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _create_environment(directory: Path, requirements: Sequence[str], key: str) -> None:
    """Create the environment under another name, then rename it, so that it is complete. The caller holds its lock."""
    uv = find_uv()
    if uv is None:
        raise ConfigError(
            key, None, f"needs uv on PATH to install nemo-gym=={GYM_VERSION}, or the path of a Python with it"
        )
    temporary = directory.with_name(directory.name + ".making")
    for leftover in (temporary, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info("installing nemo-gym %s into %s", GYM_VERSION, directory)
    base = next(base_interpreters(), "3.12")  # none found: uv looks for one, or downloads it
    _run([uv, "venv", "--relocatable", "--python", base, str(temporary)], directory.parent, key)
    requirements_file = directory.with_name(directory.name + ".txt")
    requirements_file.write_text("\n".join([f"nemo-gym=={GYM_VERSION}", *requirements]) + "\n")
    python = str(temporary / "bin" / "python")
    newest = ["--exclude-newer", EXCLUDE_NEWER]
    _run([uv, "pip", "install", "--python", python, *newest, "-r", str(requirements_file)], directory.parent, key)
    temporary.rename(directory)


def _run(command: Sequence[str], cwd: Path, key: str) -> None:
    """Run a command of uv, outside of any project directory, whose settings would apply."""
    excluded = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    try:
        subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=CREATE_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        stderr_tail = "; ".join(error.stderr.strip().splitlines()[-4:])
        problem = (
            f"creating an environment with nemo-gym=={GYM_VERSION} failed: {stderr_tail} (or give a Python that has it)"
        )
        raise ConfigError(key, None, problem) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(key, None, f"creating an environment with nemo-gym failed: {error}") from error


@contextmanager
def _lock(path: Path, key: str) -> Iterator[None]:
    """Hold a lock among the processes of this machine, released by the death of its holder."""
    deadline = time.monotonic() + CREATE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        key, None, f"another process holds {path} for over {CREATE_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(0.2)
        yield


def _list_servers(kind: str, site_packages: Path) -> list[str]:
    roots = (Path.cwd() / kind, site_packages / kind)
    return sorted({path.name for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()})


def _symlink_directory(link: Path, target: Path) -> None:
    if target.is_dir():
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():  # of an earlier start, maybe of another Python
            link.unlink()
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
