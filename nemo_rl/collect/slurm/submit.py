"""Submission to Slurm: missing array tasks, the files of a submission, and calls of sbatch."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.collect.shards import ShardFiles, ShardIdentity, find_shards
from nemo_rl.collect.slurm.scripts import Submission, aggregation_script, collection_script, format_environment
from nemo_rl.config.submit import SlurmConfig
from nemo_rl.errors import ConfigError, JobError

SBATCH_S = 120.0  # for Slurm to answer
OWNER_ONLY = 0o600  # configurations and environments may hold secrets


@dataclass(frozen=True, slots=True)
class Jobs:
    """Job ids from Slurm."""

    collection: str | None  # of the array; None: nothing is missing
    aggregation: str | None


def find_missing_tasks(slurm: SlurmConfig, output_dir: Path, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Find the array tasks with an unfinished shard. Raises ConfigError where shards were cut otherwise."""
    num_shards = slurm.num_chunks * slurm.collection.num_tasks  # of a seed
    for seed in seeds:
        _check_chunks(output_dir, seed, num_shards)
    return tuple(
        seed_index * slurm.num_chunks + chunk
        for seed_index, seed in enumerate(seeds)
        for chunk in range(slurm.num_chunks)
        if not all(shard.done.exists() for shard in _shards(slurm, output_dir, seed, chunk))
    )


def _shards(slurm: SlurmConfig, output_dir: Path, seed: int, chunk: int) -> list[ShardFiles]:
    """Return the shards of one array task: one for each of its processes."""
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


def latest_directory(base: Path) -> Path | None:
    """Return the directory of the last submission under `base`."""
    numbered = [path for path in base.glob("[0-9]*") if path.name.isdigit() and path.is_dir()]
    return max(numbered, key=lambda path: int(path.name), default=None)


def next_directory(base: Path) -> Path:
    """Return the directory of the next submission: 0001, 0002, ..."""
    latest = latest_directory(base)
    return base / f"{1 if latest is None else int(latest.name) + 1:04d}"


def write_submission(submission: Submission, collect_yaml: str) -> None:
    """Make its directory, with everything that the jobs read. Raises FileExistsError when another has just made it."""
    submission.directory.mkdir(parents=True)
    (submission.directory / "logs").mkdir()
    _write(submission.collect_config, collect_yaml)
    _write(submission.collection_script, collection_script(submission))
    for name, component in submission.components.items():
        if component.environment:
            _write(submission.environment_file(name), format_environment(component.environment))
    if submission.slurm.aggregation.enabled:
        _write(submission.aggregation_script, aggregation_script(submission))


def _write(path: Path, text: str) -> None:
    path.touch(mode=OWNER_ONLY)
    path.write_text(text)


def submit_jobs(submission: Submission) -> Jobs:
    """Hand the scripts to Slurm: the array, and the aggregation that waits until all of its tasks have gone well.

    Raises JobError with Slurm's own words; an array that is queued by then is named.
    """
    collection = sbatch(submission.collection_script) if submission.missing else None
    if not submission.slurm.aggregation.enabled:
        return Jobs(collection, None)
    try:
        return Jobs(collection, sbatch(submission.aggregation_script, *aggregation_arguments(submission, collection)))
    except JobError as error:
        queued = f"; the collection is queued as {collection} (scancel {collection})" if collection else ""
        raise JobError(f"the aggregation was not submitted: {error}{queued}") from error


def aggregation_arguments(submission: Submission, collection: str | None) -> tuple[str, ...]:
    """Return the dependency of the aggregation: it is cancelled once a task of the array has failed.

    With `allow_partial` it only waits for the array's end.
    """
    if collection is None:
        return ()
    if submission.slurm.aggregation.allow_partial:
        return (f"--dependency=afterany:{collection}",)
    return (f"--dependency=afterok:{collection}", "--kill-on-invalid-dep=yes")


def sbatch(script: Path, *arguments: str) -> str:
    """Submit a script and return the job id; raises JobError."""
    if shutil.which("sbatch") is None:
        raise JobError("there is no sbatch on this machine; --dry-run shows what would be submitted")
    command = ["sbatch", "--parsable", *arguments, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SBATCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"sbatch did not answer within {SBATCH_S:g} s") from error
    if done.returncode:
        raise JobError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().split(";")[0]  # "number;cluster" in a federation
