"""The store of one shard of a collection: finished rollouts, failed attempts, and what is still missing.

A collector takes missing keys from it and appends their results; merge and profile read what it wrote.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_rl.collect.rollout_files import AppendOnlyFile, atomic_write, read_lines
from nemo_rl.collect.shards import (
    TASKS_FILE,
    KeySpace,
    OtherCollectionError,
    RolloutKey,
    ShardFiles,
    ShardIdentity,
    find_shards,
)
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.rollout_rows import encode_json_line
from nemo_rl.types import Failure

SYNC_PERIOD_S = 10.0
FINISHED = 255  # in the table of keys; anything below counts failed attempts
MAX_ATTEMPTS = 254


class RolloutStore:
    """One seed of a collection, or one chunk of it, on the disk. Also a context manager.

    A row that `append` has returned for survives a kill of this process; against power failures everything is synced
    to the disk every 10 seconds while rows are appended, by `finish` and by `close`. Not for use from several threads.
    Holds one byte per key.
    """

    def __init__(self, files: ShardFiles, identity: ShardIdentity, *, max_attempts: int) -> None:
        """Use `open`."""
        self.files = files
        self.seed = identity.seed
        self.keys = identity.keys
        self.max_attempts = max_attempts
        self._state = bytearray(len(self.keys))
        self._num_finished = 0
        self._num_given_up = 0
        self._rollouts = AppendOnlyFile(files.rollouts)
        try:
            self._failures = AppendOnlyFile(files.failures)
            try:
                self._load(identity)
            except BaseException:
                self._failures.close()
                raise
        except BaseException:
            self._rollouts.close()
            raise
        self._background_sync = _BackgroundSync((self._rollouts, self._failures))

    @classmethod
    def open(
        cls, directory: str | Path, *, seed: int, keys: KeySpace, identity: Mapping[str, Any], max_attempts: int = 3
    ) -> "RolloutStore":
        """Begin the shard of `seed` and `keys.chunk` in `directory`, or resume it.

        `identity`: what the rollouts are of: `{"data": ..., "config": ..., "model": ...}`, plain nested values,
        the same for every seed and chunk; nothing in it that may differ from one start to the next (concurrency,
        addresses).

        Raises ConfigError for a shard of another identity, showing each differing key, for a seed that was cut into
        another number of chunks, and while another process has it open; DataError for files that hold what they
        should not.
        """
        if not 1 <= max_attempts <= MAX_ATTEMPTS:
            raise ConfigError("max_attempts", max_attempts, f"must be from 1 to {MAX_ATTEMPTS}")
        if seed < 0:
            raise ConfigError("seed", seed, "must not be negative")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _check_chunking(directory, seed, keys)
        files = ShardFiles.of(directory, seed, None if keys.chunk is None else keys.chunk.index)
        return cls(files, ShardIdentity(seed, keys, identity), max_attempts=max_attempts)

    @property
    def num_finished(self) -> int:
        return self._num_finished

    @property
    def num_given_up(self) -> int:
        """Return the number of rollouts that failed `max_attempts` times."""
        return self._num_given_up

    @property
    def num_missing(self) -> int:
        """Return the number of rollouts that `missing` would yield."""
        return len(self._state) - self._num_finished - self._num_given_up

    @property
    def is_done(self) -> bool:
        return self.files.done.exists()

    def missing(self) -> Iterator[RolloutKey]:
        """Yield the keys that are neither finished nor given up, by task and repeat.

        The state of a key is read when its turn comes, so rows may be appended meanwhile. A rollout that fails after
        its turn comes again in the next call.
        """
        for number, state in enumerate(self._state):
            if state < self.max_attempts:
                yield self.keys.key(number)

    def is_finished(self, key: RolloutKey) -> bool:
        return self._state[self.keys.number(key)] == FINISHED

    def num_attempts(self, key: RolloutKey) -> int:
        """Return how often an unfinished rollout has failed."""
        return self._state[self.keys.number(key)]

    def append(self, key: RolloutKey, row: Mapping[str, Any]) -> None:
        """Add a finished rollout: task_index, rollout_index and seed, followed by `row`.

        ValueError for a finished key, RolloutError if it cannot be written.
        """
        number = self._unfinished_number(key)
        self._rollouts.append(self._encode_line(key, row))
        self._num_given_up -= self._state[number] >= self.max_attempts
        self._state[number] = FINISHED
        self._num_finished += 1
        self._background_sync.sync_if_due()

    def append_failure(self, key: RolloutKey, failure: Failure) -> int:
        """Record a failed attempt and return how many there are now. Raises ValueError for a finished key."""
        number = self._unfinished_number(key)
        attempt = min(self._state[number] + 1, MAX_ATTEMPTS)
        row = {"attempt": attempt, "class": failure.failure_class, "cause": failure.cause}
        self._failures.append(self._encode_line(key, row))
        self._state[number] = attempt
        self._num_given_up += attempt == self.max_attempts
        self._background_sync.sync_if_due()
        return attempt

    def finish(self) -> None:
        """Mark the shard as done. ValueError while rollouts are missing."""
        if self.num_missing:
            raise ValueError(f"{self.num_missing} rollouts are missing")
        self._background_sync.now()
        with atomic_write(self.files.done) as file:
            counts = {"finished": self.num_finished, "given_up": self.num_given_up}
            file.write((json.dumps(counts) + "\n").encode())

    def close(self) -> None:
        """Sync and release the lock; no call may follow."""
        try:
            self._background_sync.close()
        finally:
            self._rollouts.close()
            self._failures.close()

    def __enter__(self) -> "RolloutStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _load(self, identity: ShardIdentity) -> None:
        if self.files.identity.exists():
            identity.check(self.files.identity)
        elif self.files.rollouts.stat().st_size:
            raise DataError(f"{self.files.rollouts}: holds rollouts, but {self.files.identity.name} is not there")
        else:
            identity.write(self.files.identity)
        self._load_failures()
        self._load_finished()
        if self.num_missing:
            self.files.done.unlink(missing_ok=True)  # more attempts are allowed than when it was written

    def _load_failures(self) -> None:
        for number in self._iter_key_numbers(self.files.failures):
            self._state[number] = min(self._state[number] + 1, MAX_ATTEMPTS)

    def _load_finished(self) -> None:
        for number in self._iter_key_numbers(self.files.rollouts):
            if self._state[number] == FINISHED:
                raise DataError(f"{self.files.rollouts}: {self.keys.key(number)} is there twice")
            self._state[number] = FINISHED
            self._num_finished += 1
        given_up = range(self.max_attempts, FINISHED)
        self._num_given_up = sum(self._state.count(attempts) for attempts in given_up)

    def _iter_key_numbers(self, path: Path) -> Iterator[int]:
        tasks, repeats = self.keys.tasks, self.keys.num_repeats
        for line in read_lines(path):
            if line.seed != self.seed or line.task_index not in tasks or line.rollout_index >= repeats:
                raise DataError(f"{path}: a rollout of another shard, at byte {line.offset}: {line}")
            yield tasks.index(line.task_index) * repeats + line.rollout_index

    def _unfinished_number(self, key: RolloutKey) -> int:
        number = self.keys.number(key)
        if self._state[number] == FINISHED:
            raise ValueError(f"{key} is finished already")
        return number

    def _encode_line(self, key: RolloutKey, row: Mapping[str, Any]) -> bytes:
        key_fields = {"task_index": key.task_index, "rollout_index": key.rollout_index, "seed": self.seed}
        values = {**key_fields, **row, **key_fields}  # the stamp first: read_lines looks for it there
        return encode_json_line(values, allow_nan=False)


def _check_chunking(directory: Path, seed: int, keys: KeySpace) -> None:
    """Raise ConfigError for overlapping shards of one seed, which could never be merged."""
    num_chunks = None if keys.chunk is None else keys.chunk.count
    for shard in find_shards(directory):
        if shard.seed != seed:
            continue
        begun = ShardIdentity.read(shard.identity).keys.chunk
        if (None if begun is None else begun.count) != num_chunks:
            was = "whole (collect.chunk = null)" if begun is None else f"in {begun.count} chunks"
            now = None if keys.chunk is None else f"{keys.chunk.index}/{keys.chunk.count}"
            raise OtherCollectionError(
                "collect.chunk", now, f"seed {seed} was begun {was} in {directory}: continue like that"
            )


def discard_empty_collection(directory: str | Path) -> bool:
    """Remove shards and input of a collection that has stored no rollout, only failed attempts if any.

    Returns False, and removes nothing, if a shard holds a rollout or is being written to.
    """
    shards = find_shards(directory)
    with ExitStack() as stack:
        for shard in shards:
            try:
                stack.callback(AppendOnlyFile(shard.rollouts).close)
            except ConfigError:
                return False
            if shard.rollouts.stat().st_size:
                return False
        for shard in shards:
            for path in (shard.identity, shard.done, shard.failures, shard.rollouts):
                path.unlink(missing_ok=True)
        (Path(directory) / TASKS_FILE).unlink(missing_ok=True)
    return True


class _BackgroundSync:
    """Syncs files on its own thread, since a disk may be slow; an error is raised by the next call."""

    def __init__(self, files: Sequence[AppendOnlyFile]) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store-sync")
        self._pending: Future[None] | None = None
        self._due_s = time.monotonic() + SYNC_PERIOD_S

    def sync_if_due(self) -> None:
        """Start a sync if the last one is old enough and has ended."""
        if time.monotonic() < self._due_s:
            return
        if self._pending is not None:
            if not self._pending.done():
                return
            self._pending.result()
        self._pending = self._thread.submit(self._sync)
        self._due_s = time.monotonic() + SYNC_PERIOD_S

    def now(self) -> None:
        """Sync and wait until everything is on the disk."""
        self._thread.submit(self._sync).result()

    def close(self) -> None:
        try:
            self.now()
        finally:
            self._thread.shutdown(wait=True)

    def _sync(self) -> None:
        for file in self._files:
            file.sync()
