"""Counts of what a run could not write to its directory: metrics and rollouts, for its summary and its exit code."""

from collections import Counter

from nemo_rl.errors import RecordError


class LostRecords:
    """Numbers of records that the files of a run lack."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, file: object, count: int = 1) -> None:
        self._counts[str(file)] += count

    def __str__(self) -> str:
        """Name each file with its number of lost records; "" if nothing is lost."""
        return ", ".join(f"{file} lacks {count}" for file, count in self._counts.items())

    def check(self) -> None:
        """Raise RecordError if records are lost."""
        if self._counts:
            raise RecordError(f"records could not be written: {self}; make room, and see the first error in the log")
