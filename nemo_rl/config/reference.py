"""The reference of all keys: type, default and meaning, read from the schema and its comments.

The one source of `--help`, `nemo-rl config explain` and the reference pages of the documentation.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_rl.config import keys
from nemo_rl.config.kinds import Kind, Section, load_optional
from nemo_rl.config.registries import KEY_EXPLAINERS

# The configuration of each command that reads one.
SCHEMAS = {
    "grpo": "nemo_rl.config.master:GRPORunConfig",
    "distill": "nemo_rl.config.master:DistillationRunConfig",
    "sft": "nemo_rl.config.supervised_runs:SFTRunConfig",
    "dpo": "nemo_rl.config.supervised_runs:DPORunConfig",
    "rm": "nemo_rl.config.supervised_runs:RewardModelRunConfig",
    "eval": "nemo_rl.config.collect:EvalRunConfig",
    "collect": "nemo_rl.config.collect:CollectRunConfig",
}
if importlib.util.find_spec("nemo_rl.jobs") is not None:  # a leaf, which an installation may lack
    SCHEMAS["submit"] = "nemo_rl.jobs.slurm_config:SubmitRunConfig"

FIELD = re.compile(r"    (\w+): ")
CLASS = re.compile(r"class (\w+)\(")
PRAGMA = re.compile(r"  # (?:pyright|type|noqa): .*")


class KeyExplainer(Protocol):
    """A module that knows the keys of another program's recipes."""

    def describe_spellings(self, key: str) -> list[str]:
        """Return lines on the other names that recipes have for a key of this project."""
        ...

    def explain_key(self, key: str) -> str:
        """Format what becomes of a key that only the other program's recipes have; empty for any other."""
        ...


@dataclass(frozen=True, slots=True)
class KeyReference:
    """One key of a configuration, as its user writes it."""

    key: str  # dotted; <name> stands for a name of the user's, <i> for an index
    type: str
    default: str  # as YAML writes it, or "required"
    meaning: str
    entry: str = ""  # the entry of a kind whose section has the key, e.g. "a loss of type ppo"
    is_section: bool = False  # it holds further keys


def find_schema(command: str) -> type[Section]:
    """Import the configuration that a command reads."""
    module, _, name = SCHEMAS[command].partition(":")
    return getattr(importlib.import_module(module), name)


def walk_keys(section: type[Section], prefix: str = "", entry: str = "") -> Iterator[KeyReference]:
    """Yield every key of a schema, those of all built-in entries of its kinds included."""
    for name, info in section.model_fields.items():
        if info.exclude and name != "type":  # set by the loading, not by the user
            continue
        key = f"{prefix}{name}"
        children = list(_children(info))
        yield _describe(section, name, key, entry, is_section=bool(children))
        for suffix, child, child_entry in children:
            yield from walk_keys(child, f"{key}{suffix}.", child_entry or entry)


def find_key(schema: type[Section], key: str) -> list[KeyReference]:
    """Return the references of a dotted key: one per entry of a kind that has it.

    Names of one's own entries match `<name>`, and indices `<i>`.
    """
    parts = key.split(".")
    return [found for found in walk_keys(schema) if matches(found.key.split("."), parts)]


def find_direct_key(schema: type[Section], key: str) -> KeyReference:
    """Return a key of fixed sections; entries of kinds are not imported."""
    section = schema
    *parents, name = key.split(".")
    for parent in parents:
        section = next(keys.sections_in(section.model_fields[parent].annotation))
    return _describe(section, name, key, "", is_section=False)


def format_common_keys(command: str, names: Sequence[str]) -> str:
    """Format the keys that --help of a command shows: one line each, with type, default and meaning."""
    schema = find_schema(command)
    found = [find_direct_key(schema, name) for name in names]
    lines = "".join(f"  {line}\n" for line in format_keys(found).splitlines())
    more = f"nemo-rl config explain KEY says what one means; nemo-rl config schema {command} lists all."
    return f"keys most used, with the schema's defaults (a recipe may set others):\n{lines}\n{more}\n"


def format_keys(references: Iterable[KeyReference]) -> str:
    """Format keys as a list: one line each, with type and default."""
    found = list(references)
    width = max(len(reference.key) for reference in found)
    return "".join(
        f"{key.key:<{width}}  {key.type}, {_default_text(key)}{key.entry and f' ({key.entry})'}\n" for key in found
    )


def format_explanation(by_command: Mapping[str, Sequence[KeyReference]]) -> str:
    """Format what a key is for each command that has it; commands and entries that agree share a paragraph."""
    groups: dict[KeyReference, list[str]] = {}
    for command, references in by_command.items():
        for reference in references:
            groups.setdefault(replace(reference, entry=""), []).append(
                f"{command} ({reference.entry})" if reference.entry else command
            )
    return "\n".join(_format_paragraph(reference, owners) for reference, owners in groups.items())


def _format_paragraph(reference: KeyReference, owners: list[str]) -> str:
    lines = [
        reference.key,
        f"  {reference.meaning}",
        f"  type: {reference.type}",
        f"  default: {reference.default}",
        f"  of: {', '.join(owners)}",
    ]
    for explainer in _key_explainers():
        lines += [f"  {line}" for line in explainer.describe_spellings(reference.key)]
    return "\n".join(lines) + "\n"


def explain_foreign_key(key: str) -> str:
    """Format what becomes of a key that only recipes of another program have; empty for any other."""
    return next(filter(None, (explainer.explain_key(key) for explainer in _key_explainers())), "")


def _key_explainers() -> Iterator[KeyExplainer]:
    return load_optional(KEY_EXPLAINERS)


def _default_text(reference: KeyReference) -> str:
    return "required" if reference.default == "required" else f"default {reference.default}"


def matches(pattern: list[str], parts: list[str]) -> bool:
    """Return whether a key fits a pattern, in which <name> and <i> stand for any part."""
    if len(pattern) != len(parts):
        return False
    return all(ours == theirs or ours[0] == "<" for ours, theirs in zip(pattern, parts, strict=True))


def _children(info: FieldInfo) -> Iterator[tuple[str, type[Section], str]]:
    """Yield (the rest of the key's path, section, entry of a kind) of the sections that a field may hold."""
    suffix = ".<name>" if get_origin(info.annotation) is dict else ""
    kind = keys.kind_of_field(info)
    if kind is not None:
        names = [kind.default] if kind.is_fixed and kind.default else kind.installed
        for name in names:
            yield suffix, kind.section(name), "" if kind.is_fixed else _entry_text(kind, name)
        return
    for option in keys.union_members(info.annotation):
        if get_origin(option) in (dict, list):
            below = ".<name>" if get_origin(option) is dict else ".<i>"
            for section in keys.sections_in(get_args(option)[-1]):
                yield below, section, ""
        elif isinstance(option, type) and issubclass(option, Section):
            yield "", option, ""


def _entry_text(kind: Kind, name: str) -> str:
    return f"{kind.noun} of {kind.name_key} {name}"


def _describe(section: type[Section], name: str, key: str, entry: str, *, is_section: bool) -> KeyReference:
    info = section.model_fields[name]
    return KeyReference(key, format_type(info.annotation), _default(info), meaning(section, name), entry, is_section)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    return "{}" if isinstance(value, Section) else format_value(value)


def format_value(value: Any) -> str:
    """Format a default as YAML writes it on one line."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {format_value(item)}" for name, item in value.items()) + "}"
    return str(value) if value != "" else '""'


def format_type(annotation: Any) -> str:
    """Format an annotation as a user reads it: "int | null", "ppo | cispo", "list of str", "mapping"."""
    names = [_type_name(option) for option in keys.union_members(annotation)]
    return " | ".join(dict.fromkeys(names))


def _type_name(option: Any) -> str:
    if option is type(None):
        return "null"
    if get_origin(option) in (list, tuple):
        return f"list of {format_type(get_args(option)[0])}"
    if get_origin(option) is dict:
        return f"mapping of {format_type(get_args(option)[1])}"
    if isinstance(option, type):
        return "mapping" if issubclass(option, Section) else option.__name__
    if options := get_args(option):  # a Literal
        return " | ".join(map(format_value, options))
    return "any" if option is Any else str(option)


def meaning(section: type[Section], name: str) -> str:
    """Return the comment of a field, or that of the field which it overrides, else the first sentence of the section
    that it holds, else nothing."""
    for owner in section.__mro__:
        declares = name in vars(owner).get("__annotations__", {})
        if declares and (text := _comments(owner.__module__).get((owner.__name__, name))):
            return text
    for inner in keys.sections_in(section.model_fields[name].annotation):
        if inner.__doc__ and inner.__doc__ != Section.__doc__:
            return re.split(r"(?<=\.)\s", " ".join(inspect.cleandoc(inner.__doc__).split()), maxsplit=1)[0]
    return ""


@cache
def _comments(module: str) -> dict[tuple[str, str], str]:
    """Return the comments of a module's fields by (class, field): above the field, or after any line of it."""
    found: dict[tuple[str, str], str] = {}
    owner, field, above = "", "", []
    for line in Path(str(inspect.getsourcefile(importlib.import_module(module)))).read_text("utf-8").splitlines():
        code, _, comment = PRAGMA.sub("", line).partition("  # ")
        if match := CLASS.match(line):
            owner, field, above = match[1], "", []
        elif line.startswith("    # "):
            field, above = "", [*above, line.removeprefix("    # ")]
        elif match := FIELD.match(line):
            field = match[1]
            found[owner, field] = " ".join([*above, *([comment] if comment else [])])
            above = []
        elif field and comment and code.startswith(("     ", "    )", "    ]")):
            found[owner, field] = f"{found[owner, field]} {comment}".strip()
        elif not line.startswith("     "):
            field, above = "", []
    return found
