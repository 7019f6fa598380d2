"""What a run leaves behind: its directory with the configuration, metrics and checkpoints, and a summary at its end."""

import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.algorithms.sft import SFTRun
from nemo_rl.checkpoint import CONFIG_FILE, CheckpointStore
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.reward_model import RewardModelRunConfig
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.interfaces import Logger
from nemo_rl.observability.jsonl import METRICS_FILE
from nemo_rl.observability.loggers import make_logger
from nemo_rl.observability.logging_setup import configure_logging
from nemo_rl.observability.run_directory import make_run_directory
from nemo_rl.observability.summary import summary

logger = logging.getLogger(__name__)


def open_console() -> Console:
    """Where this process' log records go, and its progress display."""
    disable_progress_bar()  # transformers' own, which would break the display
    return configure_logging()


def open_records(
    config: TrainingRunConfig | SFTRunConfig | RewardModelRunConfig, stack: ExitStack | AsyncExitStack
) -> tuple[Path, Logger]:
    """A new directory with the configuration in it, and the loggers of metrics, closed with `stack`."""
    run_dir = make_run_directory(config.logger.log_dir)
    (run_dir / CONFIG_FILE).write_text(resolved_yaml(config))
    logger.info("run directory: %s", run_dir)
    metrics_logger = make_logger(config.logger, run_dir, config.model_dump(mode="json"))
    stack.callback(metrics_logger.close)
    return run_dir, metrics_logger


def make_checkpoint_store(section: CheckpointingConfig, run_dir: Path) -> CheckpointStore | None:
    """None where nothing is saved."""
    if not section.enabled:
        return None
    return CheckpointStore(section, Path(section.checkpoint_dir or run_dir / "checkpoints"))


def write_summary(
    run: TrainingRun | SFTRun,
    results: Callable[[Path], str],
    command: str,
    resume_overrides: Callable[[int], str | None],
) -> None:
    """What a run shows when it has ended: `results`, of the file of its metrics, where things are, how to continue.

    `command` is how it was started; `resume_overrides(step)` is what it needs besides to go on behind `step`, None where
    nothing is left to do.
    """
    latest = run.checkpoints.latest() if run.checkpoints else None
    resume_command = None
    if run.checkpoints is not None and latest is not None and (overrides := resume_overrides(latest.step)) is not None:
        resume_command = f"{command} checkpointing.checkpoint_dir={run.checkpoints.directory}{overrides}"
    path, checkpoint = run.run_dir / METRICS_FILE, latest.path if latest else None
    text = summary(results(path), metrics_path=path, checkpoint=checkpoint, continue_command=resume_command)
    sys.stdout.write(text + "\n")
