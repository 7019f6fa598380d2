"""The Python of a started stack: the user's own, or an environment with nemo-gym that is created once, in the cache."""

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from nemo_rl.distributed.machine import cache_directory
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_VERSION = "0.4.0"
EXCLUDE_NEWER = "2026-11-15T00:00:00Z"  # ignores later releases, so that every machine installs the same
CREATE_TIMEOUT_S = 1800.0  # the longest wait for an environment, that for another process that creates it included
INSPECT_TIMEOUT_S = 60.0
INSPECT_SCRIPT = """
import importlib.metadata, json, sys, sysconfig
try:
    version = importlib.metadata.version("nemo-gym")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([list(sys.version_info[:3]), version, sys.prefix, sysconfig.get_paths()["purelib"]]))
"""


@dataclass(frozen=True, slots=True)
class GymPython:
    """A Python interpreter with nemo-gym."""

    python: Path
    gym_version: str
    prefix: Path  # root of its environment
    site_packages: Path  # contains Gym's servers and their configurations

    @property
    def is_virtual(self) -> bool:
        """Return whether servers can share it: Gym's command line activates a virtual environment."""
        return (self.prefix / "bin" / "activate").is_file()


def find_gym_python(path: str | None, version: str | None) -> GymPython | None:
    """Return the interpreter at `path`, else that of the cached environment; None without nemo-gym so far."""
    return _inspect(Path(path).absolute() if path else _environment(version, ()) / "bin" / "python")


def resolve_gym_python(
    path: str | None,
    requirements: Iterable[str] = (),
    *,
    version: str | None = None,
    key: str = "env.nemo_gym.python",
    timeout_s: float = CREATE_TIMEOUT_S,
) -> GymPython:
    """Return the interpreter at `path`, else that of the cached environment with these further requirements.

    `version` is that of nemo-gym in the cached environment, None for DEFAULT_VERSION. Blocks while the environment is
    created, at most `timeout_s`. Raises ConfigError naming `key` for an unsuitable interpreter, or an environment that
    cannot be created.
    """
    if path is not None:
        return _check_interpreter(path, key)
    lines = sorted(set(requirements))
    directory = _environment(version, lines)
    directory.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with _lock(directory.with_name(directory.name + ".lock"), key, deadline):
        found = _inspect(directory / "bin" / "python")
        if found is None:
            _create_environment(directory, version or DEFAULT_VERSION, lines, key, deadline)
            found = _inspect(directory / "bin" / "python")
    if found is None:
        raise ConfigError(key, None, f"the environment created in {directory} has no nemo-gym")
    return found


def find_uv() -> str | None:
    """Return the path of uv, on PATH or next to this interpreter; None if not found."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.is_file() else None)


def min_python(version: str | None = None) -> tuple[int, ...]:
    """Return the oldest Python that a version of nemo-gym installs on."""
    major_minor = tuple(map(int, re.findall(r"\d+", version or DEFAULT_VERSION)[:2]))
    return (3, 12) if major_minor < (0, 5) else (3, 13, 14)


def base_interpreters(version: str | None = None) -> Iterator[str]:
    """Yield the Pythons that this version of nemo-gym installs on: those on PATH, then pyenv's; oldest first."""
    names = [f"python3.{minor}" for minor in (12, 13, 14)] + ["python3"]
    on_path = [found for name in names if (found := shutil.which(name))]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    with_pyenv = sorted(root.glob("3.1[234].*/bin/python")) if root.is_dir() else []
    for candidate in (*on_path, *map(str, with_pyenv)):
        found = _query_interpreter(candidate)
        if found is not None and tuple(found[0]) >= min_python(version):
            yield candidate


def _check_interpreter(path: str, key: str) -> GymPython:
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ConfigError(key, path, "not an interpreter: give the path of a Python that has nemo-gym")
    found = _inspect(Path(path).absolute())  # not resolved: a link in an environment is the environment's Python
    if found is None:
        answer = _query_interpreter(path)
        if answer is None:
            raise ConfigError(key, path, "does not run as a Python interpreter")
        needed = "3.12 or newer, from 0.5 on 3.13.14 or newer"
        problem = f"is Python {'.'.join(map(str, answer[0]))} without nemo-gym, which needs Python {needed}"
        raise ConfigError(key, path, f"{problem}; install it there: uv pip install nemo-gym=={DEFAULT_VERSION}")
    return found


def _inspect(python: Path) -> GymPython | None:
    """Return the interpreter's properties; None without nemo-gym."""
    answer = _query_interpreter(str(python)) if python.exists() else None
    if answer is None or answer[1] is None:
        return None
    _, gym_version, prefix, site_packages = answer
    return GymPython(python, gym_version, Path(prefix), Path(site_packages))


def _query_interpreter(python: str) -> list | None:
    """Ask an interpreter for its version, nemo-gym's version, prefix and site-packages; None if it cannot say."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", INSPECT_SCRIPT], capture_output=True, text=True, timeout=INSPECT_TIMEOUT_S, check=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _environment(version: str | None, requirements: Sequence[str]) -> Path:
    lines = "\n".join(requirements).encode()
    suffix = f"-{blake2b(lines, digest_size=4).hexdigest()}" if requirements else ""
    return cache_directory() / "nemo_gym" / f"{version or DEFAULT_VERSION}{suffix}"


def _create_environment(directory: Path, version: str, requirements: Sequence[str], key: str, deadline: float) -> None:
    """Create the environment under another name, then rename it, so that it is complete. The caller holds its lock."""
    uv = find_uv()
    if uv is None:
        raise ConfigError(key, None, f"needs uv on PATH to install nemo-gym=={version}, or a Python that has it")
    temporary = directory.with_name(directory.name + ".making")
    for leftover in (temporary, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info("installing nemo-gym %s into %s", version, directory)
    oldest = min_python(version)
    wanted = f">={'.'.join(map(str, oldest))},<3.{oldest[1] + 1}"
    base = next(base_interpreters(version), wanted)  # none found: uv looks for one, or downloads it
    _run([uv, "venv", "--relocatable", "--python", base, str(temporary)], directory.parent, key, deadline)
    requirements_file = directory.with_name(directory.name + ".txt")
    requirements_file.write_text("\n".join([f"nemo-gym=={version}", *requirements]) + "\n")
    python = str(temporary / "bin" / "python")
    newest = ["--exclude-newer", EXCLUDE_NEWER]
    install = [uv, "pip", "install", "--python", python, *newest, "-r", str(requirements_file)]
    _run(install, directory.parent, key, deadline)
    temporary.rename(directory)


def _run(command: Sequence[str], cwd: Path, key: str, deadline: float) -> None:
    """Run a command of uv, outside of any project directory, whose settings would apply."""
    excluded = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    timeout_s = max(0.0, deadline - time.monotonic())
    try:
        subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.CalledProcessError as error:
        stderr_tail = "; ".join(error.stderr.strip().splitlines()[-4:])
        problem = f"creating an environment with nemo-gym failed: {stderr_tail} (or give a Python that has it)"
        raise ConfigError(key, None, problem) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(key, None, f"creating an environment with nemo-gym failed: {error}") from error


@contextmanager
def _lock(path: Path, key: str, deadline: float) -> Iterator[None]:
    """Hold a lock among the processes of this machine, released by the death of its holder."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(key, None, f"another process still holds {path}") from None
                time.sleep(0.2)
        yield
