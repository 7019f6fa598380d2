"""Loggers and the timer of phases. metrics.jsonl always; W&B, TensorBoard and a user's own if configured.

An entry of the kind is made with its section, the run directory and the resolved configuration. Loaded with the
configuration, so large libraries are imported when a logger starts.
"""

import contextlib
import errno
import json
import logging
import math
import netrc
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import LOGGERS
from nemo_rl.config.shared_sections import (
    CustomLoggerConfig,
    LoggerConfig,
    MetricsLoggerConfig,
    WandbLoggerConfig,
)
from nemo_rl.durable_files import append_whole
from nemo_rl.errors import ConfigError
from nemo_rl.observability.gpu_monitor import GpuMonitor, start_gpu_monitor
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.tracing import DRIVER_CPU_NS, annotate, span, thread_cpu_ns

if TYPE_CHECKING:
    from nemo_rl.interfaces import Logger

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TABLES_DIRECTORY = "tables"
RUN_ID_FILE = "wandb_run_id"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

TRAIN_STEP = "train/step"
VALIDATION_STEP = "validation/step"
STEP_METRIC_BY_PATTERN = {  # the x axis of each chart
    "train/*": TRAIN_STEP,
    "timing/train/*": TRAIN_STEP,
    "timing/moves/*": TRAIN_STEP,
    "performance/*": TRAIN_STEP,
    "efficiency/*": TRAIN_STEP,
    "env/*": TRAIN_STEP,
    "gpu/*": TRAIN_STEP,
    "validation/*": VALIDATION_STEP,
    "timing/validation/*": VALIDATION_STEP,
}


def make_logger(
    section: LoggerConfig, run_dir: Path, config: Mapping[str, object], *, lost: LostRecords | None = None
) -> "CompositeLogger":
    """Return a logger that forwards to every enabled one; one that cannot start is skipped with a warning.

    `lost` counts what metrics.jsonl and its tables lack, and what others could not write to a disk.
    """
    from nemo_rl.interfaces import HistogramLogger  # imports torch, which the configuration does not need

    loggers: dict[str, Logger] = {}
    for name, logger_section in section.enabled.items():
        entry = LOGGERS.entry(logger_section.type or name, key=f"logger.loggers.{name}.type")
        try:
            loggers[name] = entry.make(logger_section, run_dir, config)
        except Exception as error:  # a lost network: training continues without this logger  # noqa: BLE001
            logger.warning("the %s logger cannot start; training continues without it: %r", name, error)
    draws = any(isinstance(each, HistogramLogger) for each in loggers.values())
    monitor = start_gpu_monitor() if section.monitor_gpus else None
    return (DrawingLogger if draws else CompositeLogger)(loggers, lost, monitor)


def adapt_logger(key: str, path: str, target: Any) -> Entry[CustomLoggerConfig]:
    """Return an entry for a user's class or function, called with run_dir, config and the section's kwargs."""
    if not callable(target):
        problem = f"must be a class or function (run_dir, config, **kwargs) -> Logger, not {type(target).__name__}"
        raise ConfigError(key, path, problem)
    return Entry(CustomLoggerConfig, make=lambda section, run_dir, config: target(run_dir, config, **section.kwargs))


class CompositeLogger:
    """Forwards every call to each of its loggers. An exception of one is logged once and does not reach the others."""

    def __init__(
        self, loggers: "Mapping[str, Logger]", lost: LostRecords | None = None, monitor: GpuMonitor | None = None
    ) -> None:
        """`monitor` adds what it has measured to the metrics of each training step."""
        self._loggers = dict(loggers)
        self._lost = LostRecords() if lost is None else lost
        self._monitor = monitor
        self._failed: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._monitor is not None and "train/loss" in metrics:
            metrics = {**metrics, **self._monitor.take()}
        self._call_each(lambda each: each.log_metrics(metrics, step))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._call_each(lambda each: each.log_table(name, columns, rows, step))

    def resume_after(self, step: int) -> None:
        """Have the loggers that keep later steps of an earlier start discard them."""
        from nemo_rl.interfaces import ResumableLogger

        self._call_each(lambda each: isinstance(each, ResumableLogger) and each.resume_after(step))

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._call_each(lambda each: each.close())

    def _call_each(self, call: "Callable[[Logger], object]") -> None:
        for name, each in self._loggers.items():
            try:
                call(each)
            except Exception as error:  # a full disk or a lost network is no reason to lose the training  # noqa: BLE001
                if isinstance(each, JsonlLogger) or getattr(error, "errno", None) in DISK_ERRORS:
                    self._lost.add(METRICS_FILE if isinstance(each, JsonlLogger) else f"the {name} logger")
                if name not in self._failed:
                    logger.warning(
                        "the %s logger failed; training continues, and its later failures are not shown: %r",
                        name,
                        error,
                    )
                self._failed.add(name)


class DrawingLogger(CompositeLogger):
    """A composite with loggers that draw distributions."""

    def log_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """Log a distribution to the loggers that draw them; values that are not finite are dropped."""
        from nemo_rl.interfaces import HistogramLogger

        finite = [value for value in values if math.isfinite(value)]
        if finite:
            self._call_each(lambda each: isinstance(each, HistogramLogger) and each.log_histogram(name, finite, step))


class JsonlLogger:
    """`metrics.jsonl`: one object per call, `{"step": 3, "train/loss": 0.5}`, flushed to disk before the call returns.

    Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity", which Python's `float` and JavaScript's
    `Number` read. Tables are `tables/<name>_step<N>.jsonl`, one object per row. An existing file is appended to.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir
        self._file = os.open(run_dir / METRICS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; raises OSError, and leaves the file as it was, if the disk takes only a part."""
        line = {"step": step, **{name: _to_json_number(value) for name, value in metrics.items()}}
        append_whole(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Write the table to a file of its own."""
        tables_directory = self._directory / TABLES_DIRECTORY
        tables_directory.mkdir(exist_ok=True)
        lines = [
            json.dumps({c: _to_json_cell(v) for c, v in zip(columns, row, strict=True)}, ensure_ascii=False)
            for row in rows
        ]
        path = tables_directory / f"{name.replace('/', '_')}_step{step}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        os.close(self._file)


class TensorboardLogger:
    """Scalars by step, tables as Markdown text, the configuration as text at step 0; in `tensorboard/`."""

    def __init__(self, run_dir: Path, config: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._open_writer = partial(SummaryWriter, str(run_dir / "tensorboard"))
        self._writer = self._open_writer()
        self._writer.add_text("config", f"```json\n{json.dumps(dict(config), indent=2, default=str)}\n```", 0)

    def resume_after(self, step: int) -> None:
        """Discard what an earlier start has written about later steps; TensorBoard hides it on reading."""
        self._writer.close()
        self._writer = self._open_writer(purge_step=step + 1)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Write the table as Markdown."""
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_to_markdown_cell, line))} |" for line in lines)
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def log_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        import numpy as np  # the writer has loaded it

        self._writer.add_histogram(name, np.asarray(values), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """One W&B run: offline, under `wandb/` in the run directory, if no API key is found; `wandb sync` uploads it later.

    The run's id is kept in the run directory, so that a run that resumes there is one run in W&B too.
    """

    def __init__(self, section: WandbLoggerConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        import wandb  # slow to import

        self._wandb = wandb
        mode = None if "WANDB_MODE" in os.environ or has_api_key() else "offline"
        is_offline = (mode or os.environ.get("WANDB_MODE")) in ("offline", "dryrun")
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or run_dir.name,
            tags=section.tags,
            notes=section.notes,
            group=section.group,
            config=dict(config),
            dir=str(run_dir),
            id=_load_run_id(run_dir),
            resume=None if is_offline else "allow",  # an offline run cannot ask; the same id joins at `wandb sync`
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        for pattern, step_metric in STEP_METRIC_BY_PATTERN.items():
            self._run.define_metric(pattern, step_metric=step_metric)
        where = f"offline in {run_dir / 'wandb'} (wandb leet shows it, wandb sync uploads it)"
        logger.info("W&B: %s", where if is_offline else self._run.url)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics over the step metrics of their charts."""
        self._run.log({**_step_metrics(metrics, step), **metrics})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({**_step_metrics([name], step), name: table})

    def log_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        self._run.log({**_step_metrics([name], step), name: self._wandb.Histogram(list(values))})

    def close(self) -> None:
        self._run.finish()


def has_api_key() -> bool:
    """Return whether WANDB_API_KEY or the netrc file has a key for W&B's server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _load_run_id(run_dir: Path) -> str:
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _step_metrics(names: Iterable[str], step: int) -> dict[str, int]:
    """Return the x values of these metrics' charts."""
    prefixes = ("validation/", "timing/validation/")
    return {VALIDATION_STEP if name.startswith(prefixes) else TRAIN_STEP: step for name in names}


def _to_json_number(value: float) -> int | float | str:
    """Return a JSON number; scalars of numpy and torch become Python's."""
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _to_json_cell(value: object) -> object:
    if value is None or isinstance(value, str | bool):
        return value
    return _to_json_number(value) if isinstance(value, int | float) else str(value)


def _to_markdown_cell(value: object) -> str:
    """Return text that stays inside its Markdown cell."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")


JSONL = Entry(MetricsLoggerConfig, make=lambda section, run_dir, config: JsonlLogger(run_dir))
WANDB = Entry(WandbLoggerConfig, make=lambda section, run_dir, config: WandbLogger(section, run_dir, config))
TENSORBOARD = Entry(MetricsLoggerConfig, make=lambda section, run_dir, config: TensorboardLogger(run_dir, config))


@dataclass(slots=True)
class _Phase:
    closed_s: float = 0.0  # seconds of the blocks that have ended
    open_blocks: int = 0
    opened_at: float = 0.0


class StepTimer:
    """Timer of named blocks; for one event loop.

    A name's time is that during which at least one block of the name was open: consecutive blocks add up, and
    overlapping ones (in tasks, or nested) count once.

    Example: `with timer("policy_training"): ...`, then `timer.seconds()` is `{"policy_training": 0.42}`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        on_enter: Callable[[str], None] | None = None,
        step: int | None = None,
    ) -> None:
        """`on_enter` is called with each name as its block begins; `step` is an attribute of the blocks' spans."""
        self._clock = clock
        self._attributes: dict[str, Any] = {} if step is None else {"step": step}
        self._on_enter = on_enter
        self._phases: dict[str, _Phase] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block under a name, which is that of its span, too."""
        phase = self._phases.setdefault(name, _Phase())
        if phase.open_blocks == 0:
            phase.opened_at = self._clock()
        phase.open_blocks += 1
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            with span(name, **self._attributes):
                cpu_ns = thread_cpu_ns()
                yield
                if self._attributes:
                    annotate(**{DRIVER_CPU_NS: thread_cpu_ns() - cpu_ns})
        finally:
            phase.open_blocks -= 1
            if phase.open_blocks == 0:
                phase.closed_s += self._clock() - phase.opened_at

    def seconds(self) -> dict[str, float]:
        """Return seconds by name, in the order of first use; an open block counts until now."""
        now = self._clock()
        return {name: p.closed_s + (now - p.opened_at if p.open_blocks else 0.0) for name, p in self._phases.items()}
