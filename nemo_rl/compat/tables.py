"""NeMo-RL's recipe keys that this project lacks or reads otherwise: the tables, and their application to a recipe.

The tables are data (keys.yaml, causes.yaml, releases.yaml); translation.py rewrites what has another shape here.
Whatever changes results is honoured or refused; switches of speed or layout are accepted with a note.
"""

import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import yaml

from nemo_rl.config.keys import Path, dotted, has
from nemo_rl.config.policy import AUTO, BACKEND_SECTIONS
from nemo_rl.config.recipe_files import SAFE_LOADER
from nemo_rl.errors import ConfigError

MODELS = ("policy", "teacher", "teachers.*")
PLACEHOLDERS = {"{models}": MODELS, "{teachers}": MODELS[1:]}
SWITCHES_NOTE = "switches of speed, memory or layout without effect here"
MAX_SHOWN = 60  # characters of a value in a note
UNSUPPORTED_NOTE = "removed by --allow-unsupported (results do not depend on them)"

Action = Literal["drop", "note", "refuse", "default"]
Effect = Literal["results", "layout", "scale", "speed"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a key's value is not supported, and the nearest way."""

    effect: Effect  # the effect of removing it
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    key: str  # dotted; `*` is any key or item of a list
    releases: str  # releases of NeMo-RL: "0.5-main"
    action: Action
    inert: tuple[object, ...] | None  # values that ask for nothing; None for every value
    cause: Cause | None


@dataclass(slots=True)
class Report:
    """The outcome of reading a recipe: problems that stop it, and notes on what was removed or assumed."""

    allow_unsupported: bool = False
    release: str | None = None  # the recipe's release of NeMo-RL; None for a recipe of this project
    problems: list[ConfigError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    switches: dict[str, list[str]] = field(default_factory=dict)  # settings by the cause, in the order met
    removed: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, key: str, value: object, cause: Cause, allowed: str = "") -> None:
        """Record a refused value; one of layout, scale or speed alone is removed if that is allowed."""
        if self.allow_unsupported and cause.effect != "results":
            self.removed.setdefault(cause.text, []).append(_format_setting(key, value))
            return
        hint = "" if cause.effect == "results" else f" ({cause.effect} only: --allow-unsupported leaves it out)"
        self.problems.append(ConfigError(key, value, f"not available: {cause.text}{allowed}{hint}"))

    def skip(self, key: str, value: object, cause: Cause) -> None:
        """Record a switch that has no effect here."""
        self.switches.setdefault(cause.text, []).append(_format_setting(key, value))

    def lines(self) -> list[str]:
        """Return all notes, one per line."""
        summaries = ((SWITCHES_NOTE, self.switches), (UNSUPPORTED_NOTE, self.removed))
        told = [
            f"{title}: " + "; ".join(f"{', '.join(keys)} ({cause})" for cause, keys in found.items())
            for title, found in summaries
            if found
        ]
        return [*self.notes, *told]


@cache
def load_table(name: str) -> Any:
    text = pathlib.Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=SAFE_LOADER)


@cache
def find_cause(name: str) -> Cause:
    """Return the cause of this name; it must be in causes.yaml."""
    return Cause(**load_table("causes")["causes"][name])


@cache
def load_rules() -> tuple[Rule, ...]:
    """Return all rows of the table, in its order."""
    rules = []
    for prefix, rows in load_table("keys")["keys"].items():
        for key, releases, action, inert, *cause in rows:
            values = None if inert == "any" else tuple(inert)
            for group in _expand(prefix):
                full = ".".join(part for part in (group, key) if part)
                rules.append(Rule(full, str(releases), action, values, find_cause(cause[0]) if cause else None))
    return tuple(rules)


def apply_rules(config: dict[str, Any], report: Report) -> None:
    """Remove the table's keys from a resolved recipe, in place; what is refused or noted goes to `report`."""
    for rule in load_rules():
        for parent, name, path in list(find_key(config, rule.key.split("."))):
            _apply(rule, parent, name, path, report)


def _apply(rule: Rule, parent: dict[str, Any], name: str, path: Path, report: Report) -> None:
    value = parent[name]
    is_inert = rule.inert is None or any(is_same_value(value, inert) for inert in rule.inert)
    if not is_inert and rule.action == "default":
        return
    if not is_inert and rule.cause is not None:
        if rule.action == "note":
            report.skip(dotted(path), value, rule.cause)
        elif rule.action == "refuse":
            allowed = ", ".join(format_value(v) for v in rule.inert or () if v not in (None, [], {}))
            report.refuse(dotted(path), value, rule.cause, f"; only {allowed} is accepted" if allowed else "")
    del parent[name]


def is_same_value(value: object, other: object) -> bool:
    """Return whether two values of YAML are the same; unlike for Python, true is not 1 and false is not 0."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same_value, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_same_value(value[key], other[key]) for key in value)
    return value == other


def choose_backend(config: dict[str, Any]) -> None:
    """Remove, in place, the section of the backend that is off; NeMo-RL's recipes have both.

    Without a `backend` it is Megatron if `megatron_cfg.enabled`, whatever `dtensor_cfg.enabled` says.
    """
    for model in find_models(config):
        megatron, chosen = model.get("megatron_cfg"), model.get("backend", AUTO)
        is_on = isinstance(megatron, dict) and bool(megatron.get("enabled"))
        if not isinstance(chosen, str):
            continue  # the schema refuses it
        if not (is_on if chosen == AUTO else BACKEND_SECTIONS.get(chosen) == "megatron_cfg"):
            if isinstance(megatron, dict | None):  # else the schema refuses it
                model.pop("megatron_cfg", None)
            continue
        dtensor = model.get("dtensor_cfg")
        lora = dtensor.get("lora_cfg") if isinstance(dtensor, dict) else None
        asks_for_adapters = isinstance(lora, dict) and lora.get("enabled")  # Megatron: refused, not dropped
        if isinstance(dtensor, dict):
            model["dtensor_cfg"] = {"lora_cfg": lora} if asks_for_adapters else {}


def find_models(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sections of the policy and of every teacher."""
    return (model for _, model in find_named_models(config))


def find_named_models(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections of the policy and of every teacher, each with its key."""
    teachers = config.get("teachers")
    listed = (
        teachers.items() if isinstance(teachers, dict) else enumerate(teachers) if isinstance(teachers, list) else ()
    )
    named = [(name, config.get(name)) for name in ("policy", "teacher")]
    for key, model in (*named, *((f"teachers.{name}", model) for name, model in listed)):
        if isinstance(model, dict):
            yield key, model


def reach(config: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Return the mapping at a path; any other value on the way is replaced by an empty mapping."""
    node = config
    for name in path:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    return node


def is_foreign(config: dict[str, Any], key: str) -> bool:
    """Return whether a dotted key, with `*` for any, is in the recipe."""
    return next(find_key(config, key.split(".")), None) is not None


def find_key(node: Any, parts: Path, path: tuple[str | int, ...] = ()) -> Iterator[tuple[dict[str, Any], str, Path]]:
    """Yield every place of a dotted key: the mapping that holds it, its last part, and its whole path."""
    if isinstance(node, list):
        rest = parts[1:] if parts[0] == "*" and len(parts) > 1 else parts
        for index, item in enumerate(node):
            yield from find_key(item, rest, (*path, index))
        return
    if not isinstance(node, Mapping):
        return
    for name in list(node) if parts[0] == "*" else [parts[0]]:
        if name not in node:
            continue
        if len(parts) == 1:
            yield node, str(name), (*path, name)  # pyright: ignore[reportReturnType]
        else:
            yield from find_key(node[name], parts[1:], (*path, name))


def find_release(config: dict[str, Any]) -> str | None:
    """Return the release of NeMo-RL whose recipe this is, by its keys; None for a recipe of this project."""
    table = load_table("releases")
    foreign = 0
    for rule in load_rules():
        foreign += rule.action != "default" and is_foreign(config, rule.key)
        if foreign >= table["foreign_keys"]:
            break
    else:
        if not any(is_foreign(config, key) for key in table["sufficient"]):
            return None
    return next(
        (str(name) for name, keys in table["markers"].items() if any(is_foreign(config, key) for key in keys)), None
    )


def apply_release_defaults(config: dict[str, Any], release: str, report: Report) -> None:
    """Set a release's defaults that differ from this project's for keys that the recipe's sections do not set."""
    assumed = []
    table = load_table("releases")
    defaults = table["defaults"] | (table["policy_gradient_defaults"] if "grpo" in config else {})
    defaults |= {} if "eval" in config else table["training_defaults"]
    defaults |= table["sft_defaults"] if "sft" in config else {}
    for key, value in defaults.items():
        section, *path = key.split(".")
        if not isinstance(node := config.get(section), dict) or has(config, key.split(".")):
            continue
        for name in path[:-1]:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[path[-1]] = value
            assumed.append(_format_setting(key, value))
    told = f"; where it is silent its defaults hold: {', '.join(assumed)}" if assumed else ""
    report.notes.append(f"read as a recipe of NeMo-RL {release}{told}")


def _expand(prefix: str) -> tuple[str, ...]:
    for placeholder, models in PLACEHOLDERS.items():
        if prefix.startswith(placeholder):
            return tuple(prefix.replace(placeholder, model, 1) for model in models)
    return (prefix,)


def _format_setting(key: str, value: object) -> str:
    text = format_value(value)
    return f"{key} = {text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + '...'}"


def format_value(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
