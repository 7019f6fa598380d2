"""The files of one shard: the rollouts of one seed, or of one chunk of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"rollouts-rs(\d+)(?:-chunk(\d+))?")


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Where a shard lies: five files whose names begin alike."""

    directory: Path
    name: str  # without suffix: "rollouts-rs0-chunk3"

    @classmethod
    def of(cls, directory: str | Path, seed: int, chunk_index: int | None = None) -> "ShardFiles":
        chunk = "" if chunk_index is None else f"-chunk{chunk_index}"
        return cls(Path(directory), f"rollouts-rs{seed}{chunk}")

    @property
    def seed(self) -> int:
        match = _NAME.fullmatch(self.name)
        assert match is not None
        return int(match[1])

    @property
    def rollouts(self) -> Path:
        return self.directory / f"{self.name}.jsonl"

    @property
    def failures(self) -> Path:
        return self.directory / f"{self.name}_failures.jsonl"

    @property
    def identity(self) -> Path:
        return self.directory / f"{self.name}_identity.json"

    @property
    def done(self) -> Path:
        return self.directory / f"{self.name}.jsonl.done"


def find_shards(directory: str | Path) -> Sequence[ShardFiles]:
    """Every shard that was begun in `directory`, by seed and chunk."""
    found = {path.name.removesuffix("_identity.json") for path in Path(directory).glob("rollouts-rs*_identity.json")}
    named = [(match, name) for name in found if (match := _NAME.fullmatch(name))]
    named.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))
    return [ShardFiles(Path(directory), name) for _, name in named]
