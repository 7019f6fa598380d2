"""The Python that a stack of ours runs in: one by path, or an environment with nemo-gym, made once in the cache.

NeMo Gym needs Python 3.12 and libraries in versions of its own. Its servers share one environment; what the servers of
a configuration need beside Gym is installed into it too, so there is one environment for each set of requirements.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from nemo_rl.distributed.cache_directory import cache_directory
from nemo_rl.errors import ConfigError

GYM_VERSION = "0.4.0"
OLDEST_PYTHON = (3, 12)
NEWEST_PACKAGES = "2026-11-15T00:00:00Z"  # what is published later is not looked at: every machine gets the same
MAKE_TIMEOUT_S = 1800.0  # for another process to make the same environment, or for one command of ours
LOOK_TIMEOUT_S = 60.0
LOOK = """
import importlib.metadata, json, sys, sysconfig
try:
    version = importlib.metadata.version("nemo-gym")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([list(sys.version_info[:2]), version, sys.prefix, sysconfig.get_paths()["purelib"]]))
"""

log = logging.getLogger(__name__)


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


def gym_python(path: str | None, requirements: Iterable[str] = (), *, key: str = "env.nemo_gym.python") -> GymPython:
    """The interpreter at `path`, taken as it is, or that of the cached environment with these further requirements.

    Blocks for as long as it takes to make an environment. Raises ConfigError naming `key` for one that cannot be had.
    """
    if path is not None:
        return _given(path, key)
    lines = sorted(set(requirements))
    suffix = f"-{blake2b(chr(10).join(lines).encode(), digest_size=4).hexdigest()}" if lines else ""
    folder = cache_directory() / "nemo_gym" / f"{GYM_VERSION}{suffix}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock"), key):
        found = _look(folder / "bin" / "python")
        if found is None:
            _make(folder, lines, key)
            found = _look(folder / "bin" / "python")
    if found is None:
        raise ConfigError(key, None, f"the environment made in {folder} has no nemo-gym")
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
        found = _ask(candidate)
        if found is not None and tuple(found[0]) >= OLDEST_PYTHON:
            yield candidate


def _given(path: str, key: str) -> GymPython:
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ConfigError(key, path, "no interpreter: give the path of a Python that has nemo-gym")
    answer = _ask(path)
    if answer is None:
        raise ConfigError(key, path, "does not answer as a Python does")
    version, gym_version, _, _ = answer
    if tuple(version) < OLDEST_PYTHON:
        raise ConfigError(key, path, f"is Python {version[0]}.{version[1]}; NeMo Gym needs 3.12 or newer")
    found = _look(Path(path))
    if found is None or gym_version is None:
        raise ConfigError(key, path, f"has no nemo-gym; install it there: uv pip install nemo-gym=={GYM_VERSION}")
    return found


def _look(python: Path) -> GymPython | None:
    """What an interpreter is, if it has nemo-gym."""
    answer = _ask(str(python)) if python.exists() else None
    if answer is None or answer[1] is None:
        return None
    version, _, prefix, site_packages = answer
    return GymPython(python, (version[0], version[1]), Path(prefix), Path(site_packages))


def _ask(python: str) -> list | None:
    """What an interpreter says of itself: version, nemo-gym's version, prefix, site-packages. None: nothing."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", LOOK], capture_output=True, text=True, timeout=LOOK_TIMEOUT_S, check=True
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _make(folder: Path, requirements: Sequence[str], key: str) -> None:
    """Make the environment aside, then rename it: what has the name is whole. Only while holding its lock."""
    uv = find_uv()
    if uv is None:
        raise ConfigError(
            key, None, f"needs uv on PATH to install nemo-gym=={GYM_VERSION}, or the path of a Python with it"
        )
    aside = folder.with_name(folder.name + ".making")
    for leftover in (aside, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    log.info("installing nemo-gym %s into %s", GYM_VERSION, folder)
    base = next(base_interpreters(), "3.12")  # not found: uv looks for one, or fetches it
    _run([uv, "venv", "--relocatable", "--python", base, str(aside)], folder.parent, key)
    wanted = folder.with_name(folder.name + ".txt")
    wanted.write_text("\n".join([f"nemo-gym=={GYM_VERSION}", *requirements]) + "\n")
    python = str(aside / "bin" / "python")
    newest = ["--exclude-newer", NEWEST_PACKAGES]
    _run([uv, "pip", "install", "--python", python, *newest, "-r", str(wanted)], folder.parent, key)
    aside.rename(folder)


def _run(command: Sequence[str], cwd: Path, key: str) -> None:
    """One command of uv, outside of any project's directory, whose settings would be taken for ours."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        said = "; ".join(error.stderr.strip().splitlines()[-4:])
        problem = f"no environment with nemo-gym=={GYM_VERSION} can be made: {said} (else give a Python that has it)"
        raise ConfigError(key, None, problem) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(key, None, f"no environment with nemo-gym can be made: {error}") from error


@contextmanager
def _lock(path: Path, key: str) -> Iterator[None]:
    """One maker at a time, on this machine; a maker that dies lets go."""
    deadline = time.monotonic() + MAKE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(key, None, f"another process holds {path} for {MAKE_TIMEOUT_S:g} s") from None
                time.sleep(0.2)
        yield
