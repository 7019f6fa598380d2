"""Checkpoints of a run: what they hold, writing them while training continues, and resuming from the newest."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nemo_rl.checkpoint import (
    CONFIG_FILE,
    DATALOADER_FILE,
    POLICY_DIRECTORY,
    REPLAY_BUFFER_FILE,
    RNG_FILE,
    CheckpointStore,
    TrainingInfo,
    load_state,
    restore_rng_state,
    save_rng_state,
    save_state,
)
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.errors import NemoRLError
from nemo_rl.experience.replay_buffer import REPLAY_BUFFER, buffer_state_to_dict
from nemo_rl.interfaces import Policy

logger = logging.getLogger(__name__)


class Source(Protocol):
    """A source of training data whose state can be saved."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values, among them `consumed_prompts` and `epoch`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Resumable(Protocol):
    """The parts of a run that a checkpoint saves."""

    @property
    def config(self) -> TrainingRunConfig | SFTRunConfig: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def source(self) -> Source: ...

    @property
    def checkpoints(self) -> CheckpointStore | None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """Position in training: the steps that the policy holds, and the state of the source that fed them."""

    step: int
    source_state: Mapping[str, Any]


async def restore(run: Resumable) -> Position:
    """Load the newest checkpoint into policy and source, and return its position; step 0 where there is none."""
    latest = run.checkpoints.latest() if run.checkpoints else None
    if latest is None:
        return Position(0, run.source.state_dict())
    await run.policy.load(latest.path / POLICY_DIRECTORY)
    run.source.load_state_dict(_read_source_state(latest.path))
    restore_rng_state(latest.path / RNG_FILE)
    logger.info("resumed from %s", latest.path)
    return Position(latest.step, run.source.state_dict())


class CheckpointWriter:
    """Writer of a run's checkpoints; one may still be on its way to disk while training continues.

    Leaving the context finishes a pending checkpoint, however the run ended, if the policy still can.
    """

    def __init__(self, run: Resumable) -> None:
        self._run = run
        self._pending: tuple[Path, TrainingInfo] | None = None

    async def begin(self, position: Position, metrics: Mapping[str, float]) -> None:
        """Begin a checkpoint of `position`, which the policy must hold; return once everything is copied.

        Does nothing without checkpointing, before step 1, and for a step that is already saved. A pending checkpoint is
        finished first.
        """
        await self.finish()
        run, store = self._run, self._run.checkpoints
        latest = store.latest() if store is not None else None
        if store is None or position.step == 0 or (latest is not None and latest.step == position.step):
            return
        path = store.begin(position.step)
        await run.policy.save(path / POLICY_DIRECTORY, save_optimizer=run.config.checkpointing.save_optimizer)
        (path / CONFIG_FILE).write_text(resolved_yaml(run.config))
        await asyncio.to_thread(_write_source_state, path, position.source_state)
        save_rng_state(path / RNG_FILE)
        info = TrainingInfo(
            step=position.step,
            consumed_prompts=position.source_state["consumed_prompts"],
            epoch=position.source_state["epoch"],
            metrics=metrics,
        )
        self._pending = path, info

    async def finish(self) -> None:
        """Return once the pending checkpoint, if any, is complete under its final name.

        Raises CheckpointError when writing fails, ConfigError for a metric that this run does not have.
        """
        if self._pending is None or self._run.checkpoints is None:
            return
        (path, info), self._pending = self._pending, None
        await self._run.policy.finish_save()
        checkpoint = await asyncio.to_thread(self._run.checkpoints.commit, path, info)
        logger.info("saved %s", checkpoint.path)

    @property
    def has_pending(self) -> bool:
        """Return whether a checkpoint is begun and not finished."""
        return self._pending is not None

    async def __aenter__(self) -> "CheckpointWriter":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.finish()
        except NemoRLError as save_error:
            if error is None:
                raise
            logger.warning("lost the pending checkpoint: %s", save_error)


def _write_source_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the source's state, its replay buffer in a separate file."""
    save_state(path / DATALOADER_FILE, {key: value for key, value in state.items() if key != REPLAY_BUFFER})
    if REPLAY_BUFFER in state:
        save_state(path / REPLAY_BUFFER_FILE, buffer_state_to_dict(state[REPLAY_BUFFER]))


def _read_source_state(path: Path) -> dict[str, Any]:
    state, buffer_file = load_state(path / DATALOADER_FILE), path / REPLAY_BUFFER_FILE
    return state | {REPLAY_BUFFER: load_state(buffer_file)} if buffer_file.exists() else state
