"""The writer of finished rollouts to a JSON Lines file."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from nemo_rl.durable_files import append_whole
from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_rows import encode_json_line, rollout_row
from nemo_rl.experience.thumbnails import ThumbnailWriter
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.types import Trajectory

logger = logging.getLogger(__name__)

THUMBNAILS = "images"  # directory beside the file
MAX_PENDING_ROLLOUTS = 4096  # per RolloutWriter; some hundred kilobytes each if they are long
WRITE_TIMEOUT_S = 600.0  # limit for the disk to make room in the queue, and to write the rest at the end


class RolloutWriter:
    """Appends rollouts to a JSON Lines file; also a context manager.

    A daemon thread encodes and writes, in order, a call's rollouts at a time. `write` returns at once while at most
    `MAX_PENDING_ROLLOUTS` wait for the disk, or one call's, and waits for room otherwise, so that a slow disk slows
    the run and loses nothing. A disk that makes no room within `timeout_s` ends the run. A file that cannot be written
    does not stop the run: the log has the first error, and at the end the number of rollouts that the file lacks, which
    `lost` counts too.

    A line holds `step` and the fields of `rollout_row`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        write_token_ids: bool = False,
        write_token_columns: bool = False,
        write_thumbnails: bool = False,
        timeout_s: float = WRITE_TIMEOUT_S,
        lost: LostRecords | None = None,
    ) -> None:
        self.path = Path(path)
        self._row = partial(rollout_row, write_token_ids=write_token_ids, write_token_columns=write_token_columns)
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[tuple[int, tuple[Trajectory, ...], Future[None]] | None] = SimpleQueue()
        self._calls: deque[tuple[int, Future[None]]] = deque()  # calls that may be unfinished: size and end
        self._num_lost = 0  # rollouts that could not be written
        self._lost = LostRecords() if lost is None else lost
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thumbnails = ThumbnailWriter(self.path.parent / THUMBNAILS) if write_thumbnails else None
        self._thread = Thread(target=self._append_all, name="rollout-writer", daemon=True)
        self._thread.start()

    async def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append one line per rollout; `step` is the training step that they belong to.

        Raises RolloutError when the disk makes no room within the deadline.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while (pending := self._num_pending()) and pending + len(trajectories) > MAX_PENDING_ROLLOUTS:
                    await asyncio.shield(asyncio.wrap_future(self._calls[0][1]))
        except TimeoutError as error:
            raise RolloutError(
                f"{self.path}: timed out after {self._timeout_s:g} s writing rollouts ({self._num_pending()} pending); "
                f"those of step {step} are not recorded"
            ) from error
        end: Future[None] = Future()
        self._calls.append((len(trajectories), end))
        self._queue.put((step, tuple(trajectories), end))

    def close(self) -> None:
        """Return when everything is written, or after the deadline; no `write` follows. May be called twice."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(self._timeout_s)
        if missing := self._num_lost + self._num_pending():
            logger.error("%s lacks %d rollouts that could not be written", self.path, missing)
            self._lost.add(self.path, missing)

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _num_pending(self) -> int:
        """Return the number of rollouts that wait or are being written."""
        while self._calls and self._calls[0][1].done():
            self._calls.popleft()
        return sum(size for size, _ in self._calls)

    def _append_all(self) -> None:
        while (call := self._queue.get()) is not None:
            step, trajectories, end = call
            if not self._append(step, trajectories):
                self._num_lost += len(trajectories)
            end.set_result(None)

    def _append(self, step: int, trajectories: Sequence[Trajectory]) -> bool:
        """Write one call's lines, and return whether that succeeded."""
        try:
            lines = [encode_json_line({"step": step, **self._row(t)}) for t in trajectories]
            with self.path.open("ab", buffering=0) as file:
                append_whole(file.fileno(), b"".join(lines))
        except Exception:
            if not self._num_lost:
                logger.exception("rollouts cannot be written to %s", self.path)
            return False
        self._write_thumbnails(trajectories)
        return True

    def _write_thumbnails(self, trajectories: Sequence[Trajectory]) -> None:
        if self._thumbnails is None:
            return
        try:
            self._thumbnails.write(trajectories)
        except Exception as error:  # the rollouts are written  # noqa: BLE001
            logger.warning("stopped writing thumbnails: %s: %s", type(error).__name__, error)
            self._thumbnails = None
