"""Saving a run where its state is whole, and going on from there."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.checkpoint import (
    CONFIG_FILE,
    DATALOADER_FILE,
    POLICY_DIRECTORY,
    REPLAY_BUFFER_FILE,
    RNG_FILE,
    Checkpoint,
    TrainingInfo,
    load_state,
    restore_rng_state,
    save_rng_state,
    save_state,
)
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.experience.buffer_state import REPLAY_BUFFER, to_plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands: the steps that the policy holds, and what the source has drawn for them."""

    step: int
    source_state: Mapping[str, Any]


async def restore(run: TrainingRun) -> Position:
    """Load the newest checkpoint into the policy and the source; the start where there is none."""
    latest = run.checkpoints.latest() if run.checkpoints else None
    if latest is None:
        return Position(0, run.source.state_dict())
    await run.policy.load(latest.path / POLICY_DIRECTORY)
    run.source.load_state_dict(_read_source_state(latest.path))
    restore_rng_state(latest.path / RNG_FILE)
    logger.info("resumed from %s", latest.path)
    return Position(latest.step, run.source.state_dict())


async def save(run: TrainingRun, position: Position, metrics: Mapping[str, float]) -> Checkpoint | None:
    """Write a checkpoint of `position`, which the policy must hold. None without checkpointing or before step 1."""
    store = run.checkpoints
    if store is None or position.step == 0:
        return None
    latest = store.latest()
    if latest is not None and latest.step == position.step:
        return latest
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
    checkpoint = await asyncio.to_thread(store.commit, path, info)
    logger.info("saved %s", checkpoint.path)
    return checkpoint


def _write_source_state(path: Path, state: Mapping[str, Any]) -> None:
    """The replay buffer, which the state refers to, in a file of its own."""
    save_state(path / DATALOADER_FILE, {key: value for key, value in state.items() if key != REPLAY_BUFFER})
    if REPLAY_BUFFER in state:
        save_state(path / REPLAY_BUFFER_FILE, to_plain(state[REPLAY_BUFFER]))


def _read_source_state(path: Path) -> dict[str, Any]:
    state, buffer_file = load_state(path / DATALOADER_FILE), path / REPLAY_BUFFER_FILE
    return state | {REPLAY_BUFFER: load_state(buffer_file)} if buffer_file.exists() else state
