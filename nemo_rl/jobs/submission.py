"""`nemo-rl submit`: a collection as a Slurm array that completes earlier submissions, or a training job."""

import argparse
import sys
from functools import partial

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.errors import ConfigError
from nemo_rl.jobs import collection_job, training_job
from nemo_rl.jobs.slurm_config import load_submit_config
from nemo_rl.launch import recipe_commands
from nemo_rl.observability.console import configure_logging
from nemo_rl.recipes import find_recipe


def _submit(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.command:
        return training_job.submit_training(parsed)
    if parsed.config is None:
        raise ConfigError("--config", None, "must name a recipe of `nemo-rl collect`; training follows --: -- grpo ...")
    config = load_submit_config(find_recipe(parsed.config), parsed.overrides)
    submission = collection_job.make_submission(config)
    if parsed.dry_run:
        sys.stdout.write(collection_job.format_submission(submission))
        return ExitCode.DONE
    collection_job.write_submission(submission, config)
    sys.stdout.write(collection_job.format_jobs(submission, collection_job.submit_jobs(submission)))
    return ExitCode.DONE


SUBMIT = Command(
    "Run a collection as a Slurm array over seeds and chunks, followed by a job that merges and profiles it.\n"
    "Called again, it submits the missing tasks.\n\n"
    "nemo-rl submit --config RECIPE slurm.num_chunks=4\n"
    "nemo-rl submit slurm.time=04:00:00 slurm.gpus=8 -- grpo --config RECIPE      training, requeued until it is done",
    partial(recipe_commands.add_recipe_arguments, default="none if a training command follows --"),
    _submit,
    program="nemo-rl submit",
    reported_errors=(OSError,),
    takes_command=True,
)
