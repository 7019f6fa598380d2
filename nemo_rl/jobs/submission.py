"""`nemo-rl submit`: a collection as a Slurm array, with what earlier submissions left missing; or a training command.

After `--` a training command is one Slurm job that is requeued until it is done: `nemo-rl run` over the resolved
configuration with a checkpoint directory of its own. Near its time limit the command saves and ends, and the job
requeues itself; after a node's failure, a drain with `scontrol requeue` or a preemption Slurm requeues it. Each start
resumes from the newest checkpoint.
"""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.commands import Command, ExitCode
from nemo_rl.config import loading
from nemo_rl.config.submit import (
    SlurmTrainingConfig,
    SubmitRunConfig,
    SubmitTrainingConfig,
    check_slurm_training,
    collect_yaml,
    load_submit_config,
)
from nemo_rl.errors import ConfigError
from nemo_rl.jobs import slurm as slurm_jobs
from nemo_rl.launch import commands
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
    partial(commands.add_recipe_arguments, default="none, where a training command follows --"),
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


JOBS = {job.verb: job for job in (commands.GRPO_JOB, commands.DISTILLATION_JOB, commands.SFT_JOB, commands.DPO_JOB)}
BASE = "slurm_runs"
BODY = """
say() {
    printf '%(%H:%M:%S)T %s\\n' -1 "$*" >&2
}

near_end=0
stop() { # SIGNAL: the command saves and ends
    say "received $1: the command saves and ends"
    kill -TERM "$run" 2>/dev/null || true
}
trap 'near_end=1; stop USR1' USR1
trap 'stop TERM' TERM

say "on $(hostname), start number $((${SLURM_RESTART_COUNT:-0} + 1))"
"${command[@]}" &
run=$!
while true; do
    status=0
    wait "$run" || status=$?
    kill -0 "$run" 2>/dev/null || break
done
final=0
wait "$run" || final=$? # where a signal has interrupted the wait above, and the command ended meanwhile
((final == 127)) || status=$final
say "the command ended with $status"
if ((near_end && requeue && status == 130)); then
    say "requeued: the time limit is near"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A submission: its script and configuration are files of `directory`."""

    slurm: SlurmTrainingConfig
    verb: str
    config_yaml: str
    directory: Path  # absolute
    working_directory: Path
    python: str

    @property
    def script_path(self) -> Path:
        return self.directory / "train.sbatch"

    @property
    def config_path(self) -> Path:
        return self.directory / "train.yaml"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the supervised command that the job runs."""
        program = self.slurm.program or [self.python, "-m", "nemo_rl"]
        own = ("run", "--restarts", str(self.slurm.restarts), "--directory", str(self.directory))
        return (*program, *own, "--", self.verb, "--config", str(self.config_path))

    def script(self) -> str:
        """Return the batch script."""
        words = [f"#SBATCH {shlex.quote(word)}" for word in self._directives()]
        setup = f"set +u\n{self.slurm.setup}\nset -u" if self.slurm.setup.strip() else ""
        values = [f"requeue={int(self.slurm.requeue)}", f"command=({shlex.join(self.command)})"]
        head = ["#!/usr/bin/env bash", "# Written by nemo-rl submit.", *words, "set -euo pipefail", "", *values]
        return "\n".join([*head, *([setup] if setup else [])]) + "\n" + BODY

    def _directives(self) -> Iterator[str]:
        slurm, log = self.slurm, str(self.directory / "train.log").replace("%", "%%")
        yield from (f"--job-name={slurm.job_name}", "--nodes=1", "--ntasks=1", f"--chdir={self.working_directory}")
        yield from (f"--output={log}", "--open-mode=append", "--requeue" if slurm.requeue else "--no-requeue")
        yield f"--signal=B:USR1@{slurm.save_s_before_end}"
        options = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time}
        options |= {"gpus-per-node": str(slurm.gpus) if slurm.gpus else None, "dependency": slurm.dependency}
        yield from (f"--{name}={value}" for name, value in options.items() if value is not None)
        yield from slurm.sbatch_args


def submit_training(parsed: argparse.Namespace) -> ExitCode:
    """Write and submit the job of `parsed.command`; with --dry-run print its script."""
    if parsed.config is not None:
        raise ConfigError("--config", str(parsed.config), "belongs to the training command: give it after --")
    slurm = loading.read_overrides(SubmitTrainingConfig, parsed.overrides).slurm
    check_slurm_training(slurm)
    job = make_job(slurm, parsed.command)
    if parsed.dry_run:
        sys.stdout.write(f"# sbatch {job.script_path}\n{job.script()}")
        return ExitCode.DONE
    job.directory.mkdir(parents=True)
    for path, text in ((job.config_path, job.config_yaml), (job.script_path, job.script())):
        path.touch(mode=slurm_jobs.OWNER_ONLY)
        path.write_text(text)
    number = slurm_jobs.sbatch(job.script_path)
    sys.stdout.write(f"training: job {number}\nlog: {os.path.relpath(job.directory / 'train.log')}\n")
    return ExitCode.DONE


def make_job(slurm: SlurmTrainingConfig, command: Sequence[str]) -> TrainingJob:
    """Return the job of a training command; nothing is written. Raises ConfigError for what could not run."""
    verb, *arguments = command
    if verb not in JOBS:
        raise ConfigError("COMMAND", verb, "cannot be submitted", known=JOBS)
    parser = argparse.ArgumentParser(prog=f"nemo-rl {verb}")
    commands.add_recipe_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.config is None:
        raise ConfigError("--config", None, f"must name the recipe of {verb}")
    base = Path(slurm.directory) if slurm.directory else Path(BASE)
    directory = slurm_jobs.next_directory(base.absolute())
    slurm_jobs.check_log_directory("slurm.directory", directory)
    config = _load(JOBS[verb], parsed, directory)
    return TrainingJob(slurm, verb, loading.resolved_yaml(config), directory, Path.cwd(), sys.executable)


def _load(job: commands.Job, parsed: argparse.Namespace, directory: Path) -> Any:
    """Return the configuration with checkpoints, which every start of the job shares, and logs in `directory`."""
    options = {"allow_unsupported": True} if parsed.allow_unsupported else {}
    config = job.load(find_recipe(parsed.config), parsed.overrides, **options)
    if not config.checkpointing.enabled:
        raise ConfigError("checkpointing.enabled", False, "a requeued job resumes from checkpoints: must be true")
    checkpoint_dir = config.checkpointing.checkpoint_dir or str(directory / "checkpoints")
    sections = {
        "logger": config.logger.model_copy(update={"log_dir": str(directory / "logs")}),
        "checkpointing": config.checkpointing.model_copy(update={"checkpoint_dir": checkpoint_dir}),
    }
    return config.model_copy(update=sections)
