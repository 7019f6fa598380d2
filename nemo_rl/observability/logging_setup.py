"""Where log records go: one handler that shares its console with the progress display."""

import logging
import os

from rich.console import Console
from rich.logging import RichHandler

HANDLER_NAME = "nemo_rl"
QUIET = (
    "vllm",
    "ray",
    "httpx",
    "httpcore",
    "urllib3",
    "filelock",
    "fsspec",
    "transformers",
    "datasets",
    "wandb",
    "asyncio",
)


def configure_logging(level: int | str = logging.INFO, console: Console | None = None) -> Console:
    """Send all log records of this process, and Python's warnings, to `console` (None: stderr), which is returned.

    Libraries in QUIET show from warnings on; vLLM, which configures itself in each of its processes, by its
    environment variable unless that is set. May be called again; the last call counts.
    """
    console = console or Console(stderr=True)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == HANDLER_NAME]:
        root.removeHandler(handler)
    root.addHandler(_handler(console))
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    logging.captureWarnings(True)
    return console


def _handler(console: Console) -> logging.Handler:
    """Coloured on a terminal, above a live display; elsewhere plain lines, never wrapped."""
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
