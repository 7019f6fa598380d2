"""Collections and evaluations: missing rollouts are run, stored and reported; stored rollouts are scored again.

A collection keeps its identity beside its rollouts: every setting that decides samples and rewards, and no other.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from nemo_rl.algorithms.run import Interrupt, Interrupted, cancel_on_sigterm
from nemo_rl.collect.profile import Profile, compare, profile
from nemo_rl.collect.profile_report import comparison_table, open_report_console, summary_table, write_profile
from nemo_rl.collect.runner import CollectionLimits, collect_rollouts
from nemo_rl.collect.shards import Chunk, KeySpace, Task, TasksSummary, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.config.collect import EvalRunConfig, SampledRunConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError
from nemo_rl.experience.records import encode_json_line
from nemo_rl.experience.rollouts import RolloutDependencies
from nemo_rl.experience.scoring import PromptKey, rescore_rollouts
from nemo_rl.interfaces import Generation
from nemo_rl.launch import rollouts as rollout_setup
from nemo_rl.launch.sampled import CollectionInputs, engine_name, load_collection_inputs, open_engine
from nemo_rl.launch.training import open_console, tuned_garbage_collection
from nemo_rl.observability.console import CollectionProgress, make_collection_progress
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """Outcome of one start of a collection."""

    directory: Path
    num_rollouts: int  # of this start's seeds and chunk
    num_finished: int  # of them, those of earlier starts included
    num_given_up: int  # those that failed each time
    num_new: int  # finished in this start
    seconds: float  # that its rollouts took
    mean_reward: float | None  # of the new ones
    is_chunk: bool  # others have the rest of its seeds
    interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        return self.num_finished == self.num_rollouts


async def run_collection(config: SampledRunConfig, console: Console | None = None) -> CollectionResult:
    """Run what is missing of the configuration's seeds and chunk. Ctrl-C and SIGTERM end it with what is stored.

    Raises ConfigError for what cannot run, with each difference where the directory holds rollouts of another
    configuration; RolloutError and GenerationError where something breaks: what has ended by then is stored.
    """
    console = console or open_console(config.logger.level)
    interrupt, interrupted = Interrupt(), False
    async with AsyncExitStack() as stack:
        with cancel_on_sigterm():
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
        )


def format_result(result: CollectionResult) -> str:
    """Format what is stored now, and what to do next."""
    directory = result.directory
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.4f}"
    lines = [
        f"Rollouts    {result.num_finished:,} of {result.num_rollouts:,} in {directory}",
        f"This start  {result.num_new:,} in {result.seconds:.1f} s{reward}",
    ]
    if result.num_given_up:
        lines.append(f"Failed      {result.num_given_up:,} each time: {directory}/*_failures.jsonl")
    if result.is_complete and result.is_chunk:
        lines.append("Next        the other chunks, then nemo-rl merge and profile")
    elif result.is_complete:
        lines.append(f"Next        nemo-rl merge {directory}; nemo-rl profile {directory}")
    elif result.interrupted:
        lines.append("Continue    with the same command")
    return "\n".join(lines)


def run_evaluation(config: EvalRunConfig) -> Sequence[CollectionResult]:
    """Collect from one model after the other, each in its own directory, and print and store their profiles.

    Returns the collections in the order of `config.models`; after an interruption the last one is interrupted, and
    nothing is printed.
    """
    results = []
    for model in config.models:
        results.append(asyncio.run(run_collection(model)))
        if results[-1].interrupted:
            return results
    profiles = [
        profile(result.directory, seeds=[config.eval.seed], ks=sorted({1, config.eval.k})) for result in results
    ]
    console = open_report_console()
    for measured in profiles:
        console.print(summary_table(measured))
        write_profile(measured, measured.directory)
    if len(profiles) == 2:
        first, second = (model.policy.model_name for model in config.models)
        console.print(comparison_table(compare(*profiles), first, second))
    for model, result, measured in zip(config.models, results, profiles, strict=True):
        console.file.write(_format_headline(model, result, measured) + "\n")
    return results


def _format_headline(config: EvalRunConfig, result: CollectionResult, measured: Profile) -> str:
    """Format the score of a model.

    Example: "pass@4 0.9150 +- 0.0197 of checkpoints/step_50 over 200 tasks: evaluations/..."
    """
    name = config.eval.score_name
    score = measured.summaries[0].scores.get(name)
    if score is None or score.mean is None:
        return f"{name}: no task has enough rollouts: {result.directory}"
    error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
    failed = f", {result.num_given_up} rollouts failed" if result.num_given_up else ""
    where = Path(result.directory)
    return f"{name} {score.mean:.4f}{error} of {config.policy.model_name} over {score.num_tasks} tasks{failed}: {where}"


def open_stores(config: SampledRunConfig, inputs: CollectionInputs, stack: AsyncExitStack) -> list[RolloutStore]:
    """One a seed, each with the whole input beside it; raises ConfigError for rollouts of another run."""
    collection = config.collection
    tasks = _write_tasks(collection.output_dir, inputs)
    chunk = None
    if collection.chunk_index_and_count is not None:
        chunk = Chunk(*collection.chunk_index_and_count)
    keys = KeySpace(tasks.num_tasks, collection.num_repeats, chunk)
    served_model = None if inputs.served is None else inputs.served.model
    engine = engine_name(config, inputs)
    identity = run_identity(config, tasks, inputs.model_path, engine=engine, served_model=served_model)
    return [
        stack.enter_context(
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


def _write_tasks(directory: str, inputs: CollectionInputs) -> TasksSummary:
    rows = inputs.input_set.rows()
    return write_tasks(directory, (Task(p.prompt_id, p.dataset, p.task_name, row) for p, row in rows))


async def _run(
    config: SampledRunConfig, inputs: CollectionInputs, stores: list[RolloutStore], progress: CollectionProgress
) -> None:
    limits = CollectionLimits(
        concurrency=config.collection.concurrency,
        max_failures_in_a_row=config.collection.max_failures_in_a_row,
        write_token_ids=config.collection.write_token_ids,
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
        sampling = rollout_setup.make_sampling(config, inputs.encoder.stop_token_ids)
        await collect_rollouts(stores, prompts, dependencies, sampling, limits=limits, on_rollout=progress.rollout)


async def _open_dependencies(
    config: SampledRunConfig, inputs: CollectionInputs, generation: Generation, stack: AsyncExitStack
) -> RolloutDependencies:
    max_retries = None if config.server.address is None else 0  # a server's client retries
    return await rollout_setup.open_rollout_dependencies(
        config,
        await rollout_setup.open_rollout_parts(config, inputs.encoder, None, stack),
        generation,
        limits=rollout_setup.make_limits(config, max_retries=max_retries),
        prompt_sets=(inputs.prompt_set,),
        gym_dir=Path(config.collection.output_dir) / "nemo_gym",
        stack=stack,
    )


# Speed, location and patience: these may differ from one start to the next.
NON_IDENTITY_KEYS = frozenset(
    {
        "api_key_env",
        "base_urls",
        "batching",
        "device",
        "head_url",
        "in_actor",
        "in_tasks",
        "limits",
        "max_concurrency",
        "max_retries",
        "micro_batch_size",
        "num_replicas",
        "num_workers",
        "packing",
        "port_range_high",
        "port_range_low",
        "python",
        "remote",
        "retry_backoff_s",
        "start_timeout_s",
        "timeout_s",
        "verify_timeout_s",
    }
)
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 14  # of a weight file that are read for its digest


def run_identity(
    config: SampledRunConfig, tasks: TasksSummary, model_path: str, *, engine: str, served_model: str | None
) -> dict[str, Any]:
    """Return the identity for `RolloutStore.open`: the same for all seeds and chunks.

    `engine`: vllm, hf, completions or chat. `served_model`: as the server calls it, also where `server.model` leaves it
    to the server; None: an engine is started.
    """
    policy, collection = config.policy, config.collection
    return {
        "data": {"digest": tasks.digest},  # alike: tasks can be compared one by one
        "config": {
            "agent_names": [one.agent_name or config.data.default.agent_name for _, one in config.data.datasets],
            "env": {name: _identity_values(section) for name, section in config.env.items()},
            "scorers": {name: _identity_values(section) for name, section in config.scorers.items()},
            "gateway": {name: getattr(config.gateway, name) for name in ("tool_parser", "reasoning_parser")},
            "generation": _identity_values(policy.generation),
            "tokenizer": policy.tokenizer.model_dump(mode="json"),
            "max_total_sequence_length": policy.max_total_sequence_length,
            "max_rollout_turns": collection.max_rollout_turns,
            "trajectory_selection": config.rollout.trajectory_selection,
            "write_token_ids": collection.write_token_ids,
        },
        "model": {
            "name": policy.model_name,
            "digest": model_digest(Path(model_path)),
            "engine": engine,
            **_engine_identity(config, served_model),
        },
    }


def _engine_identity(config: SampledRunConfig, served_model: str | None) -> dict[str, Any]:
    if served_model is not None:
        return {"served_model": served_model}
    return {"precision": config.policy.precision, "vllm_kwargs": config.server.vllm_kwargs}


def _identity_values(section: Section) -> dict[str, Any]:
    values: Mapping[str, Any] = section.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in NON_IDENTITY_KEYS}


def model_digest(directory: Path) -> str | None:
    """Return a digest of the names, sizes and sampled blocks of a model's files; None for a name on a hub.

    Two checkpoints of one run differ in every block; whole files would take minutes to read.
    """
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".json", ".gguf") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for start in sorted({size * block // NUM_BLOCKS for block in range(NUM_BLOCKS)}):
                digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()


@dataclass(slots=True)
class MeanReward:
    """Running mean over the rollouts that have a reward."""

    total: float = 0.0
    num_rewarded: int = 0
    num_failed: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        reward = row.get("reward")
        if reward is None:
            self.num_failed += 1
        else:
            self.total += reward
            self.num_rewarded += 1

    def __str__(self) -> str:
        mean = f"{self.total / self.num_rewarded:.4f}" if self.num_rewarded else "none"
        return f"mean reward {mean} over {self.num_rewarded} rollouts, {self.num_failed} failed"


def rescore_file(config: TrainingRunConfig, rollouts: Path, output: Path) -> tuple[MeanReward, MeanReward]:
    """Write every line of `rollouts` with new rewards to `output`, atomically; return the mean rewards before and
    after.

    Raises ConfigError without scorers and for an `output` that exists, DataError for a line that is no rollout.
    """
    if not config.scorers:
        raise ConfigError("scorers", {}, "there is nothing to score with")
    if output.exists():
        raise ConfigError("output", str(output), "exists already")
    train, validation = rollout_setup.load_prompts(config)
    prompts = {(p.dataset, p.prompt_id): p for prompt_set in (train, *validation) for p in prompt_set.prompts}
    before, after = MeanReward(), MeanReward()
    unfinished = output.with_name(f".{output.name}.unfinished")
    with unfinished.open("wb") as file:
        asyncio.run(_write(_tally_rewards(read_jsonl(rollouts), before), file, config, prompts, after))
    unfinished.replace(output)
    return before, after


async def _write(
    rows: Iterator[dict[str, Any]],
    file: BinaryIO,
    config: TrainingRunConfig,
    prompts: Mapping[PromptKey, Prompt],
    mean: MeanReward,
) -> None:
    async with AsyncExitStack() as stack:
        scoring = await rollout_setup.open_scorers(config, None, stack)
        alone = {name for name, section in config.env.items() if not section.has_own_rewards}
        limit_s = config.rollout.stall_timeout_s
        async for row in rescore_rollouts(rows, prompts, scoring, scorer_only_tasks=alone, stall_timeout_s=limit_s):
            file.write(encode_json_line(row))
            mean.add(row)


def _tally_rewards(rows: Iterator[dict[str, Any]], mean: MeanReward) -> Iterator[dict[str, Any]]:
    for row in rows:
        mean.add(row)
        yield row
