"""The commands that run a recipe: argument parsing, configuration loading, exit codes, and one `Job` per command."""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nemo_rl.quickstart
from nemo_rl.config.collect import CollectRunConfig
from nemo_rl.config.evaluation import EvalRunConfig
from nemo_rl.config.loading import (
    load_collect_config,
    load_config,
    load_distillation_config,
    load_eval_config,
    load_reward_model_config,
    load_sft_config,
    resolved_yaml,
)
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.reward_model import RewardModelRunConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.errors import ConfigError, DataError, NemoRLError
from nemo_rl.launch.model_names import check_model_names

if TYPE_CHECKING:
    from nemo_rl.algorithms.loop import TrainingProgress
    from nemo_rl.collect.profile import Profile
    from nemo_rl.launch.collect import CollectionResult

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2  # as argparse
EXIT_INTERRUPTED = 130  # as a shell after Ctrl-C


@dataclass(frozen=True, slots=True)
class Job:
    """What a script does with a recipe."""

    load: Callable[[Path, Sequence[str]], Any]  # the configuration, of a recipe and overrides
    run: Callable[[Any, str], int]  # with the command that started it; the exit code
    plan: Callable[[Any], str] = lambda config: ""  # what a dry run shows below the configuration


def run_command(
    arguments: Sequence[str], *, description: str, default_config: Path, job: Job, program: str | None = None
) -> int:
    """Parse, load, run; the exit code. Errors of ours are one message, others keep their traceback."""
    parsed = _make_parser(description, program).parse_intermixed_args(arguments)
    try:
        config = job.load(parsed.config or default_config, parsed.overrides)
        check_model_names(config)
        if not parsed.dry_run:
            return job.run(config, _continue_command(parsed))
        sys.stdout.write(resolved_yaml(config) + job.plan(config))
        return 0
    except NemoRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError | DataError) else EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):  # before training has begun, or asked for twice
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def _make_parser(description: str, program: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a recipe; without it the quickstart")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration and the placement, then stop")
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")
    return parser


def _continue_command(parsed: argparse.Namespace) -> str:
    """How this run was started, to be shown as the way to continue it."""
    config = ["--config", str(parsed.config)] if parsed.config else []
    return shlex.join(["uv", "run", os.path.relpath(sys.argv[0]), *config, *parsed.overrides])


def _plan(config: TrainingRunConfig | SFTRunConfig) -> str:
    from nemo_rl.launch.placement import placement_plan  # torch looks for devices
    from nemo_rl.policy.optim import check_optimizer

    check_optimizer(config.policy)
    return f"\n{placement_plan(config)}\n"


def _train_on_rollouts(config: TrainingRunConfig, command: str) -> int:
    from nemo_rl.launch.training import run_training  # torch and the engine load only for a valid configuration

    return _exit_code(asyncio.run(run_training(config, command)))


def _train_on_conversations(config: SFTRunConfig, command: str) -> int:
    from nemo_rl.launch.sft import run_sft

    return _exit_code(asyncio.run(run_sft(config, command)))


def _exit_code(training: "TrainingProgress") -> int:
    return EXIT_INTERRUPTED if training.interrupted else 0


GRPO_JOB = Job(load_config, _train_on_rollouts, _plan)
DISTILLATION_JOB = Job(load_distillation_config, _train_on_rollouts, _plan)
SFT_JOB = Job(load_sft_config, _train_on_conversations, _plan)


COLLECT_DESCRIPTION = """`nemo-rl collect`: rollouts of a model over datasets, stored as they end; exact resume.

nemo-rl collect                                     the quickstart: 1,066 words, four rollouts each
nemo-rl collect collect.seeds=0,2,5..7 collect.chunk=0/4
nemo-rl collect --config RECIPE server.address=http://127.0.0.1:8000
nemo-rl collect --config RECIPE --dry-run           resolve and validate the configuration only
"""
QUICKSTART = Path(nemo_rl.quickstart.__path__[0]) / "collect.yaml"


def run_collect(arguments: Sequence[str]) -> int:
    """Run `nemo-rl collect`; return 1 where rollouts failed or something broke, 2 for a bad configuration, 130 after
    Ctrl-C."""
    return run_command(
        arguments,
        description=COLLECT_DESCRIPTION,
        default_config=QUICKSTART,
        job=COLLECT_JOB,
        program="nemo-rl collect",
    )


def _collect_plan(config: CollectRunConfig) -> str:
    from nemo_rl.launch.placement import collection_placement_plan  # torch looks for devices

    return f"\n{collection_placement_plan(config)}\n"


def _collect(config: CollectRunConfig, command: str) -> int:
    from nemo_rl.launch.collect import run_collection  # torch and the engine load only for a valid configuration

    result = asyncio.run(run_collection(config))
    sys.stdout.write(report(result) + "\n")
    if result.interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.is_complete else EXIT_FAILED


def report(result: "CollectionResult") -> str:
    """What there is now, and what to do next."""
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


COLLECT_JOB = Job(load_collect_config, _collect, _collect_plan)


def _train(config: RewardModelRunConfig, command: str) -> int:
    from nemo_rl.launch.reward_model import train_reward_model

    train_reward_model(config)
    return 0


REWARD_MODEL_JOB = Job(load_reward_model_config, _train)


LOG_COLUMNS = 160  # in a log, where there is no width to fit


def _evaluation_plan(config: EvalRunConfig) -> str:
    from nemo_rl.launch.placement import collection_placement_plan  # torch looks for devices

    return f"\n{collection_placement_plan(*config.models)}\n"


def _evaluate(config: EvalRunConfig, command: str) -> int:
    """One model after the other, each in the folder that its name gives it, then the tables."""
    from rich.console import Console

    from nemo_rl.collect.compare import compare
    from nemo_rl.collect.profile_report import comparison_table, summary_table, write_profile
    from nemo_rl.launch.collect import run_collection  # torch and the engine load only for a valid configuration

    collections = []
    for model in config.models:
        collections.append(asyncio.run(run_collection(model)))
        if collections[-1].interrupted:
            sys.stdout.write("interrupted; the same command goes on\n")
            return EXIT_INTERRUPTED
    profiles = [_make_profile(config, result) for result in collections]
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else LOG_COLUMNS)
    for measured in profiles:
        console.print(summary_table(measured))
        write_profile(measured, measured.directory)
    if len(profiles) == 2:
        first, second = (model.policy.model_name for model in config.models)
        console.print(comparison_table(compare(*profiles), first, second))
    for model, result, measured in zip(config.models, collections, profiles, strict=True):
        sys.stdout.write(headline(model, result, measured) + "\n")
    return 0 if all(result.is_complete for result in collections) else EXIT_FAILED


def _make_profile(config: EvalRunConfig, result: "CollectionResult") -> "Profile":
    from nemo_rl.collect.profile import profile

    return profile(result.directory, seeds=[config.eval.seed], ks=sorted({1, config.eval.k}))


def headline(config: EvalRunConfig, result: "CollectionResult", measured: "Profile") -> str:
    """Example: "pass@4 0.9150 +- 0.0197 of checkpoints/step_50 over 200 tasks: evaluations/..."."""
    name = config.eval.score_name
    score = measured.summaries[0].scores.get(name)
    if score is None or score.mean is None:
        return f"{name}: no task has enough rollouts: {result.directory}"
    error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
    failed = f", {result.num_given_up} rollouts failed" if result.num_given_up else ""
    where = Path(result.directory)
    return f"{name} {score.mean:.4f}{error} of {config.policy.model_name} over {score.num_tasks} tasks{failed}: {where}"


EVAL_JOB = Job(load_eval_config, _evaluate, _evaluation_plan)
