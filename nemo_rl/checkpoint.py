"""Checkpoints on disk: complete or absent, ranked by a metric, verified and found on resume.

A checkpoint is written to `tmp_step_N` and renamed to `step_N` once it is complete and on disk, so that a process
killed at any point leaves the old or the new one. An existing `step_N` is `old_step_N` between the two renames. Inside:

    manifest.json        size and SHA-256 of every other file; written last
    training_info.json   TrainingInfo
    config.yaml          the run's resolved configuration
    policy/              weights/, tokenizer/, optimizer/: written by `Policy.save`
    train_dataloader.pt  the source's state
    replay_buffer.pt     of an asynchronous run: complete groups, and prompts whose rollouts were running
    rng_state.pt         the driver's random states
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
INFO_FILE = "training_info.json"
CONFIG_FILE = "config.yaml"
POLICY_DIRECTORY = "policy"
WEIGHTS_DIRECTORY = "weights"  # a Hugging Face directory in POLICY_DIRECTORY
DATALOADER_FILE = "train_dataloader.pt"
REPLAY_BUFFER_FILE = "replay_buffer.pt"
RNG_FILE = "rng_state.pt"

HASH_THREADS = 4
HASH_CHUNK_BYTES = 1 << 20
MAX_JSON_BYTES = 16 << 20  # format version of the two JSON files

_DIRECTORY = re.compile(r"(tmp_|old_|)step_(\d+)")


@dataclass(frozen=True, slots=True)
class TrainingInfo:
    """Training progress at a checkpoint."""

    step: int  # optimizer batches done
    consumed_prompts: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of this step: "train:reward", "val:accuracy"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    info: TrainingInfo

    @property
    def step(self) -> int:
        return self.info.step

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in _files(self.path).values())


class CheckpointStore:
    """The checkpoints of one run; used by one process.

    Example: `path = store.begin(10)`, then write into `path`, then `store.commit(path, info)` gives `step_10`.
    """

    def __init__(
        self, config: CheckpointingConfig, directory: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock of `checkpoint_must_save_by`. Raises ConfigError for a metric without its prefix."""
        if config.metric_name is not None and not config.metric_name.startswith(("val:", "train:")):
            raise ConfigError("checkpointing.metric_name", config.metric_name, 'must begin with "val:" or "train:"')
        self.directory = directory
        self._config = config
        self._resume_point: Checkpoint | None = None  # once verified, until another checkpoint is begun
        must_save_by = config.checkpoint_must_save_by
        self._deadline = SaveDeadline(parse_duration_s(must_save_by), clock) if must_save_by else None

    def should_save(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether to save now; call it once after each step, since it measures how long steps take."""
        deadline_reached = self._deadline is not None and self._deadline.is_due()
        return self._config.enabled and (is_last or deadline_reached or step % self._config.save_period == 0)

    @property
    def deadline_reached(self) -> bool:
        """Return whether `checkpoint_must_save_by` has requested a save."""
        return self._deadline is not None and self._deadline.has_fired

    def begin(self, step: int) -> Path:
        """Create an empty directory for the checkpoint of `step`; leftovers of interrupted saves are removed."""
        self._resume_point = None
        with _raise_checkpoint_error(f"the checkpoint of step {step} cannot be begun in {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._recover_interrupted()
            path = self.directory / f"tmp_step_{step}"
            path.mkdir()
        return path

    def commit(self, path: Path, info: TrainingInfo) -> Checkpoint:
        """Make the files under `path` the checkpoint of its step, then delete checkpoints that are not to be kept.

        Raises CheckpointError when the disk fails, and ConfigError for a metric that this run does not have; the
        checkpoint is complete then.
        """
        if path != self.directory / f"tmp_step_{info.step}":
            raise CheckpointError(f"{path} was not begun for step {info.step}")
        final = self.directory / f"step_{info.step}"
        with _raise_checkpoint_error(f"{final} cannot be written"):
            (path / INFO_FILE).write_text(_to_json(info))
            write_manifest(path, info.step)
            _fsync_tree(path)
            if final.exists():
                os.rename(final, self.directory / f"old_step_{info.step}")
            os.rename(path, final)
            _fsync(self.directory)
            self._recover_interrupted()
            self._apply_retention(info)
        return Checkpoint(final, info)

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return all complete checkpoints, oldest step first."""
        if not self.directory.is_dir():
            return ()
        found: dict[int, Checkpoint] = {}
        for prefix in ("old_", ""):  # the final name takes precedence
            for step, path in self._directories_by_step(prefix).items():
                checkpoint = _read_checkpoint(path)
                if checkpoint is not None:
                    found[step] = checkpoint
        return tuple(found[step] for step in sorted(found))

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint with the most steps."""
        return max(self.checkpoints(), key=lambda c: c.step, default=None)

    def resume_point(self) -> Checkpoint | None:
        """Return the newest checkpoint whose files are all as they were written; None if nothing was saved.

        A damaged one is logged by the name of its file, and the one before is taken. Raises CheckpointError if all
        are damaged: the run would silently start afresh. Files are read once, until a checkpoint is begun.
        """
        if self._resume_point is not None:
            return self._resume_point
        if not self.directory.is_dir():
            return None
        with _raise_checkpoint_error(f"the checkpoints in {self.directory} cannot be read"):
            self._recover_interrupted()
            by_step = self._directories_by_step("")
            problems: list[str] = []
            for step in sorted(by_step, reverse=True):
                try:
                    self._resume_point = verify_checkpoint(by_step[step])
                    return self._resume_point
                except CheckpointError as error:
                    problems.append(str(error))
                    logger.error("damaged checkpoint: %s", error)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be resumed from: {'; '.join(problems)}; "
                "remove them, or name another checkpointing.checkpoint_dir, to start afresh"
            )
        return None

    def set_damaged_aside(self, resumed: Checkpoint) -> None:
        """Rename the damaged checkpoints after the one that is resumed from: their steps will be saved again."""
        with _raise_checkpoint_error(f"damaged checkpoints in {self.directory} cannot be renamed"):
            for step, path in self._directories_by_step("").items():
                if step > resumed.step:
                    aside = self.directory / f"damaged_step_{step}"
                    shutil.rmtree(aside, ignore_errors=True)
                    os.rename(path, aside)
                    logger.error(
                        "moved damaged checkpoint %s to %s; resuming from step %d", path, aside.name, resumed.step
                    )

    def discard(self, step: int) -> int:
        """Remove the unfinished checkpoint of `step`; return its size in bytes."""
        path = self.directory / f"tmp_step_{step}"
        num_bytes = sum(file.stat().st_size for file in _files(path).values())
        shutil.rmtree(path, ignore_errors=True)
        return num_bytes

    def describe_space(self, written_bytes: int) -> str:
        """Describe the space that a checkpoint needs and the space that is free, for errors."""
        latest = self.latest()
        needed = (
            f"needs about {format_bytes(latest.num_bytes)}" if latest else f"needs over {format_bytes(written_bytes)}"
        )
        with contextlib.suppress(OSError):
            return f"a checkpoint {needed}, {format_bytes(shutil.disk_usage(self.directory).free)} are free"
        return f"a checkpoint {needed}"

    def best(self) -> Checkpoint | None:
        """Return the checkpoint that `metric_name` ranks first; the newest without a metric."""
        return next(iter(self._ranked()), None)

    def link_best(self, link: Path) -> None:
        """Make `link` lead to the weights of the best checkpoint, if it has whole ones; a file or directory stays."""
        best = self.best()
        weights = None if best is None else best.path / POLICY_DIRECTORY / WEIGHTS_DIRECTORY
        if weights is None or not weights.is_dir() or (link.exists() and not link.is_symlink()):
            return
        draft = link.with_name(f".{link.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a full disk, or one without links: the checkpoint has its own path
            draft.unlink(missing_ok=True)
            draft.symlink_to(os.path.relpath(weights.resolve(), link.parent.resolve()))
            os.replace(draft, link)

    def _ranked(self) -> list[Checkpoint]:
        """Return checkpoints best first: by the metric, then the newer; those without the metric come last."""
        name, sign = self._config.metric_name, 1 if self._config.higher_is_better else -1

        def rank(checkpoint: Checkpoint) -> tuple[float, int]:
            value = checkpoint.info.metrics.get(name, math.nan) if name else 0.0
            return (-math.inf if math.isnan(value) else sign * value, checkpoint.step)

        return sorted(self.checkpoints(), key=rank, reverse=True)

    def _apply_retention(self, committed: TrainingInfo) -> None:
        ranked = self._ranked()
        self._check_metric(ranked, committed)
        if self._config.keep_top_k is None:
            return
        newest = max(c.step for c in ranked)
        for checkpoint in ranked[self._config.keep_top_k :]:
            if checkpoint.step not in (newest, committed.step):
                trash_path = self.directory / f"tmp_step_{checkpoint.step}"
                os.rename(checkpoint.path, trash_path)
                shutil.rmtree(trash_path)

    def _check_metric(self, checkpoints: list[Checkpoint], committed: TrainingInfo) -> None:
        """Raise ConfigError for a metric that no checkpoint has, once the committed one has others of its split."""
        name = self._config.metric_name
        if name is None or any(name in c.info.metrics for c in checkpoints):
            return
        split = name.split(":")[0] + ":"
        known = [metric for metric in committed.metrics if metric.startswith(split)]
        if known:
            raise ConfigError("checkpointing.metric_name", name, f"unknown metric; known: {', '.join(sorted(known))}")
        logger.warning("%s was not measured at step %d: its checkpoint ranks last", name, committed.step)

    def _directories_by_step(self, prefix: str) -> dict[int, Path]:
        """Return directories by step; `prefix` is "tmp_", "old_" or "" (final)."""
        matches = ((_DIRECTORY.fullmatch(path.name), path) for path in self.directory.iterdir() if path.is_dir())
        return {int(match[2]): path for match, path in matches if match is not None and match[1] == prefix}

    def _recover_interrupted(self) -> None:
        """Finish an interrupted commit: restore an old step whose replacement is missing."""
        for step, path in self._directories_by_step("old_").items():
            final = self.directory / f"step_{step}"
            if final.exists():
                shutil.rmtree(path)
            else:
                os.rename(path, final)
        for path in self._directories_by_step("tmp_").values():
            shutil.rmtree(path)


def write_manifest(path: Path, step: int) -> None:
    """Write size and SHA-256 of every file below `path`: under another name first, so that it is complete or absent."""
    files = _files(path)
    entries = dict(zip(files, _hash_files(list(files.values())), strict=True))
    text = json.dumps({"step": step, "files": entries}, indent=1) + "\n"
    draft = path / f"{MANIFEST_FILE}.tmp"
    draft.write_text(text)
    _fsync(draft)
    os.rename(draft, path / MANIFEST_FILE)


def verify_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory; raises CheckpointError for one that is not as it was written."""
    manifest = _read_json(path / MANIFEST_FILE)
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{path / MANIFEST_FILE} lists no files")
    found = _files(path)
    for name, entry in files.items():
        size = found[name].stat().st_size if name in found else None
        if size is None:
            raise CheckpointError(f"{path / name} is missing")
        if size != entry.get("size"):
            raise CheckpointError(f"{path / name} has {size} bytes, and was written with {entry.get('size')}")
    if foreign := sorted(name for name in found.keys() - files.keys() if name.startswith(POLICY_DIRECTORY)):
        raise CheckpointError(f"{path / foreign[0]} was not written with the checkpoint")
    for name, actual in zip(files, _hash_files([found[name] for name in files]), strict=True):
        if actual["sha256"] != files[name].get("sha256"):
            raise CheckpointError(f"{path / name} has other content than was written (SHA-256)")
    info = _parse_info(path, _read_json(path / INFO_FILE))
    if manifest.get("step") != info.step:
        raise CheckpointError(f"{path / MANIFEST_FILE} has step {manifest.get('step')!r}, not {info.step}")
    return Checkpoint(path, info)


def format_bytes(num_bytes: int) -> str:
    """Return a size as people read it.

    Example: 1_500_000_000 is "1.50 GB".
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


class SaveDeadline:
    """Deadline that requests one save when another step might not end in time."""

    def __init__(self, must_save_by_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._deadline = self._last + must_save_by_s
        self._longest_s = 0.0  # seconds of a step, including everything between two calls
        self._calls = 0
        self.has_fired = False

    def is_due(self) -> bool:
        """Return True once: when now plus the longest step so far is past the deadline. Call it after each step.

        Time before the first call includes the start of the engine; it counts only until there is another step.
        """
        now = self._clock()
        elapsed_s, self._last = now - self._last, now
        self._longest_s = elapsed_s if self._calls < 2 else max(self._longest_s, elapsed_s)
        self._calls += 1
        if self.has_fired or now + self._longest_s < self._deadline:
            return False
        self.has_fired = True
        return True


def parse_duration_s(text: str) -> float:
    """Return the seconds of `[DD:]HH:MM:SS`.

    Example: "00:03:30:00" is 12600.
    """
    seconds = 0
    for part, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400), strict=False):
        seconds += int(part) * unit
    return float(seconds)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write plain values and tensors; raises CheckpointError for anything that `load_state` would refuse."""
    with _raise_checkpoint_error(f"{path} cannot be written"):
        try:
            torch.save(dict(state), path)
        except RuntimeError as error:  # torch's own writer, if the disk is full
            raise CheckpointError(f"{path} cannot be written: {error}") from error
    load_state(path)


def load_state(path: Path) -> dict[str, Any]:
    """Read a file of `save_state` without executing anything in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types here: pickle's, zip's, its own
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def save_rng_state(path: Path) -> None:
    """Write the random states of this process: Python, NumPy, torch, and each CUDA device's."""
    numpy_state: Any = np.random.get_state(legacy=False)
    state = {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {k: _to_builtin(v) for k, v in numpy_state["state"].items()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }
    save_state(path, state)


def restore_rng_state(path: Path) -> None:
    """Restore the states of `save_rng_state`; those of devices that this machine lacks are ignored."""
    state = load_state(path)
    numpy_state = state["numpy"]
    key = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


def _to_builtin(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _to_json(info: TrainingInfo) -> str:
    metrics = {name: float(value) for name, value in info.metrics.items()}
    content = {
        "step": info.step,
        "consumed_prompts": info.consumed_prompts,
        "epoch": info.epoch,
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def _read_checkpoint(path: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory, its files unverified; None, with a warning, if it is incomplete."""
    try:
        return Checkpoint(path, _parse_info(path, _read_json(path / INFO_FILE)))
    except CheckpointError as error:
        logger.warning("ignoring incomplete checkpoint %s: %s", path, error)
        return None


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises CheckpointError for anything else."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than {format_bytes(MAX_JSON_BYTES)}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


def _parse_info(path: Path, content: dict[str, Any]) -> TrainingInfo:
    """Return the training info of the checkpoint in `path`; raises CheckpointError for an invalid value."""
    match = _DIRECTORY.fullmatch(path.name)
    for name in ("step", "consumed_prompts", "epoch"):
        value = content.get(name)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{path / INFO_FILE}: {name} is {value!r}, not a count")
    if match is not None and content["step"] != int(match[2]):
        raise CheckpointError(f"{path / INFO_FILE}: step is {content['step']}, in the directory of step {match[2]}")
    try:
        metrics = {str(name): float(value) for name, value in content["metrics"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path / INFO_FILE}: metrics are no numbers by name: {error!r}") from error
    return TrainingInfo(content["step"], content["consumed_prompts"], content["epoch"], metrics)


def _files(path: Path) -> dict[str, Path]:
    """Return all files below a checkpoint but its manifest, by their names within it, sorted."""
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    return {name: found[name] for name in sorted(found) if not name.startswith(MANIFEST_FILE)}


def _hash_files(files: list[Path]) -> list[dict[str, Any]]:
    """Return size and SHA-256 of each file; several at once, since hashing leaves the interpreter free."""
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="checkpoint-hash") as executor:
        return list(executor.map(_hash_file, files))


def _hash_file(file: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def _fsync_tree(root: Path) -> None:
    """Sync all files and directories below `root` to disk."""
    for directory, _, files in os.walk(root):
        for name in files:
            _fsync(Path(directory) / name)
        _fsync(Path(directory))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _raise_checkpoint_error(problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{problem}: {error}") from error
