"""A training command as one Slurm job: `nemo-rl run` over the resolved configuration, requeued until it is done.

Near its time limit the command saves and ends, and the job requeues itself; Slurm requeues it after a node failure, a
drain with `scontrol requeue` or a preemption. Each start resumes from the newest checkpoint.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.command_line import ExitCode
from nemo_rl.config import loading
from nemo_rl.errors import ConfigError
from nemo_rl.jobs import sbatch
from nemo_rl.jobs.collection_scripts import shell_source
from nemo_rl.jobs.slurm_config import SlurmTrainingConfig, SubmitTrainingConfig, check_slurm_training
from nemo_rl.launch.recipe_commands import DISTILLATION_JOB, DPO_JOB, GRPO_JOB, SFT_JOB, Job, add_recipe_arguments
from nemo_rl.observability.console import check_writable
from nemo_rl.recipes import find_recipe

TRAINING_JOBS = (GRPO_JOB, DISTILLATION_JOB, SFT_JOB, DPO_JOB)
JOBS = {job.verb: job for job in TRAINING_JOBS}
DEFAULT_DIRECTORY = Path("slurm_runs")


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training job, with its script and its configuration in `directory`."""

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
        words = [f"#SBATCH {shlex.quote(word)}" for word in self._directives()]
        setup = f"set +u\n{self.slurm.setup}\nset -u" if self.slurm.setup.strip() else ""
        values = [f"requeue={int(self.slurm.requeue)}", f"command=({shlex.join(self.command)})"]
        head = ["#!/usr/bin/env bash", "# Written by nemo-rl submit.", *words, "set -euo pipefail", "", *values]
        return "\n".join([*head, *([setup] if setup else [])]) + "\n\n" + shell_source("training")

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
    sbatch.write_file(job.config_path, job.config_yaml)
    sbatch.write_file(job.script_path, job.script())
    number = sbatch.submit_script(job.script_path)
    sys.stdout.write(f"training: job {number}\nlog: {os.path.relpath(job.directory / 'train.log')}\n")
    return ExitCode.DONE


def make_job(slurm: SlurmTrainingConfig, command: Sequence[str]) -> TrainingJob:
    """Return the job of a training command; writes nothing. Raises ConfigError for a command that could not run."""
    verb, *arguments = command
    if verb not in JOBS:
        raise ConfigError("COMMAND", verb, "cannot be submitted", known=JOBS)
    parser = argparse.ArgumentParser(prog=f"nemo-rl {verb}")
    add_recipe_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.config is None:
        raise ConfigError("--config", None, f"must name the recipe of {verb}")
    base = Path(slurm.directory) if slurm.directory else DEFAULT_DIRECTORY
    directory = sbatch.next_directory(base.absolute())
    sbatch.check_log_directory("slurm.directory", directory)
    check_writable("slurm.directory", directory)
    config = _load(JOBS[verb], parsed, directory)
    return TrainingJob(slurm, verb, loading.resolved_yaml(config), directory, Path.cwd(), sys.executable)


def _load(job: Job, parsed: argparse.Namespace, directory: Path) -> Any:
    """Return the configuration with logs and checkpoints in `directory`, shared by all starts of the job."""
    options = {"allow_unsupported": True} if parsed.allow_unsupported else {}
    config = job.load(find_recipe(parsed.config), parsed.overrides, **options)
    if not config.checkpointing.enabled:
        raise ConfigError("checkpointing.enabled", False, "a requeued job resumes from checkpoints: must be true")
    checkpoint_dir = config.checkpointing.checkpoint_dir or str(directory / "checkpoints")
    sections = {
        "logger": config.logger.model_copy(update={"log_dir": str(directory / "logs")}),
        "checkpointing": config.checkpointing.model_copy(update={"checkpoint_dir": checkpoint_dir}),
    }
    config = config.model_copy(update=sections)
    set_here = {("logger", "log_dir"), ("checkpointing", "checkpoint_dir")}
    config.set_environment_texts({path: one for path, one in config.environment_texts.items() if path not in set_here})
    return config
