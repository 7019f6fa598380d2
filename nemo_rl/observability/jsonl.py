"""Metrics as JSON lines in the run directory; always on, so that every run can be read without an account."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

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
