"""An environment that writes down how many conversations each call brings, one number a line of `path`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.types import EnvStep


class CountingEnvironment:
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def step(self, conversations: Sequence[Any], states: Sequence[Any]) -> list[EnvStep]:
        with self._path.open("a") as file:
            file.write(f"{len(conversations)}\n")
        return [EnvStep(rewards={"one": 1.0}) for _ in conversations]

    async def close(self) -> None:
        """Nothing is held."""
