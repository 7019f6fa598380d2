"""Tables of keys say what the schema says: every key exists, every default is the default, no key is undocumented."""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
import yaml

from nemo_rl.config import registries
from nemo_rl.config.collect import CollectRunConfig, EvalRunConfig
from nemo_rl.config.keys import union_members
from nemo_rl.config.kinds import Kind, Section
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig
from nemo_rl.config.supervised_runs import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from nemo_rl.jobs.slurm_config import SubmitRunConfig, SubmitTrainingConfig
from tests.unit.docs.pages import CODE, PAGES, WRITTEN, Table, code_spans, fenced_blocks, tables

SCHEMAS = (
    GRPORunConfig,
    DistillationRunConfig,
    SFTRunConfig,
    DPORunConfig,
    RewardModelRunConfig,
    CollectRunConfig,
    EvalRunConfig,
    SubmitRunConfig,
    SubmitTrainingConfig,
)
REQUIRED = object()
UNKNOWN = object()  # the value of a section that a mapping or a list may hold

# A table of keys has a column "key" (keys in full), "key of `grpo`" or "own key of `env.<name>`", and one "default".
KEY_TABLES = [
    table
    for page in WRITTEN
    for table in tables(page)
    if "default" in table.head and re.search(r"(^| )(own )?key\b", " ".join(table.head[:2]))
]


# ---- tables ----


def keys_and_defaults(table: Table) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, type of its entry, default as written); a row may name several keys and their defaults."""
    column = next(index for index, head in enumerate(table.head) if re.match(r"(own )?key\b", head))
    path, *kinds = CODE.findall(table.head[column]) or [""]
    kind = kinds[0] if kinds else ""
    for row in table.rows:
        if table.head[0] == "type" and row[0]:
            kind = row[0].strip("`")
        names, written = CODE.findall(row[column]), _split(row[table.head.index("default")])
        defaults = written * len(names) if len(written) == 1 else written
        for name, default in zip(names, defaults, strict=True):
            yield f"{path}.{name}".strip("."), kind, default


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


# ---- the schema ----


def find_defaults(path: str, kind: str = "") -> list[Any]:
    """Return the default of a dotted key in each section of the schemas that has it."""
    found = []
    for schema in SCHEMAS:
        nodes: list[tuple[Any, Any]] = [(schema, UNKNOWN)]
        for name in path.split("."):
            nodes = [child for annotation, value in nodes for child in _children(annotation, value, name, kind)]
        found += [value for _, value in nodes]
    return found


def _children(annotation: Any, value: Any, name: str, kind: str) -> Iterator[tuple[Any, Any]]:
    """Yield (annotation, default) of what `name` is below a value of this annotation."""
    for option in union_members(annotation):
        if get_origin(option) is dict and name.startswith("<"):
            yield from ((section, UNKNOWN) for section in _entry_sections(get_args(option)[1], kind))
        elif get_origin(option) is list:
            yield from _children(get_args(option)[0], UNKNOWN, name, kind)
        elif isinstance(option, type) and issubclass(option, Section):
            for section in {option} if name in option.model_fields else _subclasses(option):
                if name in section.model_fields:
                    field = section.model_fields[name]
                    default = field.get_default(call_default_factory=True, validated_data={})
                    default = REQUIRED if field.is_required() else default
                    yield field.annotation, getattr(value, name) if isinstance(value, section) else default


def _subclasses(section: type[Section]) -> set[type[Section]]:
    own = {sub for sub in section.__subclasses__() if sub.__module__.startswith("nemo_rl.")}  # not those of other tests
    return own.union(*map(_subclasses, own))


def _entry_sections(base: Any, kind: str) -> set[Any]:
    """Return the sections that an entry of a mapping may have: those of its type, if the table names one."""
    options = set(union_members(base))
    sections = {sub for option in options if isinstance(option, type) for sub in (option, *_subclasses(option))}
    return {section for section in sections if kind.replace("_", "") in section.__name__.lower()} if kind else options


def equals(written: str, default: Any) -> bool:
    """Return whether a default is what a table writes: YAML, `required`, `off` (not enabled), or nothing."""
    written = written.strip("`")
    if written == "required":
        return default is REQUIRED
    if written in ("", "off"):
        return written == "" or default in (None, False, 0) or not getattr(default, "enabled", True)
    if written == "none":
        return default in (None, "")
    if isinstance(default, Section):
        return written == "{}" and default == type(default)()
    value = yaml.safe_load(written.replace("1e", "1.0e").replace("5e", "5.0e"))
    return value == (list(default) if isinstance(default, tuple) else default)


# ---- the tests ----


@pytest.fixture(scope="module", autouse=True)
def _entries_are_imported() -> None:
    """Import every built-in entry, so that its section is known as a subclass of its kind's base."""
    for kind in (kind for kind in vars(registries).values() if isinstance(kind, Kind)):
        for name in kind.built_in:
            kind.section(name, key=kind.noun)


@pytest.mark.parametrize("table", KEY_TABLES, ids=lambda table: f"{table.page}: {table.head[0]}")
def test_keys_and_defaults_of_a_table_are_those_of_the_schema(table: Table) -> None:
    wrong = []
    for key, kind, written in keys_and_defaults(table):
        defaults = find_defaults(key.removesuffix(".*"), kind)
        if not defaults:
            wrong.append(f"{key}: no such key")
        elif not any(equals(written, default) for default in defaults):
            wrong.append(f"{key}: {written} is not {defaults}")
    assert wrong == []


def _all_keys(schema: type[Section], path: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{path}{name}"
        for option in union_members(field.annotation):
            inner = get_args(option)[-1] if get_origin(option) in (dict, list) else option
            for section in union_members(inner):
                if isinstance(section, type) and issubclass(section, Section):
                    dots = ".<name>." if get_origin(option) is dict else "."
                    for sub in {section, *_subclasses(section)} if get_origin(option) is dict else {section}:
                        yield from _all_keys(sub, f"{path}{name}{dots}")


def test_no_key_is_undocumented() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    spans = [span for text in texts for span in (*code_spans(text), *(block for _, block in fenced_blocks(text)))]
    words = {word for span in spans for word in re.findall(r"\w+", span)}
    keys = {key for schema in SCHEMAS for key in _all_keys(schema)}
    assert sorted(key for key in keys if key.split(".")[-1] not in words) == []
