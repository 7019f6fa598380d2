"""The commands that run a recipe: each loads a configuration, shows it with --dry-run, or runs it.

Only the configuration is imported here: torch and the engines load once a configuration is known to be valid.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nemo_rl.quickstart
from nemo_rl.commands import Command, ExitCode
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
from nemo_rl.launch.model_names import check_model_names

if TYPE_CHECKING:
    from nemo_rl.algorithms.loop import TrainingProgress

COLLECT_DESCRIPTION = """`nemo-rl collect`: rollouts of a model over datasets, stored as they end; exact resume.

nemo-rl collect                                     the quickstart: 1,066 words, four rollouts each
nemo-rl collect collect.seeds=0,2,5..7 collect.chunk=0/4
nemo-rl collect --config RECIPE server.address=http://127.0.0.1:8000
nemo-rl collect --config RECIPE --dry-run           resolve and validate the configuration only
"""
COLLECT_RECIPE = Path(nemo_rl.quickstart.__path__[0]) / "collect.yaml"


@dataclass(frozen=True, slots=True)
class Job:
    """The use of a recipe by a command."""

    load: Callable[[Path, Sequence[str]], Any]  # the configuration from a recipe and overrides
    run: Callable[[Any, str], ExitCode]  # with the command line that started it
    plan: Callable[[Any], str] = lambda config: ""  # printed by --dry-run below the configuration

    def command(self, description: str, default_config: Path, *, program: str | None = None) -> Command:
        """Return the command that runs this job over `--config`, or over `default_config` without it."""
        return Command(description, add_recipe_arguments, partial(self._run, default_config=default_config), program)

    def _run(self, parsed: argparse.Namespace, *, default_config: Path) -> ExitCode:
        config = self.load(parsed.config or default_config, parsed.overrides)
        check_model_names(config)
        if not parsed.dry_run:
            return self.run(config, _continue_command(parsed))
        sys.stdout.write(resolved_yaml(config) + self.plan(config))
        return ExitCode.DONE


def add_recipe_arguments(parser: argparse.ArgumentParser, *, default: str | None = "the quickstart") -> None:
    """Add `--config`, `--dry-run` and the overrides; without a `default` recipe `--config` is required."""
    recipe_help = "a recipe of `nemo-rl collect`" if default is None else f"a recipe; default: {default}"
    parser.add_argument("--config", type=Path, required=default is None, help=recipe_help)
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and where; then stop")
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def _continue_command(parsed: argparse.Namespace) -> str:
    """Return the command line of this run, which also continues it."""
    config = ["--config", str(parsed.config)] if parsed.config else []
    return shlex.join(["uv", "run", os.path.relpath(sys.argv[0]), *config, *parsed.overrides])


def _train_on_rollouts(config: TrainingRunConfig, command: str) -> ExitCode:
    from nemo_rl.launch.training import run_training

    return _training_exit_code(asyncio.run(run_training(config, command)))


def _train_on_conversations(config: SFTRunConfig, command: str) -> ExitCode:
    from nemo_rl.launch.sft import run_sft

    return _training_exit_code(asyncio.run(run_sft(config, command)))


def _training_exit_code(progress: "TrainingProgress") -> ExitCode:
    return ExitCode.INTERRUPTED if progress.interrupted else ExitCode.DONE


def _train_reward_model(config: RewardModelRunConfig, command: str) -> ExitCode:
    from nemo_rl.launch.reward_model import train_reward_model

    train_reward_model(config)
    return ExitCode.DONE


def _collect(config: CollectRunConfig, command: str) -> ExitCode:
    from nemo_rl.launch.collect import format_result, run_collection

    result = asyncio.run(run_collection(config))
    sys.stdout.write(format_result(result) + "\n")
    if result.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if result.is_complete else ExitCode.FAILED


def _evaluate(config: EvalRunConfig, command: str) -> ExitCode:
    from nemo_rl.launch.collect import run_evaluation

    results = run_evaluation(config)
    if results[-1].interrupted:
        sys.stdout.write("interrupted; the same command continues\n")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if all(result.is_complete for result in results) else ExitCode.FAILED


def _plan_training(config: TrainingRunConfig | SFTRunConfig) -> str:
    from nemo_rl.launch.placement import placement_plan
    from nemo_rl.policy.optim import check_optimizer

    check_optimizer(config.policy)
    return f"\n{placement_plan(config)}\n"


def _plan_collection(config: CollectRunConfig) -> str:
    from nemo_rl.launch.placement import collection_placement_plan

    return f"\n{collection_placement_plan(config)}\n"


def _plan_evaluation(config: EvalRunConfig) -> str:
    from nemo_rl.launch.placement import collection_placement_plan

    return f"\n{collection_placement_plan(*config.models)}\n"


GRPO_JOB = Job(load_config, _train_on_rollouts, _plan_training)
DISTILLATION_JOB = Job(load_distillation_config, _train_on_rollouts, _plan_training)
SFT_JOB = Job(load_sft_config, _train_on_conversations, _plan_training)
REWARD_MODEL_JOB = Job(load_reward_model_config, _train_reward_model)
EVAL_JOB = Job(load_eval_config, _evaluate, _plan_evaluation)
COLLECT_JOB = Job(load_collect_config, _collect, _plan_collection)
COLLECT = COLLECT_JOB.command(COLLECT_DESCRIPTION, COLLECT_RECIPE, program="nemo-rl collect")
