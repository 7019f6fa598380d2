"""The console of a run: one handler of log records that shares it with the progress display; and the run's directory.

The display of training runs and collections is a live panel on a terminal, log lines elsewhere.
"""

import io
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichBars
from rich.table import Table
from rich.text import Text

from nemo_rl.config.shared_sections import LoggerConfig
from nemo_rl.errors import CONTROL_CHARACTERS, ConfigError, conceal
from nemo_rl.observability import heartbeat
from nemo_rl.types import Trajectory

logger = logging.getLogger(__name__)

MAX_CELL_CHARS = 400
FILE_WIDTH = 120  # columns when the output is not a terminal
HANDLER_NAME = "nemo_rl"
TERMINAL_CONTROLS = {code: text for code, text in CONTROL_CHARACTERS.items() if chr(code) not in "\n\t"}
# Loggers shown from ERROR on: their warnings concern this machine (no CUDA runtime, no tcmalloc), not the run.
NOISY_LIBRARIES = ("vllm", "torch.utils.cpp_extension")
ROLLOUT_LOG_PERIOD_S = 30.0  # between log lines inside a long step
ETA_WINDOW_STEPS = 20  # steps from which the remaining time is estimated
STEP_METRICS = {  # shown while training, by a short name: those that a full line drops last come first
    "reward": "reward",
    "mean_gen_tokens_per_sample": "tokens",
    "truncation_rate": "cut",
    "loss": "loss",
    "grad_norm": "grad_norm",
}
VALIDATION_METRICS = ("reward", "accuracy", "greedy_accuracy", "avg_length")  # come first in its line
LINE_WIDTH = 119  # characters of a log line, its time, level and logger included
PHASES = {  # a step's, by a short name
    "generation": "generation",
    "policy_and_reference_logprobs": "logprobs",
    "policy_training": "training",
    "weight_sync": "weight_sync",
}
ROOM = LINE_WIDTH - len("00:00:00 INFO console: ")  # for the message of this module's lines
LINE_PERIOD_S = 10.0  # between log lines, without a terminal
WINDOW_S = 30.0  # the rate is measured over about this many seconds

_RUN_DIRECTORY = re.compile(r"exp_(\d+)")


def configure_logging(level: int | str = logging.INFO, console: Console | None = None) -> Console:
    """Send all log records of this process, and Python's warnings, to `console` (None: stderr), which is returned.

    `level` is that of nemo_rl's own records; libraries show warnings, noisy ones only errors. vLLM configures itself in
    each of its processes, by VLLM_LOGGING_LEVEL, which is set here unless it is set already. May be called again; the
    last call counts.
    """
    console = console or Console(stderr=True)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.name == HANDLER_NAME]:
        root.removeHandler(handler)
    root.addHandler(_make_handler(console))
    root.setLevel(logging.WARNING)
    logging.getLogger("nemo_rl").setLevel(level)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.captureWarnings(True)
    return console


class EscapingFormatter(logging.Formatter):
    """Formats control characters as escapes, except line ends and tabs: a client's text moves no cursor.

    Values that a recipe reads from the environment are shown as their interpolations. `short_name` is the module of a
    logger of ours, and the package of any other.
    """

    def format(self, record: logging.LogRecord) -> str:
        package, _, rest = record.name.partition(".")
        record.short_name = rest.rpartition(".")[2] if package == "nemo_rl" and rest else package
        return conceal(super().format(record)).translate(TERMINAL_CONTROLS)


def _make_handler(console: Console) -> logging.Handler:
    """Return the handler: coloured lines above a live display on a terminal, plain unwrapped lines elsewhere."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(
            console=console, show_path=False, markup=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(EscapingFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(short_name)s: %(message)s", "%H:%M:%S"))
    handler.name = HANDLER_NAME
    return handler


def check_writable(key: str, directory: str | Path) -> None:
    """Raise ConfigError for a directory that cannot be made or written to; makes nothing."""
    path = Path(directory)
    if "\0" in str(directory):
        raise ConfigError(key, str(directory), "is no path: it has a null character; allowed: a directory")
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        is_usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except OSError as error:  # too long a name
        raise ConfigError(key, str(directory), f"is no path: {error}; allowed: a directory") from error
    if not is_usable:
        problem = "may not be written to" if path.is_dir() else "is a file"
        raise ConfigError(key, str(directory), f"{path} {problem}; allowed: a directory, which is made if necessary")


def make_run_directory(log_dir: str | Path) -> Path:
    """Create the next of `exp_001`, `exp_002`, ... in `log_dir`; runs that start together get one each."""
    root = Path(log_dir)
    root.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in root.iterdir() if (match := _RUN_DIRECTORY.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        directory = root / f"exp_{number:03d}"
        try:
            directory.mkdir()
        except FileExistsError:  # another run was quicker
            number += 1
        else:
            return directory


def make_sample_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> Table:
    """Return a table of samples; long text is cut in its middle, markup is ignored, control characters are escaped."""
    table = Table(title=Text(title), show_lines=True)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape_control_chars(str(cell))) for cell in row))
    return table


def escape_control_chars(text: str, max_chars: int = MAX_CELL_CHARS) -> str:
    """Return text that is safe to send to a terminal.

    Example: with `max_chars` 5, "abcdefgh" is "ab…gh"; an escape character is spelled "\\x1b".
    """
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    return f"{text[:head]}…{text[len(text) - (max_chars - head - 1) :]}"


def render_table(table: Table, width: int = FILE_WIDTH) -> str:
    """Return the table without colour, for a log file; it begins on a line of its own."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n" + capture.get().rstrip()


class Progress:
    """Progress of a training run as log lines; metric names have no prefix."""

    def __init__(self, *, rollouts_per_step: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rollouts_per_step = rollouts_per_step
        self._clock = clock
        self._step = self._total = 0
        self._rollouts = 0
        self._last_rollout_log_at = self._last_step_at = clock()
        self._step_durations_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS)

    def start(self, *, step: int, total: int | None) -> None:
        """Begin after `step` steps of `total` (None: not known)."""
        self._step, self._total = step, total or 0
        self._last_step_at = self._last_rollout_log_at = self._clock()
        heartbeat.record(phase="training", step=step)
        if step:
            logger.info("resuming after step %s", self._position())

    def rollout(self, rollout: object = None) -> None:
        """Count a finished rollout of the current step; the callback of the rollout layer."""
        self._rollouts += 1
        heartbeat.record()
        if self._clock() - self._last_rollout_log_at >= ROLLOUT_LOG_PERIOD_S:
            self._last_rollout_log_at = self._clock()
            total = f" of {self._rollouts_per_step}" if self._rollouts_per_step else ""
            logger.info("step %d: %d%s rollouts", self._step + 1, self._rollouts, total)

    def step(self, step: int, *, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        self._advance(step)
        head, tail = f"step {self._position()}", f"{format_seconds(seconds)}, {self._rate(metrics)}"
        shown = format_metrics(_step_metrics(metrics), room=ROOM - len(head) - len(tail) - 2 * len(" | "))
        logger.info("%s", " | ".join(part for part in (head, shown, tail) if part))

    def validation(
        self, step: int, *, metrics: Mapping[str, float], columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        """Report a validation; `rows` are a few of its rollouts."""
        self._rollouts = 0
        heartbeat.record()
        head = f"validation after step {step} | "
        ordered = {name: metrics[name] for name in (*VALIDATION_METRICS, *metrics) if name in metrics}
        logger.info("%s%s", head, format_metrics(ordered, room=ROOM - len(head)))
        if rows:
            self._show(make_sample_table(columns, rows, title=f"validation after step {step}"))

    def close(self) -> None:
        """Release the terminal."""

    def _advance(self, step: int) -> None:
        heartbeat.record(step=step)
        now = self._clock()
        self._step_durations_s.append(now - self._last_step_at)
        self._step, self._last_step_at, self._last_rollout_log_at, self._rollouts = step, now, now, 0

    def _position(self) -> str:
        return f"{self._step}/{self._total}" if self._total else str(self._step)

    def _rate(self, metrics: Mapping[str, float]) -> str:
        tokens = f"{format_number(metrics['tokens_per_sec'])} tok/s, " if "tokens_per_sec" in metrics else ""
        return f"{tokens}{self._time_left()}"

    def _time_left(self) -> str:
        if not self._total or not self._step_durations_s:
            return "ETA unknown"
        mean_step_s = sum(self._step_durations_s) / len(self._step_durations_s)
        return f"ETA {format_duration((self._total - self._step) * mean_step_s)}"

    def _show(self, table: Table) -> None:
        logger.info("%s", render_table(table))


class LiveProgress(Progress):
    """Progress on a terminal: a panel that stays below the log records of the same console."""

    def __init__(
        self, console: Console, *, rollouts_per_step: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(rollouts_per_step=rollouts_per_step, clock=clock)
        self._bars = RichBars(
            TextColumn("{task.description:<9}"), BarColumn(40), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
        )
        self._steps: TaskID = self._bars.add_task("steps", total=None, note="")
        self._rollout_bar: TaskID = self._bars.add_task("rollouts", total=rollouts_per_step, note="")
        self._lines: dict[str, str] = {}
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=4, transient=True)

    def start(self, *, step: int, total: int | None) -> None:
        super().start(step=step, total=total)
        self._bars.update(self._steps, completed=step, total=total)
        self._live.start()

    def rollout(self, rollout: object = None) -> None:
        self._rollouts += 1
        heartbeat.record()
        self._bars.update(self._rollout_bar, completed=self._rollouts)

    def step(self, step: int, *, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        self._advance(step)
        self._bars.update(self._steps, completed=step, note=self._rate(metrics))
        self._bars.update(self._rollout_bar, completed=0)
        self._lines = {
            "step": format_step_metrics(metrics),
            "seconds": format_step_seconds(seconds),
            **_select(self._lines, "validation"),
        }

    def validation(
        self, step: int, *, metrics: Mapping[str, float], columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        super().validation(step, metrics=metrics, columns=columns, rows=rows)
        self._bars.update(self._rollout_bar, completed=0)
        self._lines["validation"] = f"{format_metrics(metrics)} (after step {step})"

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._bars)
        for name, line in self._lines.items():
            grid.add_row(Text(f"{name:<11}{line}", overflow="ellipsis", no_wrap=True))
        return grid

    def _show(self, table: Table) -> None:
        self._live.console.print(table)


def make_progress(section: LoggerConfig, console: Console, *, rollouts_per_step: int | None = None) -> Progress:
    """Return the live panel if `logger.progress` is on and `console` is a terminal, else log lines."""
    if section.progress and console.is_terminal:
        return LiveProgress(console, rollouts_per_step=rollouts_per_step)
    return Progress(rollouts_per_step=rollouts_per_step)


def format_step_metrics(metrics: Mapping[str, float]) -> str:
    """Return those metrics of a step that are shown while training."""
    return format_metrics(_step_metrics(metrics))


def _step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {short: metrics[name] for name, short in STEP_METRICS.items() if name in metrics}


def format_metrics(metrics: Mapping[str, float], *, room: int | None = None) -> str:
    """Return metrics as one line, with three significant digits; as many as have room in so many characters.

    Example: "reward 0.593  tokens 12.4"
    """
    texts = [f"{name} {format_number(value)}" for name, value in metrics.items()]
    while room is not None and len(texts) > 1 and len("  ".join(texts)) > room:
        texts.pop()
    return "  ".join(texts)


def format_number(value: float) -> str:
    """Return a number with three significant digits.

    Example: 0.59341 is "0.593", 12345 is "12,300", 1.5e-7 is "1.5e-07".
    """
    if not 1000 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.0f}"


def format_seconds(seconds: Mapping[str, float]) -> str:
    """Return how long a step took."""
    return f"{seconds.get('total_step_time', sum(seconds.values())):.3g} s"


def format_step_seconds(seconds: Mapping[str, float]) -> str:
    """Return a step's seconds with those of its phases.

    Example: "1.92 s (generation 0.91, training 0.85)"."""
    phases = ", ".join(f"{short} {seconds[name]:.3g}" for name, short in PHASES.items() if name in seconds)
    return format_seconds(seconds) + (f" ({phases})" if phases else "")


def format_duration(seconds: float) -> str:
    """Return a duration as text.

    Example: 75 is "1:15", 3675 is "1:01:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _select(lines: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: lines[name] for name in names if name in lines}


class CollectionProgress:
    """Progress of a collection as log lines."""

    def __init__(self, *, total: int, num_finished: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_finished` of `total` were finished before this start."""
        self.total = total
        self.num_finished = num_finished
        self.num_new = 0
        self.num_failures = 0  # attempts
        self._rewards = 0.0
        self._clock = clock
        self._started_at = self._last_log_at = self._window_started_at = clock()
        self._window_start_count = 0  # `num_new` at `_window_started_at`
        self._previous_rate: float | None = None

    @property
    def mean_reward(self) -> float | None:
        """Return the mean reward of the rollouts of this start; None without any."""
        return self._rewards / self.num_new if self.num_new else None

    @property
    def seconds(self) -> float:
        return self._clock() - self._started_at

    def start(self) -> None:
        """Begin: time before this call does not count in the rate."""
        self._started_at = self._last_log_at = self._window_started_at = self._clock()

    def rollout(self, trajectory: Trajectory) -> None:
        """Count a finished attempt."""
        if trajectory.failure is None:
            self.num_new += 1
            self.num_finished += 1
            self._rewards += trajectory.reward
        else:
            self.num_failures += 1
        self._report()

    def close(self) -> None:
        """Release the terminal."""

    def line(self) -> str:
        """Return the current state as one line.

        Example: "31% | 215/s | ETA 0:13 | reward 0.263 | 3 failed attempts"."""
        share = 100 * self.num_finished // max(self.total, 1)
        rate = self._rate()
        left = format_duration((self.total - self.num_finished) / rate) if rate else "unknown"
        reward = "" if self.mean_reward is None else f" | reward {self.mean_reward:.3f}"
        failures = f" | {self.num_failures} failed attempts" if self.num_failures else ""
        return f"{share}% | {rate:,.3g}/s | ETA {left}{reward}{failures}"

    def _rate(self) -> float:
        """Return finished rollouts per second, over the current window and the one before it."""
        now = self._clock()
        if now - self._window_started_at >= WINDOW_S:
            self._previous_rate = (self.num_new - self._window_start_count) / (now - self._window_started_at)
            self._window_start_count, self._window_started_at = self.num_new, now
        elapsed = now - self._window_started_at
        current = (self.num_new - self._window_start_count) / elapsed if elapsed > 0 else 0.0
        if self._previous_rate is None:
            return current
        share = elapsed / WINDOW_S
        return share * current + (1 - share) * self._previous_rate

    def _report(self) -> None:
        if self._clock() - self._last_log_at >= LINE_PERIOD_S:
            self._last_log_at = self._clock()
            logger.info("%d/%d rollouts, %s", self.num_finished, self.total, self.line())


class LiveCollectionProgress(CollectionProgress):
    """Progress of a collection as a bar on a terminal, below the log records of the same console."""

    def __init__(self, console: Console, *, total: int, num_finished: int) -> None:
        super().__init__(total=total, num_finished=num_finished)
        self._bar = RichBars(
            TextColumn("rollouts"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=num_finished, note="")
        self._last_update_at = 0.0

    def start(self) -> None:
        super().start()
        self._bar.start()

    def close(self) -> None:
        self._update()
        self._bar.stop()

    def _report(self) -> None:
        if self._clock() - self._last_update_at >= 0.25:
            self._last_update_at = self._clock()
            self._update()

    def _update(self) -> None:
        self._bar.update(self._task, completed=self.num_finished, note=self.line())


def make_collection_progress(console: Console, *, wanted: bool, total: int, num_finished: int) -> CollectionProgress:
    """Return the bar if it is wanted and `console` is a terminal, else log lines."""
    if wanted and console.is_terminal:
        return LiveCollectionProgress(console, total=total, num_finished=num_finished)
    return CollectionProgress(total=total, num_finished=num_finished)
