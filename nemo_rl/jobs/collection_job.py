"""A collection as Slurm jobs: the array tasks that are missing, the files they read, and the jobs that run them."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.collect.shards import ShardFiles, ShardIdentity, find_shards
from nemo_rl.errors import ConfigError, JobError
from nemo_rl.jobs import sbatch
from nemo_rl.jobs.collection_scripts import (
    Submission,
    aggregation_script,
    collection_script,
    format_environment,
    format_redacted_environment,
)
from nemo_rl.jobs.slurm_config import SlurmConfig, SubmitRunConfig, collect_yaml

LOGPROBS_MODE = "processed_logprobs"  # log_softmax(logits / temperature)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Job ids from Slurm."""

    collection: str | None  # the array; None: nothing is missing
    aggregation: str | None


def find_missing_tasks(slurm: SlurmConfig, output_dir: Path, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Find the array tasks with an unfinished shard. Raises ConfigError for shards of another number of chunks."""
    num_shards = slurm.num_chunks * slurm.collection.num_tasks  # per seed
    for seed in seeds:
        _check_chunks(output_dir, seed, num_shards)
    return tuple(
        seed_index * slurm.num_chunks + chunk
        for seed_index, seed in enumerate(seeds)
        for chunk in range(slurm.num_chunks)
        if not all(shard.done.exists() for shard in _shards(slurm, output_dir, seed, chunk))
    )


def _shards(slurm: SlurmConfig, output_dir: Path, seed: int, chunk: int) -> list[ShardFiles]:
    """Return the shards of one array task: one per process."""
    count = slurm.collection.num_tasks
    if slurm.num_chunks * count == 1:
        return [ShardFiles.of(output_dir, seed)]
    return [ShardFiles.of(output_dir, seed, chunk * count + i) for i in range(count)]


def _check_chunks(output_dir: Path, seed: int, num_shards: int) -> None:
    for shard in find_shards(output_dir):
        identity = ShardIdentity.read(shard.identity)
        begun = 1 if identity.keys.chunk is None else identity.keys.chunk.count
        if identity.seed == seed and begun != num_shards:
            problem = f"seed {seed} was begun in {begun} chunks in {output_dir}"
            raise ConfigError("slurm.num_chunks x slurm.collection.num_tasks", num_shards, problem)


def write_submission(submission: Submission, config: SubmitRunConfig) -> None:
    """Write the files that the jobs read. Raises FileExistsError if another submission has just made the directory."""
    submission.directory.mkdir(parents=True)
    (submission.directory / "logs").mkdir()
    sbatch.write_file(submission.collect_config, collect_yaml(config))
    sbatch.write_file(submission.collection_script, collection_script(submission))
    for name, component in submission.components.items():
        if component.environment:
            sbatch.write_file(submission.environment_file(name), format_environment(component.environment))
    if submission.slurm.aggregation.enabled:
        sbatch.write_file(submission.aggregation_script, aggregation_script(submission))


def submit_jobs(submission: Submission) -> Jobs:
    """Submit the array, and the aggregation that waits until all of its tasks have succeeded.

    Raises JobError with Slurm's own words; it names the array if that is already queued.
    """
    collection = sbatch.submit_script(submission.collection_script) if submission.missing else None
    if not submission.slurm.aggregation.enabled:
        return Jobs(collection, None)
    try:
        arguments = aggregation_arguments(submission, collection)
        return Jobs(collection, sbatch.submit_script(submission.aggregation_script, *arguments))
    except JobError as error:
        queued = f"; the collection is queued as {collection} (scancel {collection})" if collection else ""
        raise JobError(f"the aggregation was not submitted: {error}{queued}") from error


def aggregation_arguments(submission: Submission, collection: str | None) -> tuple[str, ...]:
    """Return the dependency of the aggregation: it is cancelled once a task of the array has failed.

    With `allow_partial` it waits only until the array has ended.
    """
    if collection is None:
        return ()
    if submission.slurm.aggregation.allow_partial:
        return (f"--dependency=afterany:{collection}",)
    return (f"--dependency=afterok:{collection}", "--kill-on-invalid-dep=yes")


def make_submission(config: SubmitRunConfig) -> Submission:
    """Return the jobs that would be submitted now; writes nothing."""
    slurm, seeds = config.slurm, config.collect.all_seeds
    output_dir = Path(config.collect.output_dir).absolute()
    base = Path(slurm.directory).absolute() if slurm.directory else output_dir / "slurm"
    sbatch.check_log_directory("slurm.directory" if slurm.directory else "collect.output_dir", base)
    missing = find_missing_tasks(slurm, output_dir, seeds)
    num_tasks = len(seeds) * slurm.num_chunks
    if len(missing) < num_tasks and not _has_same_config(sbatch.latest_directory(base), config):
        logger.warning("the configuration is not that of the last submission: finished tasks are submitted too")
        missing = tuple(range(num_tasks))
    return Submission(
        slurm=slurm,
        seeds=seeds,
        output_dir=output_dir,
        directory=sbatch.next_directory(base),
        working_directory=Path.cwd(),
        python=sys.executable,
        missing=missing,
        engine_args=engine_arguments(config),
    )


def engine_arguments(config: SubmitRunConfig) -> tuple[str, ...]:
    """Return server arguments for sampling as the collection's own engine does, whatever the model's defaults."""
    policy = config.policy
    length = ("--max-model-len", str(policy.max_total_sequence_length))
    return (*length, "--dtype", policy.precision, "--generation-config", "vllm", "--logprobs-mode", LOGPROBS_MODE)


def _has_same_config(directory: Path | None, config: SubmitRunConfig) -> bool:
    """Return whether the submission in `directory` had this configuration."""
    if directory is None:
        return False
    path = directory / "collect.yaml"
    return path.is_file() and path.read_text() == collect_yaml(config)


def format_submission(submission: Submission) -> str:
    """Format the scripts, the calls of sbatch, and the environments without secrets."""
    parts = []
    if submission.missing:
        parts += [f"# sbatch {submission.collection_script}", collection_script(submission)]
    if submission.slurm.aggregation.enabled:
        words = ["sbatch", *aggregation_arguments(submission, "ARRAY" if submission.missing else None)]
        parts += [
            f"# {' '.join([*words, str(submission.aggregation_script)])}",
            aggregation_script(submission),
        ]
    for name, component in submission.components.items():
        variables = (
            format_redacted_environment(component.environment)
            or "# that of the shell that calls nemo-rl submit, alone\n"
        )
        parts += [f"# environment of the {name}", variables]
    return "\n".join([*parts, f"# {_format_counts(submission)}\n"])


def format_jobs(submission: Submission, jobs: Jobs) -> str:
    """Format the submitted jobs for the user."""
    lines = [_format_counts(submission)]
    if jobs.collection is not None:
        lines.append(f"collection: job {jobs.collection}")
    if jobs.aggregation is not None:
        lines.append(f"aggregation: job {jobs.aggregation}")
    lines.append(f"logs: {os.path.relpath(submission.directory / 'logs')}")
    return "\n".join(lines) + "\n"


def _format_counts(submission: Submission) -> str:
    seeds, chunks = len(submission.seeds), submission.slurm.num_chunks
    done = submission.num_tasks - len(submission.missing)
    return f"{submission.num_tasks} array tasks ({seeds} seeds x {chunks} chunks), {done} of them done before"
