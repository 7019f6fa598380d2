"""The directory of one run: metrics, rollouts, checkpoints and logs lie in it."""

import re
from pathlib import Path

_RUN = re.compile(r"exp_(\d+)")


def make_run_directory(log_dir: str | Path) -> Path:
    """Make the next of `exp_001`, `exp_002`, ... in `log_dir`; runs that start together get one each."""
    root = Path(log_dir)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in root.iterdir() if (match := _RUN.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        directory = root / f"exp_{number:03d}"
        try:
            directory.mkdir()
        except FileExistsError:  # another run was quicker
            number += 1
        else:
            return directory
