"""The keys that the schema knows below a path, for "did you mean", overrides of free mappings, and errors with the full
key."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nemo_rl.config.kinds import Kind, Section
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.recipe_files import at
from nemo_rl.config.value_types import MAX_SEED
from nemo_rl.errors import ConfigError

Path: TypeAlias = Sequence[str | int]
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # an interpolation of one key and nothing else
MAX_COUNT = 10**15  # bound of every number but seeds: beyond what any machine holds
# Mappings and lists whose values are for others, who may use blank texts and any float.
OWN_WORDS = frozenset(
    {
        "kwargs",
        "task_kwargs",
        "env_vars",
        "vllm_kwargs",
        "stop_strings",
        "chat_template_kwargs",
        "args",
        "command",
        "hf_config_overrides",
    }
)
UNKNOWN_KEY = "unknown key"  # how the problem of one begins
ERROR_MESSAGES = {
    "missing": "required, but not set",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
}
SECRET_VALUES = ("cluster", "env_vars")
PRIORITY_ERROR_TYPES = ("extra_forbidden", "missing")  # a misspelt key explains the missing one


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """The schema's knowledge of the value at a path."""

    section: type[Section] | None = None  # a mapping whose keys are known
    values: Any = None  # the annotation of a free mapping's values; None: no free mapping
    items: Any = None  # the annotation of a list's items; None: no list
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of a free mapping
    kind: Kind | None = None  # kind of the section, or of the mapping's values
    entry_name: str | None = None  # the entry of the kind whose section this is

    @property
    def names(self) -> frozenset[str]:
        """The known keys; for a free mapping those of its default."""
        return frozenset(self.section.model_fields) if self.section else frozenset(self.defaults)

    @property
    def is_free(self) -> bool:
        return self.values is not None


def find_schema_node(path: Path, raw: Any, schema: type[Section] = GRPORunConfig) -> SchemaNode | None:
    """Return the node of `schema` at `path`; None: there is none.

    `raw` is the configuration, which names the entries of kinds.
    """
    node: SchemaNode | None = _make_node(schema)
    for depth, name in enumerate(path):
        if node is None:
            return None
        node = _child_node(node, name, at(raw, path[: depth + 1]))
    return node


def has(raw: Any, path: Path) -> bool:
    """Return whether a value, null included, exists at `path`."""
    parent = at(raw, path[:-1])
    if isinstance(parent, Mapping):
        return path[-1] in parent
    return isinstance(parent, list) and str(path[-1]).isdigit() and int(path[-1]) < len(parent)


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def kind_of_field(info: FieldInfo) -> Kind | None:
    """Return the kind that the field's annotation names; None: its section is fixed."""
    return next((item for item in info.metadata if isinstance(item, Kind)), None)


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the section classes that an annotation allows, in lists and as values of mappings too."""
    for option in union_members(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            yield option
        elif get_origin(option) in (list, dict):
            yield from sections_in(get_args(option)[-1])


def _child_node(node: SchemaNode, name: str | int, raw: Any) -> SchemaNode | None:
    """Return the node one key below; `raw` is the value there, which names the entry of a section of a kind."""
    if node.section is not None and name in node.section.model_fields:
        info = node.section.model_fields[str(name)]
        default = info.get_default(call_default_factory=True, validated_data={})
        child = _make_node(info.annotation, default, kind_of_field(info))
        is_one_section = child.kind is not None and not child.is_free
        return _entry_node(child.kind, raw, None) if child.kind and is_one_section else child
    if node.items is not None and str(name).isdigit():
        return _make_node(node.items)
    if node.values is not None:
        return _make_node(node.values) if node.kind is None else _entry_node(node.kind, raw, str(name))
    return None


def _entry_node(kind: Kind, raw: Any, fallback: str | None) -> SchemaNode | None:
    """Return the node of the section that `raw` names; None for an unknown entry, which reading refuses."""
    name = kind.name_of(raw, fallback)
    try:
        section = None if name is None else kind.section(name)
    except ConfigError:
        return None
    return SchemaNode(section, kind=kind, entry_name=name)


def _make_node(annotation: Any, default: Any = None, kind: Kind | None = None) -> SchemaNode:
    section, values, items = None, None, None
    for option in union_members(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            section = option
        elif get_origin(option) is dict:
            values = get_args(option)[1]
        elif get_origin(option) is list:
            items = get_args(option)[0]
    return SchemaNode(section, values, items, default if isinstance(default, dict) else {}, kind)


def union_members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        yield from union_members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from union_members(option)
    else:
        yield annotation


def make_schema_error(
    error: ValidationError, raw: Any, prefix: Path = (), schema: type[Section] = GRPORunConfig
) -> ConfigError:
    """Return the most telling of the errors; `raw` is the whole configuration, `prefix` the validated part's path."""
    found = []
    for details in error.errors(include_url=False):
        path = _strip_union_members((*prefix, *details["loc"]), raw, details["type"])
        rank = (
            PRIORITY_ERROR_TYPES.index(details["type"])
            if details["type"] in PRIORITY_ERROR_TYPES
            else len(PRIORITY_ERROR_TYPES)
        )
        found.append((rank, -len(path), path, details))
    _, _, path, details = min(found, key=lambda item: item[:2])
    if details["type"] == "extra_forbidden":
        return make_unknown_key_error(path, raw, schema)
    message = details["msg"].removeprefix("Value error, ")  # raised by one of our validators
    problem = ERROR_MESSAGES.get(details["type"]) or message[:1].lower() + message[1:]
    value = "(not shown)" if path[:2] == SECRET_VALUES else at(raw, path)
    if value in ("None", "none"):
        problem += " (write null for no value)"
    return ConfigError(dotted(path), value, problem)


def make_unknown_key_error(path: Path, raw: Any, schema: type[Section] = GRPORunConfig) -> ConfigError:
    """Return the error of an unknown key, with the nearest key of its section."""
    node = find_schema_node(path[:-1], raw, schema)
    problem = UNKNOWN_KEY
    if node is not None and node.kind is not None and node.entry_name is not None:
        problem += f" of {node.kind.noun} of {node.kind.name_key} {node.entry_name!r}"
        if node.entry_name not in node.kind.names:
            problem += f" (built in: {', '.join(node.kind.names)}; one's own takes kwargs)"
    return ConfigError(dotted(path), at(raw, path), problem, known=node.names if node else ())


def reject_booleans(raw: Any, validated: Any, path: Path = ()) -> None:
    """Raise ConfigError if true or false stands for a number: pydantic would read 1 or 0."""
    if isinstance(raw, bool) and not isinstance(validated, bool):
        raise ConfigError(
            dotted(path), raw, "must be a whole number" if isinstance(validated, int) else "must be a number"
        )
    if isinstance(raw, dict) and isinstance(validated, dict):
        for name in raw.keys() & validated.keys():
            reject_booleans(raw[name], validated[name], (*path, name))
    elif isinstance(raw, list) and isinstance(validated, list):
        for index, (item, own) in enumerate(zip(raw, validated, strict=True)):
            reject_booleans(item, own, (*path, index))


def reject_unusable_values(value: Any, path: Path = ()) -> None:
    """Raise ConfigError for values that no key can use: libraries would fail on them later, or never end.

    Numbers beyond what any machine holds, numbers that are not finite, and texts that are blank or have a null
    character.
    """
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            reject_unusable_values(item, (*path, name))
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(dotted(path), value, "has a null character; allowed: other characters")
    elif isinstance(value, str) and value.isspace() and not OWN_WORDS.intersection(path):
        raise ConfigError(dotted(path), value, "is blank; allowed: a text, or null for no value")
    elif isinstance(value, float) and not math.isfinite(value):  # in free mappings; the schema refuses others
        if "hf_config_overrides" in path:  # as some models' configurations have
            return
        raise ConfigError(dotted(path), value, "must be a finite number")
    elif isinstance(value, int | float):
        limit = MAX_SEED if "seed" in str(path[-1]) else MAX_COUNT
        if abs(value) > limit and not (isinstance(value, float) and OWN_WORDS.intersection(path)):
            raise ConfigError(dotted(path), value, f"is too large; allowed: at most {limit}")


def name_source(error: ConfigError, raw: Any) -> ConfigError:
    """Return the error under the key that holds the value, if its own key only refers to that one.

    Example: with `b: ${a}`, what is wrong with b is told of a, "read by b".
    """
    key, readers = error.key, []
    while key not in readers and isinstance(value := at(raw, key.split(".")), str) and "${" in value:
        readers.append(key)
        if (reference := REFERENCE.fullmatch(value.strip())) is None:
            return ConfigError(error.key, error.value, f"{error.problem} (it is {value})", known=error.known)
        key = reference[1]
    if not readers:
        return error
    return ConfigError(key, error.value, f"{error.problem} (read by {', '.join(readers)})", known=error.known)


def _strip_union_members(loc: Path, raw: Any, error_type: str) -> Path:
    """Return the location without the names that pydantic inserts for members of a union."""
    path: tuple[str | int, ...] = ()
    for position, name in enumerate(loc):
        is_last = position == len(loc) - 1
        if has(raw, (*path, name)) or (is_last and error_type == "missing"):
            path = (*path, name)
    return path
