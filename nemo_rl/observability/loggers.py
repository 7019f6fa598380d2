"""All places where a run's metrics go, behind one `interfaces.Logger`."""

import json
import logging
import math
import netrc
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl.config.run import LoggerConfig, WandbConfig
from nemo_rl.interfaces import Logger

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TABLES_DIRECTORY = "tables"


class JsonlLogger:
    """`metrics.jsonl`: one object a call, `{"step": 3, "train/loss": 0.5}`, on the disk when the call returns.

    What JSON cannot say is the string "NaN", "Infinity" or "-Infinity", which Python's `float` and JavaScript's
    `Number` read. Tables are `tables/<name>_step<N>.jsonl`, one object a row. An existing file is appended to.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        line = {"step": step, **{name: _number(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        tables_directory = self._directory / TABLES_DIRECTORY
        tables_directory.mkdir(exist_ok=True)
        lines = [
            json.dumps({c: _cell(v) for c, v in zip(columns, row, strict=True)}, ensure_ascii=False) for row in rows
        ]
        path = tables_directory / f"{name.replace('/', '_')}_step{step}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        self._file.close()


def _number(value: float) -> int | float | str:
    """A JSON number; numpy's and torch's scalars become Python's."""
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _cell(value: object) -> object:
    if value is None or isinstance(value, str | bool):
        return value
    return _number(value) if isinstance(value, int | float) else str(value)


class TensorboardLogger:
    """Scalars by step, tables as Markdown text, the configuration as text at step 0; in `tensorboard/`."""

    def __init__(self, run_dir: Path, config: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(dict(config), indent=2, default=str)}\n```", 0)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(
            name, "\n".join(f"| {' | '.join(map(_cell_of_tensorboard, line))} |" for line in lines), step
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell_of_tensorboard(value: object) -> str:
    """Text that stays inside its Markdown cell."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")


RUN_ID_FILE = "wandb_run_id"

TRAIN_STEP = "train/step"
VALIDATION_STEP = "validation/step"
STEP_METRIC_BY_PATTERN = {  # what each chart has on its x axis
    "train/*": TRAIN_STEP,
    "timing/train/*": TRAIN_STEP,
    "performance/*": TRAIN_STEP,
    "efficiency/*": TRAIN_STEP,
    "env/*": TRAIN_STEP,
    "validation/*": VALIDATION_STEP,
    "timing/validation/*": VALIDATION_STEP,
}


class WandbLogger:
    """One W&B run. Offline, under `wandb/` in the run directory, where no key is known; `wandb sync` sends it later.

    The run's id is kept in the run directory, so that a run that goes on there is one run in W&B too.
    """

    def __init__(self, section: WandbConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        import wandb  # slow to import

        self._wandb = wandb
        mode = None if "WANDB_MODE" in os.environ or has_api_key() else "offline"
        is_offline = (mode or os.environ.get("WANDB_MODE")) in ("offline", "dryrun")
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or run_dir.name,
            tags=section.tags,
            config=dict(config),
            dir=str(run_dir),
            id=_run_id(run_dir),
            resume=None if is_offline else "allow",  # an offline run cannot ask; the same id joins at `wandb sync`
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        for pattern, step_metric in STEP_METRIC_BY_PATTERN.items():
            self._run.define_metric(pattern, step_metric=step_metric)
        where = f"offline in {run_dir / 'wandb'} (wandb leet shows it, wandb sync sends it)"
        logger.info("W&B: %s", where if is_offline else self._run.url)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**_step_metrics(metrics, step), **metrics})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({**_step_metrics([name], step), name: table})

    def close(self) -> None:
        self._run.finish()


def has_api_key() -> bool:
    """Whether WANDB_API_KEY or the netrc file holds a key for W&B's server."""
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


def _run_id(run_dir: Path) -> str:
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _step_metrics(names: Iterable[str], step: int) -> dict[str, int]:
    """The x values that these metrics are drawn over."""
    prefixes = ("validation/", "timing/validation/")
    return {VALIDATION_STEP if name.startswith(prefixes) else TRAIN_STEP: step for name in names}


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
