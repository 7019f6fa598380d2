"""What pydantic and OmegaConf found wrong, said as one ConfigError with the full key."""

from typing import Any

from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from nemo_rl.config.entries import ENTRY_KINDS
from nemo_rl.config.keys import Path, at, dotted, entry_kind, find_schema_node, has
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.section import Section
from nemo_rl.errors import ConfigError

ERROR_MESSAGES = {
    "missing": "required, but not set",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
}
PRIORITY_ERROR_TYPES = ("extra_forbidden", "missing")  # a misspelt key explains the missing one


def make_schema_error(
    error: ValidationError, raw: Any, prefix: Path = (), schema: type[Section] = GRPORunConfig
) -> ConfigError:
    """The most telling of the errors; `raw` is the whole configuration, `prefix` where the validated part lies."""
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
    message = details["msg"].removeprefix("Value error, ")  # of a validator of our own
    problem = ERROR_MESSAGES.get(details["type"]) or message[:1].lower() + message[1:]
    value = at(raw, path)
    if value in ("None", "none"):
        problem += " (nothing is written null)"
    return ConfigError(dotted(path), value, problem)


def make_unknown_key_error(path: Path, raw: Any, schema: type[Section] = GRPORunConfig) -> ConfigError:
    """An unknown key, with the nearest of those that its section has."""
    node = find_schema_node(path[:-1], raw, schema)
    problem = "unknown key"
    if len(path) == 3 and (kinds := ENTRY_KINDS.get(str(path[0]))):
        kind = entry_kind(path[:2], raw)
        is_own = kind not in kinds.built_in
        problem += f" of {kinds.noun} of type {kind!r}"
        problem += f" (built in: {', '.join(kinds.built_in)}; one's own takes kwargs)" if is_own else ""
    return ConfigError(dotted(path), at(raw, path), problem, known=node.names if node else ())


def reject_booleans(raw: Any, validated: Any, path: Path = ()) -> None:
    """Raise ConfigError where true or false stands for a number: pydantic would read 1 or 0."""
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


def make_interpolation_error(error: OmegaConfBaseException, raw: Any, source: str | None = None) -> ConfigError:
    """A value that cannot be resolved: an unknown key or resolver, or text that is no interpolation."""
    key = (getattr(error, "full_key", None) or "").replace("[", ".").replace("]", "")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(key, "???", "must be set")
    reason = str(error).splitlines()[0]
    if "not found" in reason:
        reason += " (an interpolation sees what recipes and overrides set, not the schema's defaults)"
    where = f" (in {source})" if source else ""
    return ConfigError(key or "interpolation", at(raw, key.split(".")), f"cannot be resolved: {reason}{where}")


def _strip_union_members(loc: Path, raw: Any, error_type: str) -> Path:
    """The location without the names that pydantic puts in for the members of a union."""
    path: tuple[str | int, ...] = ()
    for position, name in enumerate(loc):
        is_last = position == len(loc) - 1
        if has(raw, (*path, name)) or (is_last and error_type == "missing"):
            path = (*path, name)
    return path
