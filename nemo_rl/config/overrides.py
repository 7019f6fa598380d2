"""Overrides of the command line in Hydra's grammar, applied to a recipe's plain mappings and lists.

| text | meaning |
|---|---|
| `a.b=c` | set a key of the schema, whether or not the recipe has it; below a free mapping (kwargs) it must exist |
| `++a.b=c` | set, or add below a free mapping |
| `+a.b=c` | add what the recipe does not have |
| `~a.b`, `~a.b=c` | remove a key of the recipe (with a value: only if it equals c) |

A mapping given as a value is merged into the recipe's; an item of a list is named by its index. Unknown
keys are left for the schema to refuse.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl.config.keys import dotted, find_schema_node, has
from nemo_rl.config.kinds import Section
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.recipe_files import at, is_beyond_float
from nemo_rl.config.translators import recipe_translators
from nemo_rl.errors import ConfigError

REPLACE = "_override_"  # set to true: this mapping replaces the one below instead of being merged into it
# The plain forms, whose meaning in Hydra's grammar needs no parser: a number, a word, a path.
PLAIN = re.compile(
    r"(?P<sign>\+{0,2})(?P<key>[a-zA-Z_]\w*(?:\.(?:[a-zA-Z_]\w*|0|[1-9]\d*))*)=(?P<value>[\w./-]+)", re.ASCII
)
INTEGER = re.compile(r"[+-]?(?:0|[1-9]\d*)", re.ASCII)
FLOAT = re.compile(r"[+-]?(?:0|[1-9]\d*)\.\d+(?:e[+-]?\d+)?|[+-]?[1-9]\d*e[+-]?\d+", re.ASCII)
TEXT = re.compile(r"[A-Za-z_/][\w/-]*(?:\.[A-Za-z_][\w/-]*)*", re.ASCII)
UNKNOWN = object()
CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Override:
    """One override, parsed: what its sign asks for, its dotted key and its value."""

    sign: Literal["", "+", "++", "~"]
    key: str
    value: Any


def merge_layers(base: Any, top: Any) -> Any:
    """Return `top` merged over `base`: mappings key by key, anything else replaced. Neither is changed."""
    if not isinstance(top, dict):
        return [merge_layers(None, item) for item in top] if isinstance(top, list) else top
    replaces = top.get(REPLACE, False) or not isinstance(base, dict)
    result: dict[Any, Any] = {} if replaces else dict(base)
    for key, value in top.items():
        if key != REPLACE:
            result[key] = merge_layers(result.get(key), value)
    return result


def apply_override(config: dict[str, Any], text: str, schema: type[Section] = GRPORunConfig) -> None:
    """Change `config` in place; raises ConfigError for text that is no override or has no target."""
    try:
        override = parse_override(text)
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError("override", f"{text[:80]}...", str(error)) from error
    path = override.key.split(".")
    if "" in path:
        raise ConfigError("override", text, "the key has an empty part")
    for translator in recipe_translators():
        if (moved := translator.moved_key(override.key)) is not None:
            _apply_moved(config, path, moved.split("."), override)
            return
    if override.sign == "~":
        _remove(config, path, override)
        return
    value = override.value
    if override.sign == "+" and has(config, path):
        raise ConfigError(dotted(path), value, "the recipe has this key already: write it without +")
    if override.sign == "":
        _check_exists(config, path, value, schema)
    _set_value(config, path, value)


def _apply_moved(config: dict[str, Any], old: list[str], new: list[str], override: Override) -> None:
    """Apply the override of a moved key to both of its places: interpolations may refer to the old one."""
    if override.sign == "~":
        first, *others = [path for path in (old, new) if has(config, path)] or [new]
        _remove(config, first, override)
        for path in others:
            del at(config, path[:-1])[path[-1]]
        return
    if override.sign == "+" and has(config, old):
        raise ConfigError(dotted(old), override.value, "the recipe has this key already: write it without +")
    for path in (old, new):
        _set_value(config, path, override.value)


def parse_override(text: str) -> Override:
    """Return an override as Hydra parses it; raises ConfigError for any other text.

    Hydra's parser takes a fifth of a second to import, so plain forms do without it.
    """
    override = _parse_plain(text) or _parse_with_hydra(text)
    number = text.partition("=")[2]
    if isinstance(override.value, float) and is_beyond_float(number, override.value):
        raise ConfigError(override.key, number, f"is {override.value} as a float; allowed: other numbers")
    return override


def _parse_plain(text: str) -> Override | None:
    """Return an override of a plain form; None for every other text."""
    match = PLAIN.fullmatch(text)
    value = _plain_value(match["value"]) if match else UNKNOWN
    if match is None or value is UNKNOWN:
        return None
    return Override(match["sign"], match["key"], value)  # pyright: ignore[reportArgumentType]


def _plain_value(text: str) -> Any:
    """Return a number, a constant or a text that stands for itself; UNKNOWN for anything else."""
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if TEXT.fullmatch(text) and text.lower() not in {*CONSTANTS, "inf", "nan"}:
        return text
    return CONSTANTS.get(text, UNKNOWN)


def _parse_with_hydra(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    signs = {OverrideType.CHANGE: "", OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++", OverrideType.DEL: "~"}
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        problem = f"not an override such as a.b=c, ++a.b=c or ~a.b: {str(error).splitlines()[0]}"
        raise ConfigError("override", text, f"{problem}; special characters need quotes: a.b='...'") from error
    if override.package is not None:
        raise ConfigError("override", text, "packages (@) are not supported")
    if override.is_sweep_override():
        raise ConfigError("override", text, "several values ask for several runs; a list is written [1,2]")
    assert override.type is not None
    return Override(signs[override.type], override.key_or_group, override.value())  # pyright: ignore


def _check_exists(config: dict[str, Any], path: list[str], value: object, schema: type[Section]) -> None:
    """Require the key below a free mapping to exist, since the schema cannot catch a misspelt one there."""
    for depth in range(1, len(path)):
        node = find_schema_node(path[:depth], config, schema)
        if node is None or not node.is_free:
            continue
        found = at(config, path[:depth])
        if isinstance(found, list):  # in the place of a mapping: refused by name when all is read
            return
        known = set(node.names) | set(found or {})
        if node.kind is not None and node.kind.default is None:  # an entry may be named after its kind
            known |= set(node.kind.names)
        if path[depth] not in known:
            problem = "the recipe has no such key; ++ adds it"
            raise ConfigError(dotted(path[: depth + 1]), value, problem, known=known)


def _set_value(config: dict[str, Any], path: list[str], value: Any) -> None:
    parent: Any = config
    for depth, name in enumerate(path[:-1]):
        _check_container(parent, path[:depth], name)
        key: Any = int(name) if isinstance(parent, list) else name
        if isinstance(parent, dict) and parent.get(key) is None:
            if path[depth + 1].isdigit():
                raise ConfigError(dotted(path[: depth + 1]), None, "the recipe has no list here")
            parent[key] = {}
        parent = parent[key]
    _check_container(parent, path[:-1], path[-1])
    key: Any = int(path[-1]) if isinstance(parent, list) else path[-1]
    old = parent.get(key) if isinstance(parent, dict) else parent[key]
    parent[key] = merge_layers(old, value)


def _check_container(parent: Any, path: list[str], name: str) -> None:
    if isinstance(parent, dict):
        return
    if not isinstance(parent, list):
        raise ConfigError(dotted(path), parent, f"no mapping, so that it has no key {name!r}")
    if not (name.isdigit() and int(name) < len(parent)):
        raise ConfigError(
            dotted([*path, name]), parent, f"a list of {len(parent)}: its items are 0 to {len(parent) - 1}"
        )


def _remove(config: dict[str, Any], path: list[str], override: Override) -> None:
    parent = at(config, path[:-1])
    if not has(config, path):
        known = parent if isinstance(parent, dict) else ()
        raise ConfigError(dotted(path), None, "the recipe has no such key to remove", known=known)
    key: Any = int(path[-1]) if isinstance(parent, list) else path[-1]
    expected = override.value
    if expected is not None and parent[key] != expected:
        raise ConfigError(dotted(path), parent[key], f"is not {expected!r}, so it is not removed")
    del parent[key]
