"""Recipes of NeMo-RL in this project's terms: whole, as what differs from the defaults, or as a table of changes."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.compat.key_names import find_rule, find_spellings
from nemo_rl.compat.tables import Report, find_cause, is_same_value
from nemo_rl.compat.translation import LOSS_SWITCHES, translate_resolved
from nemo_rl.config import loading
from nemo_rl.config.kinds import Section
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.overrides import REPLACE
from nemo_rl.config.recipe_files import (
    COMMANDS,
    Family,
    at,
    escape_interpolations,
    find_family,
    names_below,
    read_layer,
    resolve_interpolations,
)
from nemo_rl.config.reference import format_value
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_packaged

ABSENT = object()
MAX_SHOWN = 40  # characters of a value in a table


def format_translation(path: Path, overrides: Sequence[str] = (), *, allow_unsupported: bool = False) -> str:
    """Return a recipe of NeMo-RL in this project's terms, as YAML; comments say what was removed and why.

    Raises ConfigError for a recipe of an algorithm that this project does not have.
    """
    _, translated, report = _translate(path, overrides, allow_unsupported=allow_unsupported)
    return _comments(path, report) + _to_yaml(escape_interpolations(translated))


def format_minimal(path: Path, overrides: Sequence[str] = (), *, allow_unsupported: bool = False) -> str:
    """Return the shortest recipe that loads to the same configuration: what differs from the file that `defaults:`
    names, a packaged recipe of that name before one beside `path`, or else from the schema's defaults.

    Raises ConfigError for a recipe that does not load.
    """
    _, translated, report = _translate(path, overrides, allow_unsupported=allow_unsupported)
    family = find_family(translated)
    assert family is not None
    config = loading.LOADERS[COMMANDS[family]](path, overrides, allow_unsupported=allow_unsupported)
    with tempfile.TemporaryDirectory() as directory:
        trial = _Trial(Path(directory) / path.name, family, config)
        written = next(filter(trial.is_same, _drafts(path, config, trial)), None)
        if written is None:
            raise ConfigError("config", str(path), "has no shorter form; translate it without --minimal")
        _prune(written, written, trial)
    return _comments(path, report) + _to_yaml(written)


def format_changes(path: Path, overrides: Sequence[str] = (), *, allow_unsupported: bool = False) -> str:
    """Return a table of the keys that have another name or value here: NeMo-RL's, ours, and why.

    Below it are the keys that are omitted and request nothing.
    """
    resolved, translated, report = _translate(path, overrides, allow_unsupported=allow_unsupported)
    theirs, ours = dict(_leaves(resolved, translated)), dict(_leaves(translated))
    moved = {key: new for new in ours for key in find_spellings(new) if key in theirs}
    rows, left_out = [("key", "NeMo-RL", "here", "why")], []
    for key, value in theirs.items():
        if is_same_value(value, ours.get(key, ABSENT)):
            continue
        new = moved.get(key, key)
        why = "another name" if key in moved else _explain_change(key, value, report)
        if why is None and key not in ours:
            left_out.append(key)
            continue
        here = _show(ours[new]) if new in ours else "-"
        rows.append((key, _show(value), here if new == key else f"{new}: {here}", why or "written otherwise"))
    for key in ours.keys() - theirs.keys() - {*moved.values()}:
        is_default = any(f"{key} = " in note for note in report.notes)
        rows.append((key, "-", _show(ours[key]), "NeMo-RL's default" if is_default else "written otherwise"))
    rows[1:] = sorted(rows[1:])
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    return "\n".join([*lines, "", f"left out, without effect: {', '.join(sorted(left_out)) or 'none'}", ""])


def _translate(
    path: Path, overrides: Sequence[str], *, allow_unsupported: bool
) -> tuple[dict[str, Any], dict[str, Any], Report]:
    """Return a resolved recipe, its translation, and what became of it."""
    raw = loading.read_raw(GRPORunConfig, path, overrides)
    resolved, translated = resolve_interpolations(raw, path), resolve_interpolations(raw, path)
    family = find_family(resolved)
    if family is None:
        found = "ppo" if "ppo" in resolved else None
        problem = find_cause(found).text if found else f"no algorithm: one of the sections {', '.join(COMMANDS)}"
        raise ConfigError(found or "config", str(path), problem)
    return resolved, translated, translate_resolved(translated, family, allow_unsupported=allow_unsupported)


def _comments(path: Path, report: Report) -> str:
    refused = [f"refused: {error}" for error in report.problems]
    return "".join(f"# {line}\n" for line in (f"translated from {path.name}", *report.lines(), *refused))


def _to_yaml(values: dict[str, Any]) -> str:
    from omegaconf import OmegaConf  # here: reading a recipe needs none

    return OmegaConf.to_yaml(OmegaConf.create(values))


class _Trial:
    """Loads drafts of a recipe, and compares them with the configuration that they must give."""

    def __init__(self, path: Path, family: Family, config: Section) -> None:
        self.path = path
        self.family: Family = family
        self.expected = _comparable(config)

    def load(self, draft: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration of a draft; None if it is refused."""
        self.path.write_text(_to_yaml(draft), encoding="utf-8")
        try:
            return _comparable(loading.LOADERS[COMMANDS[self.family]](self.path))
        except ConfigError:
            return None

    def is_same(self, draft: dict[str, Any]) -> bool:
        return is_same_value(self.load(draft), self.expected)


def _comparable(config: Section) -> dict[str, Any]:
    """Return a configuration as a recipe, in which the defaults of datasets are not set rather than null."""
    values = loading.resolved_values(config)
    default = at(values, ["data", "default"])
    if isinstance(default, dict):
        values["data"]["default"] = {key: value for key, value in default.items() if value not in (None, {})}
    return values


def _drafts(path: Path, config: Section, trial: _Trial) -> Iterator[dict[str, Any]]:
    """Yield recipes over the file that `defaults:` names, then without one."""
    for below in names_below(path, read_layer(path))[-1:]:
        names = (below.stem, str(below.absolute())) if find_packaged(below.stem) else (str(below.absolute()),)
        for base in ({"defaults": name} for name in names):
            changed = _difference(trial.expected, trial.load(base) or {})
            yield _complete({**base, **changed}, trial)
            for section in (one for one, value in changed.items() if isinstance(value, dict)):  # NeMo-RL's own switches
                yield _complete({**base, **changed, section: {REPLACE: True, **trial.expected[section]}}, trial)
    yield _complete({str(trial.family): {}, **config.model_dump(exclude_defaults=True)}, trial)


def _complete(draft: dict[str, Any], trial: _Trial) -> dict[str, Any]:
    """Return a copy of the draft with the values that it lacks or has otherwise: those of kinds, of unset keys."""
    draft = copy.deepcopy(draft)
    found = dict(_leaves(trial.load(draft) or {}))
    for key, value in _leaves(trial.expected):
        if not is_same_value(found.get(key, ABSENT), value):
            _set(draft, key.split("."), value)
    return draft


def _set(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, name = path
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = copy.deepcopy(value)


def _difference(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping that merged over `base` gives `values`."""
    if base.keys() - values.keys():
        return {REPLACE: True, **values}
    changed = {}
    for key, value in values.items():
        below = base.get(key, ABSENT)
        if isinstance(value, dict) and isinstance(below, dict):
            if not is_same_value(value, below):
                changed[key] = _difference(value, below)
        elif not is_same_value(value, below):
            changed[key] = value
    return changed


def _prune(node: dict[str, Any], draft: dict[str, Any], trial: _Trial) -> None:
    """Remove, in place, every part of a node of the draft without which the draft loads to the same."""
    for key in [key for key in node if key not in ("defaults", REPLACE, trial.family)]:
        value = node.pop(key)
        if trial.is_same(draft):
            continue
        node[key] = value
        if isinstance(value, dict):
            _prune(value, draft, trial)


def _leaves(node: Any, whole: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything below a mapping that is not one itself.

    With `whole`, mappings that it lacks are yielded as one.
    """
    if isinstance(node, dict) and node and (whole is None or not path or isinstance(at(whole, path), dict)):
        for key, value in node.items():
            yield from _leaves(value, whole, (*path, str(key)))
    else:
        yield ".".join(path), node


def _explain_change(key: str, value: Any, report: Report) -> str | None:
    """Return why a key is not written as it was; None if that requested nothing."""
    problem = next((error.problem for error in report.problems if error.key == key), None)
    if problem is not None:
        return f"refused: {problem}"
    for cause, settings in (*report.switches.items(), *report.removed.items()):
        if any(setting.startswith(f"{key} = ") for setting in settings):
            return f"without effect: {cause}"
    if key.rpartition(".")[2] in LOSS_SWITCHES:
        return "loss_fn.type"
    if isinstance(value, dict):
        return "not read"
    rule = find_rule(key)
    is_inert = rule is not None and (rule.inert is None or any(is_same_value(value, one) for one in rule.inert))
    return None if is_inert else "written otherwise"


def _show(value: Any) -> str:
    text = "{...}" if isinstance(value, dict) and value else format_value(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
