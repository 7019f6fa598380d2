"""`nemo-rl submit`: a collection as a submission to Slurm, with what earlier submissions left missing; or, after `--`,
a training command as a supervised job that Slurm requeues (training_job.py)."""

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path

from nemo_rl.collect.slurm import jobs as slurm_jobs
from nemo_rl.commands import Command, ExitCode
from nemo_rl.config.submit import SubmitRunConfig, collect_yaml, load_submit_config
from nemo_rl.errors import ConfigError
from nemo_rl.launch.commands import add_recipe_arguments
from nemo_rl.launch.training_job import submit_training
from nemo_rl.observability.console import configure_logging
from nemo_rl.recipes import find_recipe

logger = logging.getLogger(__name__)

LOGPROBS_MODE = "processed_logprobs"  # log_softmax(logits / temperature)


def _submit(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.command:
        return submit_training(parsed)
    if parsed.config is None:
        raise ConfigError("--config", None, "must name a recipe of `nemo-rl collect`; training follows --: -- grpo ...")
    config = load_submit_config(find_recipe(parsed.config), parsed.overrides)
    submission = make_submission(config)
    if parsed.dry_run:
        sys.stdout.write(format_submission(submission))
        return ExitCode.DONE
    slurm_jobs.write_submission(submission, collect_yaml(config))
    sys.stdout.write(format_jobs(submission, slurm_jobs.submit_jobs(submission)))
    return ExitCode.DONE


SUBMIT = Command(
    "Run a collection as a Slurm array over seeds and chunks, followed by a job that merges and profiles it.\n"
    "Called again it submits what is missing.\n\n"
    "nemo-rl submit --config RECIPE slurm.num_chunks=4\n"
    "nemo-rl submit slurm.time=04:00:00 slurm.gpus=8 -- grpo --config RECIPE      training, requeued until it is done",
    partial(add_recipe_arguments, default="none, where a training command follows --"),
    _submit,
    program="nemo-rl submit",
    reported_errors=(OSError,),
    takes_command=True,
)


def make_submission(config: SubmitRunConfig) -> slurm_jobs.Submission:
    """Return what would be submitted now; nothing is written."""
    slurm, seeds = config.slurm, config.collect.all_seeds
    output_dir = Path(config.collect.output_dir).absolute()
    base = Path(slurm.directory).absolute() if slurm.directory else output_dir / "slurm"
    slurm_jobs.check_log_directory("slurm.directory" if slurm.directory else "collect.output_dir", base)
    missing = slurm_jobs.find_missing_tasks(slurm, output_dir, seeds)
    num_tasks = len(seeds) * slurm.num_chunks
    if len(missing) < num_tasks and not _has_same_config(slurm_jobs.latest_directory(base), config):
        logger.warning("the configuration is not that of the last submission: finished tasks are submitted too")
        missing = tuple(range(num_tasks))
    return slurm_jobs.Submission(
        slurm=slurm,
        seeds=seeds,
        output_dir=output_dir,
        directory=slurm_jobs.next_directory(base),
        working_directory=Path.cwd(),
        python=sys.executable,
        missing=missing,
        engine_args=engine_arguments(config),
    )


def engine_arguments(config: SubmitRunConfig) -> tuple[str, ...]:
    """Return server arguments that sample as the collection's own engine does, whatever the model's defaults."""
    policy = config.policy
    length = ("--max-model-len", str(policy.max_total_sequence_length))
    return (*length, "--dtype", policy.precision, "--generation-config", "vllm", "--logprobs-mode", LOGPROBS_MODE)


def _has_same_config(directory: Path | None, config: SubmitRunConfig) -> bool:
    """Return whether the submission in `directory` had this configuration."""
    if directory is None:
        return False
    path = directory / "collect.yaml"
    return path.is_file() and path.read_text() == collect_yaml(config)


def format_submission(submission: slurm_jobs.Submission) -> str:
    """Format scripts, the calls of sbatch, and environments without secrets."""
    parts = []
    if submission.missing:
        parts += [f"# sbatch {submission.collection_script}", slurm_jobs.collection_script(submission)]
    if submission.slurm.aggregation.enabled:
        words = ["sbatch", *slurm_jobs.aggregation_arguments(submission, "ARRAY" if submission.missing else None)]
        parts += [
            f"# {' '.join([*words, str(submission.aggregation_script)])}",
            slurm_jobs.aggregation_script(submission),
        ]
    for name, component in submission.components.items():
        variables = (
            slurm_jobs.format_redacted_environment(component.environment)
            or "# that of the shell that calls nemo-rl submit, alone\n"
        )
        parts += [f"# environment of the {name}", variables]
    return "\n".join([*parts, f"# {_format_counts(submission)}\n"])


def format_jobs(submission: slurm_jobs.Submission, jobs: slurm_jobs.Jobs) -> str:
    """Format the submitted jobs for the user."""
    lines = [_format_counts(submission)]
    if jobs.collection is not None:
        lines.append(f"collection: job {jobs.collection}")
    if jobs.aggregation is not None:
        lines.append(f"aggregation: job {jobs.aggregation}")
    lines.append(f"logs: {os.path.relpath(submission.directory / 'logs')}")
    return "\n".join(lines) + "\n"


def _format_counts(submission: slurm_jobs.Submission) -> str:
    seeds, chunks = len(submission.seeds), submission.slurm.num_chunks
    done = submission.num_tasks - len(submission.missing)
    return f"{submission.num_tasks} array tasks ({seeds} seeds x {chunks} chunks), {done} of them done before"
