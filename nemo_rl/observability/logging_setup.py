"""Logging set-up: one handler that shares its console with the progress display, and the run's directory."""

import logging
import os
import re
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

HANDLER_NAME = "nemo_rl"
# Their warnings are about this machine (no CUDA runtime, no tcmalloc), not about the run: only errors are shown.
NOISY_LIBRARIES = ("vllm", "torch.utils.cpp_extension")


def configure_logging(level: int | str = logging.INFO, console: Console | None = None) -> Console:
    """Send all log records of this process, and Python's warnings, to `console` (None: stderr), which is returned.

    `level` is that of nemo_rl's own records; libraries show warnings, noisy ones only errors. vLLM configures itself in
    each of its processes, by VLLM_LOGGING_LEVEL, which is set here unless it is set already. May be called again; the
    last call counts.
    """
    console = console or Console(stderr=True)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == HANDLER_NAME]:
        root.removeHandler(handler)
    root.addHandler(_make_handler(console))
    root.setLevel(logging.WARNING)
    logging.getLogger("nemo_rl").setLevel(level)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.captureWarnings(True)
    return console


def _make_handler(console: Console) -> logging.Handler:
    """Return the handler: coloured lines above a live display on a terminal, plain unwrapped lines elsewhere."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, markup=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.name = HANDLER_NAME
    return handler


_RUN_DIRECTORY = re.compile(r"exp_(\d+)")


def make_run_directory(log_dir: str | Path) -> Path:
    """Create the next of `exp_001`, `exp_002`, ... in `log_dir`; runs that start together get one each."""
    root = Path(log_dir)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in root.iterdir() if (match := _RUN_DIRECTORY.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        directory = root / f"exp_{number:03d}"
        try:
            directory.mkdir()
        except FileExistsError:  # another run was quicker
            number += 1
        else:
            return directory
