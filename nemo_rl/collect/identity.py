"""What a shard is a collection of, kept beside it, so that nothing else is ever added to it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.collect.keys import Chunk, KeySpace
from nemo_rl.collect.whole_file import atomic_write
from nemo_rl.errors import ConfigError, DataError

FORMAT = 1
MAX_DIFFERENCES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Seed and keys of a shard, and the run that they are of."""

    seed: int
    keys: KeySpace
    run: Mapping[str, Any]  # data, config, model: plain nested values, the same for all shards of a collection

    def to_dict(self) -> dict[str, Any]:
        """As JSON reads it back."""
        chunk = self.keys.chunk
        values = {
            "format": FORMAT,
            "seed": self.seed,
            "chunk": None if chunk is None else chunk.index,
            "num_chunks": 1 if chunk is None else chunk.count,
            "num_tasks": self.keys.num_tasks,
            "num_repeats": self.keys.num_repeats,
            "run": self.run,
        }
        return json.loads(json.dumps(values, allow_nan=False))

    def write(self, path: Path) -> None:
        with atomic_write(path) as file:
            file.write((json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "ShardIdentity":
        """Raises DataError for a file that does not say what a shard is."""
        try:
            values = json.loads(path.read_bytes())
            chunk = None if values["chunk"] is None else Chunk(values["chunk"], values["num_chunks"])
            keys = KeySpace(values["num_tasks"], values["num_repeats"], chunk)
            return cls(values["seed"], keys, values["run"])
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path}: is no identity of a shard: {error}") from error

    def check(self, path: Path) -> None:
        """Raise ConfigError unless the identity at `path` is this one, with every difference."""
        if differences := describe_identity_differences(ShardIdentity.read(path).to_dict(), self.to_dict()):
            raise ConfigError("output_dir", str(path.parent), f"holds rollouts of another run:\n{differences}")


def describe_identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A line for each nested key whose values differ; empty when none does.

    Example: "  run.config.temperature: was 1.0, is 0.7"
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    lines = [
        f"  {key}: was {old.get(key, _ABSENT)!r}, is {new.get(key, _ABSENT)!r}" for key in keys[:MAX_DIFFERENCES_SHOWN]
    ]
    if len(keys) > MAX_DIFFERENCES_SHOWN:
        lines.append(f"  and {len(keys) - MAX_DIFFERENCES_SHOWN} more")
    return "\n".join(lines)


class _Absent:
    def __repr__(self) -> str:
        return "not set"


_ABSENT = _Absent()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
