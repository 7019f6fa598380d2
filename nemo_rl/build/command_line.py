"""What the example scripts share: arguments, the configuration, exit codes."""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.build.model_names import check_model_names
from nemo_rl.config.loading import load_config, load_distillation_config, load_sft_config, resolved_yaml
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.errors import ConfigError, DataError, NemoRLError

if TYPE_CHECKING:
    from nemo_rl.algorithms.loop import TrainingProgress

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
    from nemo_rl.build.placement import placement_plan  # torch looks for devices
    from nemo_rl.policy.optim import check_optimizer

    check_optimizer(config.policy)
    return f"\n{placement_plan(config)}\n"


def _train_on_rollouts(config: TrainingRunConfig, command: str) -> int:
    from nemo_rl.build.session import run_training  # torch and the engine load only for a valid configuration

    return _exit_code(asyncio.run(run_training(config, command)))


def _train_on_conversations(config: SFTRunConfig, command: str) -> int:
    from nemo_rl.build.sft import run_sft

    return _exit_code(asyncio.run(run_sft(config, command)))


def _exit_code(training: "TrainingProgress") -> int:
    return EXIT_INTERRUPTED if training.interrupted else 0


GRPO_JOB = Job(load_config, _train_on_rollouts, _plan)
DISTILLATION_JOB = Job(load_distillation_config, _train_on_rollouts, _plan)
SFT_JOB = Job(load_sft_config, _train_on_conversations, _plan)
