"""What stands in the process of one worker: the object that it was asked for, its output in a file, its log records.

distributed/worker_group.py drives it.
"""

import asyncio
import faulthandler
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.distributed.node import node_ip
from nemo_rl.distributed.ports import unused_port

MAX_KEPT_RECORDS = 10_000  # until somebody reads them; the oldest go first


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log record, as text."""

    level: int
    logger: str
    message: str


class Worker:
    """Methods that are not its own are those of the object that `make` made."""

    def __init__(self, log_file: Path | None, level: int) -> None:
        if log_file is not None and log_file.parent.is_dir():  # on another machine it may not be there
            _write_output_to(log_file)
        self._target: Any = None
        self._records = _Forwarding(level)
        root = logging.getLogger()
        root.handlers = [_to_stderr(), self._records]
        root.setLevel(logging.WARNING)
        logging.getLogger("nemo_rl").setLevel(logging.INFO)
        logging.captureWarnings(True)

    def endpoint(self) -> tuple[str, int]:
        """An address of this machine and a port that was free a moment ago."""
        return node_ip(), unused_port("")

    def make(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._target = target(*args, **kwargs)

    async def pid(self) -> int:
        """Answers while a method of the object runs, too."""
        return os.getpid()

    async def log_lines(self) -> AsyncIterator[LogLine]:
        """What is logged here, as it comes; never ends."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        self._records.on_record = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            while self._records.lines:
                yield self._records.lines.popleft()
            ready.clear()
            if not self._records.lines:
                await ready.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class _Forwarding(logging.Handler):
    """Keeps records as text until they are read."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: deque[LogLine] = deque(maxlen=MAX_KEPT_RECORDS)
        self.on_record: Callable[[], object] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(LogLine(record.levelno, record.name, self.format(record)))
        self.on_record()


def _write_output_to(log_file: Path) -> None:
    """Everything that this process writes, libraries of C included, and where it was when a signal killed it."""
    file = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)


def _to_stderr() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    return handler
