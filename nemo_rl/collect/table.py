"""All rollouts of a collection as arrays: reward, length and answer."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rl.collect.merge import MERGED
from nemo_rl.collect.rollout_files import BLOCK_BYTES
from nemo_rl.collect.shard_set import load_shard_set
from nemo_rl.collect.shards import find_shards, read_tasks
from nemo_rl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

NO_ANSWER = 0
UNKNOWN_LENGTH = -1
# The counted fields precede the messages, which may be long: only the head of a line is parsed.
_MESSAGES = b', "messages": '


@dataclass(frozen=True, slots=True)
class CollectionManifest:
    """The expected size of a collection, and its files."""

    seeds: tuple[int, ...]
    num_tasks: int
    num_repeats: int
    run: Mapping[str, Any]
    rollouts: tuple[Path, ...]
    failures: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """T tasks by N rollouts each, N = seeds x repeats, seed by seed. 20 bytes per rollout."""

    manifest: CollectionManifest
    rewards: npt.NDArray[np.float64]  # [T, N]; NaN: missing or failed
    tokens: npt.NDArray[np.int32]  # [T, N] generated; -1: unknown or missing
    answers: npt.NDArray[np.int64]  # [T, N] equal for equal answers; 0: none
    dataset_of_task: npt.NDArray[np.int32]  # [T] index into `datasets`
    datasets: tuple[str, ...]
    env_of_task: npt.NDArray[np.int32]  # [T] index into `envs`
    envs: tuple[str, ...]  # environments, NeMo Gym's agents
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    failed_attempts: Mapping[str, int] = field(default_factory=dict)  # by class
    is_failed: npt.NDArray[np.bool_] | None = None  # [T, N]: attempted, and failed each time; None: no rollout

    @property
    def counted_rewards(self) -> npt.NDArray[np.float64]:
        """Return the rewards [T, N] in which a failed rollout counts as wrong."""
        if self.is_failed is None or not self.is_failed.any():
            return self.rewards
        return count_failed_as_wrong(self.rewards, self.is_failed)

    @property
    def num_failed(self) -> npt.NDArray[np.int64]:
        """Return the number of failed rollouts of each task [T]."""
        if self.is_failed is None:
            return np.zeros(len(self.rewards), np.int64)
        return self.is_failed.sum(axis=1)


def count_failed_as_wrong(
    rewards: npt.NDArray[np.float64], is_failed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return the rewards in which a failed rollout has the lowest one of all, at most 0."""
    known = rewards[~np.isnan(rewards)]
    return np.where(is_failed, min(0.0, known.min(initial=0.0)), rewards)


def read_manifest(directory: str | Path, seeds: Iterable[int] | None = None) -> CollectionManifest:
    """Read the manifest of the shards in `directory`, or of a merged file. Raises ConfigError without either."""
    directory = Path(directory)
    merged = directory / f"{MERGED}_identity.json"
    if find_shards(directory) or not merged.exists():
        whole = load_shard_set(directory, seeds)
        begun = [shard.files for shard in whole.shards if shard.has_started]
        rollouts, failures = tuple(f.rollouts for f in begun), tuple(f.failures for f in begun)
        return CollectionManifest(whole.seeds, whole.num_tasks, whole.num_repeats, whole.run, rollouts, failures)
    rollouts, failures = directory / f"{MERGED}.jsonl", directory / f"{MERGED}_failures.jsonl"
    try:
        values = json.loads(merged.read_bytes())
        manifest = CollectionManifest(
            tuple(values["seeds"]), values["num_tasks"], values["num_repeats"], values["run"], (rollouts,), (failures,)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{merged}: is not the identity of a collection: {error}") from error
    if seeds is None:
        return manifest
    if absent := set(seeds) - set(manifest.seeds):
        raise ConfigError("seeds", sorted(absent), f"are not in {merged}")
    return replace(manifest, seeds=tuple(sorted(set(seeds))))


def read_table(directory: str | Path, seeds: Iterable[int] | None = None) -> RolloutTable:
    """Read the rollouts in `directory`, shards or merged; each file once, a line at a time.

    Raises DataError for a rollout that is there twice, or that the collection is not meant to hold.
    """
    return _TableReader(Path(directory), read_manifest(directory, seeds)).table()


class _TaskNames:
    """One name per task, numbered in the order of their appearance."""

    def __init__(self, num_tasks: int) -> None:
        self.names: dict[str, int] = {}
        self.of_task = np.zeros(num_tasks, np.int32)

    def set(self, task: int, name: str) -> None:
        self.of_task[task] = self.names.setdefault(name, len(self.names))


class _TableReader:
    def __init__(self, directory: Path, manifest: CollectionManifest) -> None:
        self._manifest = manifest
        self._first_column_of_seed = {
            seed: location * manifest.num_repeats for location, seed in enumerate(manifest.seeds)
        }
        shape = (manifest.num_tasks, len(manifest.seeds) * manifest.num_repeats)
        self._rewards = np.full(shape, np.nan)
        self._tokens = np.full(shape, UNKNOWN_LENGTH, np.int32)
        self._answers = np.full(shape, NO_ANSWER, np.int64)
        self._is_present = np.zeros(shape, np.bool_)
        self._has_failed = np.zeros(shape, np.bool_)
        self._datasets = _TaskNames(manifest.num_tasks)
        self._envs = _TaskNames(manifest.num_tasks)
        for index, task in enumerate(read_tasks(directory)):
            if index < manifest.num_tasks:
                self._datasets.set(index, task.dataset)
                self._envs.set(index, task.env or task.task_name)
        self._reads_names = not self._datasets.names  # read from the rollouts if the input is not kept
        self._stop_reasons: Counter[str] = Counter()

    def table(self) -> RolloutTable:
        for path in self._manifest.rollouts:
            for line, location in _iter_lines(path):
                self._add(_parse_head(line, location), location)
        failed = Counter(self._add_failure(*each) for path in self._manifest.failures for each in self._failures(path))
        if unrewarded := int((self._is_present & np.isnan(self._rewards)).sum()):
            logger.warning("%d rollouts have no reward; they count as missing", unrewarded)
        return RolloutTable(
            self._manifest,
            self._rewards,
            self._tokens,
            self._answers,
            self._datasets.of_task,
            tuple(self._datasets.names) or ("",),
            self._envs.of_task,
            tuple(self._envs.names) or ("",),
            dict(self._stop_reasons.most_common()),
            dict(failed.most_common()),
            self._has_failed & ~self._is_present,
        )

    def _add(self, row: Mapping[str, Any], location: str) -> None:
        try:
            task, repeat, seed = row["task_index"], row["rollout_index"], row["seed"]
            if seed not in self._first_column_of_seed:
                return  # a seed of a merged file that was not requested
            at = self._position(row, location)
            if self._is_present[at]:
                raise DataError(f"{location}: rollout {repeat} of task {task} of seed {seed} is there twice")
            self._is_present[at] = True
            reward = row.get("reward")
            if reward is not None:
                self._rewards[at] = reward
                self._tokens[at] = row.get("num_generated_tokens", UNKNOWN_LENGTH)
                self._answers[at] = _hash_answer(row.get("answer"))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{location}: is no rollout of a collection: {type(error).__name__}: {error}") from error
        if self._reads_names:
            self._datasets.set(task, row.get("dataset") or "")
            self._envs.set(task, row.get("env") or row.get("task_name") or "")
        self._stop_reasons[str(row.get("stop_reason"))] += 1

    def _add_failure(self, row: Mapping[str, Any], location: str) -> str:
        """Note a failed attempt and return its class."""
        try:
            self._has_failed[self._position(row, location)] = True
        except (KeyError, TypeError) as error:
            problem = f"is no failed attempt of a collection: {type(error).__name__}: {error}"
            raise DataError(f"{location}: {problem}") from error
        return str(row.get("class"))

    def _position(self, row: Mapping[str, Any], location: str) -> tuple[int, int]:
        """Return the row and column of a rollout; raises DataError for one that the collection is not meant to hold."""
        task, repeat = row["task_index"], row["rollout_index"]
        if not (0 <= task < self._manifest.num_tasks and 0 <= repeat < self._manifest.num_repeats):
            raise DataError(f"{location}: task {task}, rollout {repeat}: not a rollout of this collection")
        return task, self._first_column_of_seed[row["seed"]] + repeat

    def _failures(self, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
        if path.exists():
            for line, location in _iter_lines(path):
                row = _parse_head(line, location)
                if row.get("seed") in self._first_column_of_seed:
                    yield row, location


def _iter_lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield complete lines and their locations."""
    try:
        with path.open("rb", buffering=BLOCK_BYTES) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield line, f"{path}:{number}"
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_head(line: bytes, location: str) -> Mapping[str, Any]:
    """Parse the fields before the messages, or the whole row if they are not a JSON object."""
    messages = line.find(_MESSAGES)
    if messages >= 0:
        try:
            return json.loads(line[:messages] + b"}")
        except ValueError:
            pass  # messages of something nested
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{location}: no valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{location}: a JSON object was expected, not {type(row).__name__}")
    return row


def _hash_answer(answer: object) -> int:
    """Return a number that is equal for equal answers, within this process."""
    if answer is None:
        return NO_ANSWER
    return hash(answer if isinstance(answer, str) else json.dumps(answer, sort_keys=True)) or 1
