"""One training run: its parts, the devices they share, its checkpoints, and its stop on a signal.

launch/training.py makes a `TrainingRun`, loop.py uses it. Ctrl-C and SIGTERM: the first requests a stop where the run's
state is consistent, the second stops immediately.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nemo_rl import checkpoint
from nemo_rl.algorithms.validation import Validator
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.supervised import SupervisedRunConfig
from nemo_rl.distributed.machine import write_private
from nemo_rl.errors import CheckpointError, NemoRLError
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.experience.records import RolloutDetails, RolloutWriter
from nemo_rl.experience.replay_buffer import REPLAY_BUFFER, buffer_state_to_dict
from nemo_rl.experience.supervision import cancel_tasks
from nemo_rl.interfaces import CollectedGroups, Generation, GroupSource, Logger, LossFn, OffloadPart, Policy, WeightSync
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class Interrupted(NemoRLError):
    """A stop was requested; the guarded work was cancelled."""


@contextlib.contextmanager
def cancel_on_sigterm() -> Iterator[None]:
    """Cancel the current task on SIGTERM, as asyncio.run does on Ctrl-C; for the time before `Interrupt.listen`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Interrupt:
    """A request to stop, checked by the loop between its stages; cancels guarded work.

    Consumes: SIGINT and SIGTERM. Unblocks: `guard`. A second signal cancels the task that called `listen`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested."""
        return self._event.is_set()

    def request(self) -> None:
        """Request the stop, as a signal does."""
        self._event.set()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Handle both signals while the block runs."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def on_signal() -> None:
            if self.requested and task is not None:
                logger.warning("stopping immediately")
                task.cancel()
            else:
                logger.warning("stopping after the current optimizer step; press Ctrl-C again to stop immediately")
                self.request()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`; cancel it and raise Interrupted where a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted("stopped by a signal")
        finally:
            stop.cancel()
            await cancel_tasks([task])


class Source(Protocol):
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
    def source(self) -> Source: ...

    @property
    def checkpoints(self) -> checkpoint.CheckpointStore | None: ...


@dataclass(frozen=True, slots=True)
class Position:
    """Position in training: the steps that the policy holds, and the state of the source that fed them."""

    step: int
    source_state: Mapping[str, Any]


async def restore(run: Resumable) -> Position:
    """Load the newest intact checkpoint into policy and source, and return its position; step 0 where there is none."""
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
        self._failures: list[CheckpointError] = []  # in a row

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
            self._failures.clear()  # told here
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Device sharing: calls sleep, wake, offload and onload around generation and training; no-ops without sharing.

    A run begins with both models on the device. In every step: `prepare_for_training`, train, publish inside
    `delivery`, generate. From the first refit on, the engine's cache and the policy are never there together.
    """

    policy: Policy
    generation: Generation
    shares_device: bool
    teachers_share_device: bool = False  # some teacher shares the policy's device

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Put the engine to sleep while reward models score inside the block."""
        if self.shares_device:
            await self.generation.sleep()
        try:
            yield
        finally:
            if self.shares_device:
                await self.generation.wake()

    @asynccontextmanager
    async def teacher_phase(self) -> AsyncIterator[None]:
        """Clear the device for teachers inside the block, then load the policy for training."""
        if self.shares_device:
            await self.generation.sleep(discards_weights=True)
        elif self.teachers_share_device:
            await self.policy.offload()
        try:
            yield
        finally:
            if self.shares_device or self.teachers_share_device:
                await self.policy.onload()

    async def prepare_for_training(self) -> None:
        """Put the engine to sleep, without its weights, which the next refit restores; then load the policy."""
        if self.shares_device:
            await self.generation.sleep(discards_weights=True)
            await self.policy.onload()

    @asynccontextmanager
    async def delivery(self) -> AsyncIterator[None]:
        """Keep only the weights of policy and engine on the device inside, and the engine alone afterwards."""
        if self.shares_device:
            await self.policy.offload("optimizer", "reference")
            await self.generation.wake("weights")
        yield
        if self.shares_device:
            await self.policy.offload("weights")
            await self.generation.wake("kv_cache")

    @asynccontextmanager
    async def policy_turn(self, *parts: OffloadPart) -> AsyncIterator[None]:
        """Give the device to these parts of the policy inside, between refit and training; to the engine afterwards."""
        if self.shares_device:
            await self.generation.sleep()
            await self.policy.onload(*parts)
        yield
        if self.shares_device:
            await self.policy.offload(*parts)
            await self.generation.wake()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of a step with every key that the loss reads."""

    batch: TrainingBatch
    rows: tuple[BatchRow, ...]  # the origin of each row of the batch
    metrics: dict[str, float]  # of the batch and of the rollouts


class Algorithm(Protocol):
    """The stages of one algorithm between rollouts and optimizer (grpo.py, distillation.py)."""

    @property
    def loss_fn(self) -> LossFn: ...

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> StepBatch:
        """Leave the device to training. Raises RolloutError where no rollout is left to train on."""
        ...


class TeacherStage(Protocol):
    """Queries teachers and adds, in place, the keys of a batch that its loss or advantages read."""

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        """Return metrics of the step; `rows` has one item for each row of the batch."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The parts of one run on rollouts."""

    config: TrainingRunConfig
    run_dir: Path
    num_steps: int  # at most: max_num_steps, or what the data allows
    algorithm: Algorithm
    source: GroupSource
    generation: Generation
    policy: Policy
    placement: Placement
    weight_sync: WeightSync
    validator: Validator | None
    checkpoints: checkpoint.CheckpointStore | None
    logger: Logger
    progress: Progress
    validation_rollouts: RolloutWriter | None
    interrupt: Interrupt
    details: RolloutDetails | None = None

    @property
    def generation_phase(self) -> str:
        """Return the timer's name for the wait for rollouts."""
        return "exposed_generation" if self.config.algorithm.background.enabled else "generation"
