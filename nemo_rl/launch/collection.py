"""Collections: missing rollouts are run, stored and reported."""

import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from nemo_rl.algorithms.interrupt import Interrupt, Interrupted, cancel_on_termination
from nemo_rl.collect.runner import CollectionLimits, collect_rollouts
from nemo_rl.collect.shards import (
    Chunk,
    KeySpace,
    OtherCollectionError,
    OverlongInput,
    Task,
    TasksSummary,
    write_tasks,
)
from nemo_rl.collect.store import RolloutStore, discard_empty_collection
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.experience.rollout_dependencies import RolloutDependencies
from nemo_rl.interfaces import Generation
from nemo_rl.launch.collection_identity import run_identity
from nemo_rl.launch.rollout_layer import open_rollout_dependencies, open_rollout_parts
from nemo_rl.launch.sampled import CollectionInputs, engine_name, find_device, load_collection_inputs, open_engine
from nemo_rl.launch.sampling import make_limits, make_sampling
from nemo_rl.launch.training import open_console, tuned_garbage_collection
from nemo_rl.observability.console import CollectionProgress, make_collection_progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """Outcome of one start of a collection."""

    directory: Path
    num_rollouts: int  # rollouts of this start's seeds and chunk
    num_finished: int  # finished ones, those of earlier starts included
    num_given_up: int  # those that failed each time
    num_new: int  # finished in this start
    seconds: float  # duration of its rollouts
    mean_reward: float | None  # mean over the new rollouts
    is_chunk: bool  # others have the rest of its seeds
    interrupted: bool = False
    overlong: OverlongInput | None = None  # None: every prompt fits

    @property
    def is_complete(self) -> bool:
        return self.num_finished == self.num_rollouts


async def run_collection(config: SampledRunConfig, console: Console | None = None) -> CollectionResult:
    """Run what is missing of the configuration's seeds and chunk. A signal to stop ends it with what is stored.

    Raises ConfigError for what cannot run, with each difference if the directory holds rollouts of another
    configuration; RolloutError and GenerationError if something breaks: what has ended by then is stored.
    """
    console = console or open_console(config.logger.level)
    interrupt, interrupted = Interrupt(), False
    async with AsyncExitStack() as stack:
        with cancel_on_termination():
            inputs = await load_collection_inputs(config, stack)
            stores = open_stores(config, inputs, stack)
        progress = make_collection_progress(
            console,
            wanted=config.logger.progress,
            total=sum(len(store.keys) for store in stores),
            num_finished=sum(store.num_finished for store in stores),
        )
        with interrupt.listen():
            try:
                await interrupt.guard(_run(config, inputs, stores, progress))
            except Interrupted:
                interrupted = True
        return CollectionResult(
            Path(config.collection.output_dir),
            num_rollouts=progress.total,
            num_finished=progress.num_finished,
            num_given_up=sum(store.num_given_up for store in stores),
            num_new=progress.num_new,
            seconds=progress.seconds,
            mean_reward=progress.mean_reward,
            is_chunk=config.collection.chunk_index_and_count is not None,
            interrupted=interrupted,
            overlong=inputs.overlong,
        )


def format_result(result: CollectionResult) -> str:
    """Format what is stored now, and what to do next."""
    directory = result.directory
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.4f}"
    lines = [
        f"Rollouts    {result.num_finished:,} of {result.num_rollouts:,} in {directory}",
        f"This start  {result.num_new:,} in {result.seconds:.1f} s{reward}",
    ]
    if result.overlong is not None:
        lines.append(f"Over-long   {result.overlong.describe()}")
    if result.num_given_up:
        lines.append(f"Failed      {result.num_given_up:,} each time: {directory}/*_failures.jsonl")
    if result.is_complete and result.is_chunk:
        lines.append("Next        the other chunks, then nemo-rl merge and profile")
    elif result.is_complete:
        lines.append(f"Next        nemo-rl merge {directory}; nemo-rl profile {directory}")
    elif result.interrupted:
        lines.append("Continue    with the same command")
    return "\n".join(lines)


def open_stores(config: SampledRunConfig, inputs: CollectionInputs, stack: AsyncExitStack) -> list[RolloutStore]:
    """Open one store per seed, with the whole input beside them; raises ConfigError for rollouts of another run.

    A directory of another run without a rollout is started over.
    """
    try:
        return _open_stores(config, inputs, stack)
    except OtherCollectionError as error:
        if discard_empty_collection(config.collection.output_dir):
            logger.info("beginning anew, since no rollout was stored: %s", error)
        return _open_stores(config, inputs, stack)  # another chunk's job may have started it over meanwhile


def _open_stores(config: SampledRunConfig, inputs: CollectionInputs, stack: AsyncExitStack) -> list[RolloutStore]:
    collection = config.collection
    tasks = _write_tasks(collection.output_dir, inputs)
    chunk = None
    if collection.chunk_index_and_count is not None:
        chunk = Chunk(*collection.chunk_index_and_count)
    keys = KeySpace(tasks.num_tasks, collection.num_repeats, chunk)
    served_model = None if inputs.served is None else inputs.served.model
    engine = engine_name(config, inputs)
    identity = run_identity(
        config, tasks, inputs.model_path, engine=engine, served_model=served_model, overlong=inputs.overlong
    )
    with ExitStack() as opened:
        stores = [
            opened.enter_context(
                RolloutStore.open(
                    collection.output_dir,
                    seed=seed,
                    keys=keys,
                    identity=identity,
                    max_attempts=collection.max_attempts,
                )
            )
            for seed in collection.all_seeds
        ]
        stack.push(opened.pop_all())
    return stores


def _write_tasks(directory: str, inputs: CollectionInputs) -> TasksSummary:
    rows = inputs.input_set.rows()
    return write_tasks(directory, (Task(p.prompt_id, p.dataset, p.task_name, row, p.agent_name) for p, row in rows))


async def _run(
    config: SampledRunConfig, inputs: CollectionInputs, stores: list[RolloutStore], progress: CollectionProgress
) -> None:
    limits = CollectionLimits(
        concurrency=config.collection.concurrency,
        max_failures_in_a_row=config.collection.max_failures_in_a_row,
        write_token_ids=config.collection.write_token_ids,
        write_token_columns=config.collection.write_token_columns,
    )
    for store in stores:
        logger.info("%s: %d of %d rollouts are missing", store.files.rollouts, store.num_missing, len(store.keys))
    async with AsyncExitStack() as stack:
        if not any(store.num_missing for store in stores):
            for store in stores:
                if not store.is_done:
                    store.finish()
            return
        generation = await open_engine(config, inputs, stack)
        dependencies = await _open_dependencies(config, inputs, generation, stack)
        stack.enter_context(tuned_garbage_collection())
        progress.start()
        stack.callback(progress.close)
        prompts = inputs.input_set.prompts
        sampling = make_sampling(config, inputs.encoder.stop_token_ids)
        await collect_rollouts(
            stores,
            prompts,
            dependencies,
            sampling,
            limits=limits,
            on_rollout=progress.rollout,
            masked_tasks=inputs.masked_tasks,
        )


async def _open_dependencies(
    config: SampledRunConfig, inputs: CollectionInputs, generation: Generation, stack: AsyncExitStack
) -> RolloutDependencies:
    max_retries = None if config.server.address is None else 0  # a server's client retries
    return await open_rollout_dependencies(
        config,
        await open_rollout_parts(config, inputs.encoder, stack, device=find_device(config)),
        generation,
        limits=make_limits(config, max_retries=max_retries),
        prompt_sets=(inputs.prompt_set,),
        gym_dir=Path(config.collection.output_dir) / "nemo_gym",
        stack=stack,
    )
