"""Checkpoints of a run: resuming from the newest one, and writing new ones while training continues."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nemo_rl import checkpoint
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.distributed.machine import write_private
from nemo_rl.errors import CheckpointError, NemoRLError
from nemo_rl.experience.replay_buffer_state import REPLAY_BUFFER, buffer_state_to_dict
from nemo_rl.interfaces import Policy

logger = logging.getLogger(__name__)

MODEL_LINK = "model"  # a link in the run directory to the weights of the best checkpoint


class ResumableSource(Protocol):
    """A source of training data whose state can be saved."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values, among them `consumed_prompts` and `epoch`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Resumable(Protocol):
    """The parts of a run that a checkpoint saves."""

    @property
    def config(self) -> TrainingRunConfig | SupervisedRunConfig: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def source(self) -> ResumableSource: ...

    @property
    def checkpoints(self) -> checkpoint.CheckpointStore | None: ...

    @property
    def run_dir(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class Position:
    """Position in training: the steps that the policy holds, and the state of the source that fed them."""

    step: int
    source_state: Mapping[str, Any]


async def restore(run: Resumable) -> Position:
    """Load the newest intact checkpoint into policy and source, and return its position; step 0 if there is none."""
    latest = await asyncio.to_thread(run.checkpoints.resume_point) if run.checkpoints else None
    if latest is None or run.checkpoints is None:
        return Position(0, run.source.state_dict())
    run.checkpoints.set_damaged_aside(latest)
    await run.policy.load(latest.path / checkpoint.POLICY_DIRECTORY)
    run.source.load_state_dict(_read_source_state(latest.path))
    checkpoint.restore_rng_state(latest.path / checkpoint.RNG_FILE)
    logger.info("resumed from %s", latest.path)
    return Position(latest.step, run.source.state_dict())


class CheckpointWriter:
    """Writer of a run's checkpoints; one may still be on its way to disk while training continues.

    A checkpoint that cannot be written, on a full disk for example, is removed and logged, and training continues; more
    than `checkpointing.max_failed_saves` in a row end the run, and so does a run's end without a newer one. Leaving the
    context finishes a pending checkpoint, however the run ended, if the policy still can.
    """

    def __init__(self, run: Resumable) -> None:
        self._run = run
        self._pending: tuple[Path, checkpoint.TrainingInfo] | None = None
        self._failures: list[CheckpointError] = []  # consecutive failures

    async def begin(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Begin a checkpoint of `position`, which the policy must hold; return once everything is copied.

        Does nothing without checkpointing, before step 1, and for a step that is already saved. A pending checkpoint is
        finished first. Raises CheckpointError after too many failures.
        """
        await self.finish()
        store = self._run.checkpoints
        latest = store.latest() if store is not None else None
        if store is None or position.step == 0 or (latest is not None and latest.step == position.step):
            return
        try:
            await self._write(store, position, metrics)
        except CheckpointError as error:
            await self._give_up(store, position.step, error)

    async def finish(self) -> None:
        """Return once the pending checkpoint, if any, is complete under its final name.

        Raises CheckpointError after too many failures, ConfigError for a metric that this run does not have.
        """
        store = self._run.checkpoints
        if self._pending is None or store is None:
            return
        (path, info), self._pending = self._pending, None
        try:
            await self._run.policy.finish_save()
            saved = await asyncio.to_thread(store.commit, path, info)
        except CheckpointError as error:
            await self._give_up(store, info.step, error)
            return
        self._failures.clear()
        store.link_best(self._run.run_dir / MODEL_LINK)
        logger.info("saved %s", saved.path)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the pending checkpoint, if it is that of `step`."""
        if self._pending is not None and self._pending[1].step == step:
            path, info = self._pending
            self._pending = path, replace(info, metrics={**info.metrics, **metrics})

    async def finish_if_written(self) -> None:
        """Complete the pending checkpoint if its files are written by now; raises as `finish`."""
        if self._pending is not None and await self._run.policy.has_written_save():
            await self.finish()

    async def _write(self, store: checkpoint.CheckpointStore, position: Position, metrics: Mapping[str, float]) -> None:
        """Write all files but the policy's, which copies its state and writes it in the background."""
        run = self._run
        path = store.begin(position.step)
        await run.policy.save(
            path / checkpoint.POLICY_DIRECTORY, save_optimizer=run.config.checkpointing.save_optimizer
        )
        info = checkpoint.TrainingInfo(
            step=position.step,
            consumed_prompts=position.source_state["consumed_prompts"],
            epoch=position.source_state["epoch"],
            metrics=metrics,
        )
        try:
            write_private(path / checkpoint.CONFIG_FILE, resolved_yaml(run.config))
            await asyncio.to_thread(_write_source_state, path, position.source_state)
            checkpoint.save_rng_state(path / checkpoint.RNG_FILE)
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(CheckpointError):
                await run.policy.finish_save()  # it must not write into a directory that is removed
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        self._pending = path, info

    async def _give_up(self, store: checkpoint.CheckpointStore, step: int, error: CheckpointError) -> None:
        """Remove a checkpoint that cannot be written; raise the first failure's error after too many in a row."""
        written = await asyncio.to_thread(store.discard, step)
        problem = f"the checkpoint of step {step} was not saved ({store.describe_space(written)}): {error}"
        self._failures.append(CheckpointError(problem))
        limit = self._run.config.checkpointing.max_failed_saves
        if len(self._failures) > limit:
            first, count = self._failures[0], len(self._failures)
            self._failures.clear()  # reported below
            text = f"{count} checkpoints in a row (checkpointing.max_failed_saves: {limit}), first: {first}"
            raise CheckpointError(text if count > 1 else str(first)) from error
        logger.error("%s; training continues without it", problem)

    @property
    def has_pending(self) -> bool:
        """Return whether a checkpoint is begun and not finished."""
        return self._pending is not None

    async def __aenter__(self) -> "CheckpointWriter":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.finish()
            if self._failures:
                raise self._failures[-1]
        except NemoRLError as save_error:
            if error is None:
                raise
            logger.warning("lost the pending checkpoint: %s", save_error)


def _write_source_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the source's state, its replay buffer in a separate file."""
    checkpoint.save_state(
        path / checkpoint.DATALOADER_FILE, {key: value for key, value in state.items() if key != REPLAY_BUFFER}
    )
    if REPLAY_BUFFER in state:
        checkpoint.save_state(path / checkpoint.REPLAY_BUFFER_FILE, buffer_state_to_dict(state[REPLAY_BUFFER]))


def _read_source_state(path: Path) -> dict[str, Any]:
    state, buffer_file = checkpoint.load_state(path / checkpoint.DATALOADER_FILE), path / checkpoint.REPLAY_BUFFER_FILE
    return state | {REPLAY_BUFFER: checkpoint.load_state(buffer_file)} if buffer_file.exists() else state
