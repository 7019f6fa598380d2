"""Logging set-up: one handler that shares its console with the progress display, and the run's directory."""

import logging
import os
import re
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from nemo_rl.errors import CONTROL_CHARACTERS, ConfigError

HANDLER_NAME = "nemo_rl"
TERMINAL_CONTROLS = {code: text for code, text in CONTROL_CHARACTERS.items() if chr(code) not in "\n\t"}
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


class EscapingFormatter(logging.Formatter):
    """Formats control characters as escapes, except line ends and tabs: a client's text moves no cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(TERMINAL_CONTROLS)


def _make_handler(console: Console) -> logging.Handler:
    """Return the handler: coloured lines above a live display on a terminal, plain unwrapped lines elsewhere."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, markup=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(EscapingFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.name = HANDLER_NAME
    return handler


def check_writable(key: str, directory: str | Path) -> None:
    """Raise ConfigError for a directory that cannot be made or written to; makes nothing."""
    path = Path(directory)
    if "\0" in str(directory):
        raise ConfigError(key, str(directory), "is no path: it has a null character; allowed: a directory")
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        is_usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except OSError as error:  # too long a name
        raise ConfigError(key, str(directory), f"is no path: {error}; allowed: a directory") from error
    if not is_usable:
        problem = "may not be written to" if path.is_dir() else "is a file"
        raise ConfigError(key, str(directory), f"{path} {problem}; allowed: a directory, which is made if necessary")


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
