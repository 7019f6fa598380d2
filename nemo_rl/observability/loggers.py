"""All places where a run's metrics go, behind one `interfaces.Logger`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nemo_rl.config.run import LoggerConfig
from nemo_rl.interfaces import Logger
from nemo_rl.observability.jsonl import JsonlLogger
from nemo_rl.observability.tensorboard import TensorboardLogger
from nemo_rl.observability.wandb import WandbLogger

logger = logging.getLogger(__name__)


class CompositeLogger:
    """Hands everything to each of its loggers. What one of them raises is logged once and stops nobody."""

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self._loggers = dict(loggers)
        self._failed: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._call_each(lambda each: each.log_metrics(metrics, step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._call_each(lambda each: each.log_table(name, columns, rows, step))

    def close(self) -> None:
        self._call_each(lambda each: each.close())

    def _call_each(self, call: Callable[[Logger], None]) -> None:
        for name, each in self._loggers.items():
            try:
                call(each)
            except Exception as error:  # a full disk or a lost network is no reason to lose the training
                if name not in self._failed:
                    logger.warning(
                        "the %s logger failed; training goes on, and later failures of it are not shown: %r",
                        name,
                        error,
                    )
                self._failed.add(name)


def make_logger(section: LoggerConfig, run_dir: Path, config: Mapping[str, object]) -> Logger:
    """JSON lines always, W&B and TensorBoard as configured; one that cannot start is left out with a warning."""
    makers: dict[str, Callable[[], Logger]] = {"jsonl": lambda: JsonlLogger(run_dir)}
    if section.wandb_enabled:
        makers["wandb"] = lambda: WandbLogger(section.wandb, run_dir, config)
    if section.tensorboard_enabled:
        makers["tensorboard"] = lambda: TensorboardLogger(run_dir, config)
    loggers: dict[str, Logger] = {}
    for name, make in makers.items():
        try:
            loggers[name] = make()
        except Exception as error:
            logger.warning("the %s logger cannot start; training goes on without it: %r", name, error)
    return CompositeLogger(loggers)
