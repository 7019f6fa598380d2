"""`nemo-rl submit slurm.time=04:00:00 -- grpo ...`: training as one Slurm job that is requeued until it is done.

The job runs `nemo-rl run` over the resolved configuration with a checkpoint directory of its own. Near its time limit
the command saves and ends, and the job requeues itself; after a node's failure, a drain with `scontrol requeue` or a
preemption Slurm requeues it. Each start resumes from the newest checkpoint.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.collect.slurm import jobs as slurm_jobs
from nemo_rl.commands import ExitCode
from nemo_rl.config import loading
from nemo_rl.config.submit import SlurmTrainingConfig, SubmitTrainingConfig, check_slurm_training
from nemo_rl.errors import ConfigError
from nemo_rl.launch import commands
from nemo_rl.recipes import find_recipe

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
