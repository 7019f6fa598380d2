"""The metrics of a run, read from metrics.jsonl as it grows."""

import json
from pathlib import Path

MAX_BYTES = 256 << 20
MAX_STEP = 2**31 - 1


class MetricsFile:
    """metrics.jsonl, read as it grows: the value of each metric that was logged last for a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_name: dict[str, dict[int, float]] = {}
        self.num_damaged = 0
        self._end = 0

    def advance(self) -> bool:
        """Read new lines; return whether there were any. A missing file has none."""
        try:
            size = self.path.stat().st_size
            if size < self._end:
                self.by_name, self._end, self.num_damaged = {}, 0, 0
            if size == self._end or size > MAX_BYTES:
                return False
            with self.path.open("rb") as file:
                file.seek(self._end)
                data = file.read()
        except OSError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._add(line)
        self._end += len(whole)
        return bool(whole)

    def series(self, name: str) -> dict[int, float]:
        """Return a metric by step, in order; empty if it was not logged."""
        return dict(sorted(self.by_name.get(name, {}).items()))

    def at(self, step: int) -> dict[str, float]:
        return {name: values[step] for name, values in sorted(self.by_name.items()) if step in values}

    @property
    def steps(self) -> list[int]:
        """Return the training steps that have been logged."""
        trained = self.by_name.get("timing/train/total_step_time") or self.by_name.get("train/reward") or {}
        return sorted(trained or self.by_name.get("train/loss", {}))

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
            if not 0 <= step <= MAX_STEP:
                raise ValueError
            for name, value in values.items():
                self.by_name.setdefault(str(name), {})[step] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            self.num_damaged += 1
