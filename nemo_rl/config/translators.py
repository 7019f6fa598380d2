"""Translators of other programs' recipes: optional modules that rewrite a recipe before the schema reads it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from nemo_rl.config.kinds import load_optional
from nemo_rl.config.recipe_files import Family
from nemo_rl.config.registries import RECIPE_TRANSLATORS
from nemo_rl.errors import ConfigError


class Translation(Protocol):
    """The outcome of translating a recipe."""

    @property
    def problems(self) -> list[ConfigError]:
        """Return the obstacles that refuse the recipe."""
        ...

    def lines(self) -> list[str]:
        """Return notes on what was removed or assumed."""
        ...


class RecipeTranslator(Protocol):
    """A module that translates recipes; recipes of this project stay as they are."""

    def moved_key(self, key: str) -> str | None:
        """Return the key that holds the value of `key` here; None if it has not moved."""
        ...

    def copy_moved_keys(self, layer: dict[str, Any]) -> None:
        """Copy moved keys of one layer to where they are read, in place."""
        ...

    def translate_resolved(self, config: dict[str, Any], family: Family, *, allow_unsupported: bool) -> Translation: ...


class RecipeWriter(Protocol):
    """A module that writes another program's recipe as text; all raise ConfigError for one that they cannot read."""

    def format_translation(self, path: Path, overrides: Sequence[str], *, allow_unsupported: bool) -> str:
        """Return the whole recipe in this project's terms, as YAML."""
        ...

    def format_minimal(self, path: Path, overrides: Sequence[str], *, allow_unsupported: bool) -> str:
        """Return the values that differ from the defaults, as YAML."""
        ...

    def format_changes(self, path: Path, overrides: Sequence[str], *, allow_unsupported: bool) -> str:
        """Return a table of the keys that change, with theirs, ours and the reason."""
        ...


@cache
def recipe_translators() -> tuple[RecipeTranslator, ...]:
    return tuple(load_optional(RECIPE_TRANSLATORS))
