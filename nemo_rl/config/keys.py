"""Which keys the schema knows below a path: for "did you mean" and for overrides of free mappings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from nemo_rl.config.entries import ENTRY_KINDS, get_entry_kind
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.section import Section

Path: TypeAlias = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """What the schema says of the value at a path."""

    section: type[Section] | None = None  # a mapping whose keys are known
    values: Any = None  # the annotation of a free mapping's values; None: no free mapping
    items: Any = None  # the annotation of a list's items; None: no list
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of a free mapping

    @property
    def names(self) -> frozenset[str]:
        """The keys that may stand here; for a free mapping those of its default."""
        return frozenset(self.section.model_fields) if self.section else frozenset(self.defaults)

    @property
    def is_free(self) -> bool:
        return self.values is not None


def find_schema_node(path: Path, raw: Any, schema: type[Section] = GRPORunConfig) -> SchemaNode | None:
    """The place of `schema` at `path`; None: no such place.

    `raw` is the configuration, which tells the kinds of entries of `env` and the like.
    """
    node: SchemaNode | None = _make_node(schema)
    for depth, name in enumerate(path):
        if node is None:
            return None
        kinds = ENTRY_KINDS.get(str(path[0])) if depth == 1 else None
        node = _child_node(node, name) if kinds is None else _make_node(kinds.section(entry_kind(path[:2], raw)))
    return node


def entry_kind(path: Path, raw: Any) -> str:
    """The kind of the entry at `path`: its section and its name."""
    return get_entry_kind(str(path[1]), at(raw, path))


def at(raw: Any, path: Path) -> Any:
    """The value at `path` of plain mappings and lists; None where there is none."""
    for name in path:
        if isinstance(raw, Mapping) and name in raw:
            raw = raw[name]
        elif isinstance(raw, list) and str(name).isdigit() and int(name) < len(raw):
            raw = raw[int(name)]
        else:
            return None
    return raw


def has(raw: Any, path: Path) -> bool:
    """Whether a value, null included, stands at `path`."""
    parent = at(raw, path[:-1])
    if isinstance(parent, Mapping):
        return path[-1] in parent
    return isinstance(parent, list) and str(path[-1]).isdigit() and int(path[-1]) < len(parent)


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _child_node(node: SchemaNode, name: str | int) -> SchemaNode | None:
    if node.section is not None and name in node.section.model_fields:
        field_info = node.section.model_fields[str(name)]
        default = field_info.get_default(call_default_factory=True, validated_data={})
        return _make_node(field_info.annotation, default)
    if node.items is not None and str(name).isdigit():
        return _make_node(node.items)
    if node.values is not None:
        return _make_node(node.values)
    return None


def _make_node(annotation: Any, default: Any = None) -> SchemaNode:
    section, values, items = None, None, None
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            section = option
        elif get_origin(option) is dict:
            values = get_args(option)[1]
        elif get_origin(option) is list:
            items = get_args(option)[0]
    return SchemaNode(section, values, items, default if isinstance(default, dict) else {})


def _options(annotation: Any) -> Iterator[Any]:
    """The members of a union, without what is only annotation."""
    if get_origin(annotation) is Annotated:
        yield from _options(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation
