"""The directory of a run: a new one in `logger.log_dir`, or that of the run whose checkpoint it resumes.

A run that resumes appends to its own records: what they say about steps after the checkpoint is moved to `discarded/`
first, since these steps are trained again.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.shared_sections import CheckpointingConfig, LoggerConfig
from nemo_rl.durable_files import replace_text
from nemo_rl.observability.console import make_run_directory
from nemo_rl.observability.loggers import METRICS_FILE

logger = logging.getLogger(__name__)

RUN_FILE = "run_directory"  # a file beside checkpoints: the path of their run, relative to it
RECORDS = (METRICS_FILE, "rollouts/train.jsonl", "rollouts/validation.jsonl", "rollouts/details.jsonl")
DISCARDED = "discarded"  # directory in the run directory
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    is_resumed: bool = False  # the run continues in its own directory


def choose_run_directory(section: LoggerConfig, checkpointing: CheckpointingConfig | None) -> RunDirectory:
    """Return the directory of the run that the checkpoints belong to, if it is in `log_dir`, else a new one.

    `checkpointing` None: the run cannot resume.
    """
    if checkpointing is not None and checkpointing.enabled and checkpointing.checkpoint_dir:
        directory = Path(checkpointing.checkpoint_dir)
        latest = CheckpointStore(checkpointing, directory).latest()
        run_dir = None if latest is None else _run_of(directory)
        if latest is not None and run_dir is not None:
            if run_dir.parent.samefile(_made(section.log_dir)):
                return RunDirectory(Path(section.log_dir) / run_dir.name, is_resumed=True)
            logger.info("the steps up to %d are in %s; the next are in a new directory", latest.step, run_dir)
    return RunDirectory(make_run_directory(section.log_dir))


def name_run(checkpoint_dir: Path, run_dir: Path) -> None:
    """Write down whose checkpoints a directory holds; on a full disk the run that resumes gets a new directory."""
    with contextlib.suppress(OSError):
        replace_text(checkpoint_dir / RUN_FILE, os.path.relpath(run_dir.resolve(), checkpoint_dir.resolve()) + "\n")


def discard_records_after(run_dir: Path, step: int) -> None:
    """Move what the records say about steps after `step` to `discarded/`."""
    for path in filter(Path.is_file, (run_dir / name for name in RECORDS)):
        try:
            size = _move_tail(path, step, run_dir / DISCARDED / path.name)
        except OSError as error:
            logger.warning("%s keeps its records of steps after %d beside the new ones: %s", path, step, error)
        else:
            if size:
                logger.info("moved %d bytes of %s about steps after %d to %s/", size, path, step, DISCARDED)


def _made(directory: str) -> Path:
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run_of(checkpoint_dir: Path) -> Path | None:
    try:
        named = (checkpoint_dir / RUN_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    run_dir = (checkpoint_dir / named).resolve()
    return run_dir if (run_dir / METRICS_FILE).is_file() else None


def _move_tail(path: Path, step: int, aside: Path) -> int:
    """Move the lines after the last one of `step` or earlier to the end of `aside`; return their bytes."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = next((end for end, line in _lines_backward(file, size) if _is_kept(line, step)), 0)
        if end == size:
            return 0
        aside.parent.mkdir(exist_ok=True)
        file.seek(end)
        with aside.open("ab") as copy:
            while block := file.read(BLOCK_BYTES):
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
        file.truncate(end)
    return size - end


def _is_kept(line: bytes, step: int) -> bool:
    """Return whether a line is whole and about `step` or an earlier one."""
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, TypeError, KeyError):
        return False


def _lines_backward(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from the last to the first, each with the offset of its end."""
    start, rest = size, b""
    while start > 0:
        length = min(BLOCK_BYTES, start)
        start -= length
        file.seek(start)
        rest = file.read(length) + rest
        first = rest.find(b"\n") + 1 if start else 0  # the line before it may begin in an earlier block
        if start and not first:
            continue
        end = start + len(rest)
        for line in reversed(rest[first:].splitlines(keepends=True)):
            yield end, line
            end -= len(line)
        rest = rest[:first]
