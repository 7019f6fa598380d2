"""Every rollout as a line of JSON in the run directory, written off the event loop."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nemo_rl.data.jsonl import encode_json_line
from nemo_rl.experience.rollout_row import rollout_row
from nemo_rl.types import Trajectory

logger = logging.getLogger(__name__)


class RolloutWriter:
    """Appends rollouts to a JSON Lines file.

    `write` returns at once: one thread encodes and writes, in order, a step at a time. A file that cannot be written
    is reported once in the log and does not stop the run. Also a context manager.

    A line holds `step` and what `rollout_row` tells.
    """

    def __init__(self, path: str | Path, *, write_token_ids: bool = False) -> None:
        self.path = Path(path)
        self._row = partial(rollout_row, write_token_ids=write_token_ids)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._has_failed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append one line a rollout; `step` is the training step that they belong to."""
        self._thread.submit(self._append, step, tuple(trajectories))

    def close(self) -> None:
        """Return when everything is written; no `write` follows."""
        self._thread.shutdown(wait=True)

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        try:
            lines = [encode_json_line({"step": step, **self._row(t)}) for t in trajectories]
            with self.path.open("ab") as file:
                file.write(b"".join(lines))
        except Exception:
            if not self._has_failed:
                logger.exception("rollouts cannot be written to %s", self.path)
            self._has_failed = True
