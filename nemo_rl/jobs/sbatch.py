"""Calls of Slurm's `sbatch`, and the numbered directories in which submissions keep their files."""

import shutil
import subprocess
from pathlib import Path

from nemo_rl.errors import ConfigError, JobError

SBATCH_S = 120.0  # deadline of one call
OWNER_ONLY = 0o600  # configurations and environments may hold secrets


def latest_directory(base: Path) -> Path | None:
    """Return the directory of the last submission in `base`, None without one."""
    numbered = [path for path in base.glob("[0-9]*") if path.name.isdigit() and path.is_dir()]
    return max(numbered, key=lambda path: int(path.name), default=None)


def next_directory(base: Path) -> Path:
    """Return the directory of the next submission: 0001, 0002, ..."""
    latest = latest_directory(base)
    return base / f"{1 if latest is None else int(latest.name) + 1:04d}"


def check_log_directory(key: str, directory: Path) -> None:
    """Raise ConfigError for a directory that Slurm's pattern of log names cannot express."""
    if "\\" in str(directory) or not str(directory).isprintable():
        raise ConfigError(key, str(directory), "must be one line of text without a backslash: Slurm names logs by it")


def write_file(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=OWNER_ONLY)
    path.write_text(text)


def submit_script(script: Path, *arguments: str) -> str:
    """Submit a script and return the job id. Raises JobError with Slurm's own words."""
    if shutil.which("sbatch") is None:
        raise JobError("there is no sbatch on this machine; --dry-run shows what would be submitted")
    command = ["sbatch", "--parsable", *arguments, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SBATCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"sbatch did not answer within {SBATCH_S:g} s") from error
    if done.returncode:
        raise JobError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().split(";")[0]  # a federation answers "number;cluster"
