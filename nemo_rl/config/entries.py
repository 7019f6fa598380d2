"""Sections whose entries have a kind of their own: `env` and `scorers`. An entry's `type`, or its name, tells it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.environment import ENVIRONMENT_CONFIGS, CustomEnvironmentConfig
from nemo_rl.config.scorers import SCORER_CONFIGS, CustomScorerConfig
from nemo_rl.config.section import Section


@dataclass(frozen=True, slots=True)
class EntryKinds:
    """What the entries of one section may be."""

    noun: str  # in errors
    built_in: Mapping[str, type[Section]]
    custom: type[Section]  # of one's own kinds

    def section(self, kind: str) -> type[Section]:
        return self.built_in.get(kind, self.custom)

    def read(self, name: str, entry: Any) -> Any:
        """An entry as the section of its kind; what is no mapping is left for pydantic to refuse."""
        if not isinstance(entry, dict):
            return entry
        kind = get_entry_kind(name, entry)
        return self.section(kind).model_validate({**entry, "type": kind})

    def read_all(self, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        return {name: self.read(name, entry) for name, entry in entries.items()}


ENTRY_KINDS: dict[str, EntryKinds] = {
    "env": EntryKinds("an environment", ENVIRONMENT_CONFIGS, CustomEnvironmentConfig),
    "scorers": EntryKinds("a scorer", SCORER_CONFIGS, CustomScorerConfig),
}


def get_entry_kind(name: str, entry: Any) -> str:
    """The entry's `type`, or its own name."""
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    return kind if isinstance(kind, str) else name


def parse_environment_config(name: str, entry: Any) -> Any:
    """One entry of `env`."""
    return ENTRY_KINDS["env"].read(name, entry)


def parse_scorer_config(name: str, entry: Any) -> Any:
    """One entry of `scorers`."""
    return ENTRY_KINDS["scorers"].read(name, entry)
