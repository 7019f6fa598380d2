"""Interpolations of recipes: `${grpo.seed}`, `${mul:${a},${b}}` and the like, as NeMo-RL's recipes use them.

OmegaConf resolves them. The plain forms, whose meaning is the same in any grammar, are resolved here: the import of
OmegaConf takes longer than all else that reads a recipe.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.config.keys import at, make_interpolation_error
from nemo_rl.config.recipe_files import walk_layers

KEY = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
ARGUMENT = rf"\$\{{{KEY}\}}|(?:0|[1-9]\d*)(?:\.\d+)?"
REFERENCE = re.compile(rf"\$\{{({KEY})\}}", re.ASCII)
CALL = re.compile(rf"\$\{{(\w+):({ARGUMENT}),({ARGUMENT})\}}", re.ASCII)
MISSING = "???"  # OmegaConf's mark of a value that must be set


class _NotPlain(Exception):
    """Something that OmegaConf must resolve or refuse."""


def _divide(a: float, b: float) -> float:
    """Divide, to an integer where it comes out even, since most keys are counts."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


RESOLVERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "max": lambda a, b: max(a, b),
}


def resolve(raw: dict[str, Any], recipe: Path | None = None) -> dict[str, Any]:
    """Return a configuration with the values of its interpolations; raises ConfigError for what has none.

    `recipe` is the file that it was read from, for errors.
    """
    try:
        return _resolve_plain(raw, raw, ())
    except (_NotPlain, RecursionError):
        return _resolve_with_omegaconf(raw, recipe)


def _resolve_plain(value: Any, root: dict[str, Any], readers: tuple[str, ...]) -> Any:
    """Return a copy of `value` with what its interpolations refer to; `readers` are the references that led to it."""
    if isinstance(value, str):
        return _resolve_text(value, root, readers)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _NotPlain
        return {key: _resolve_plain(item, root, readers) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve_plain(item, root, readers) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise _NotPlain


def _resolve_text(text: str, root: dict[str, Any], readers: tuple[str, ...]) -> Any:
    if text == MISSING:
        raise _NotPlain
    if "${" not in text:
        return text
    if match := REFERENCE.fullmatch(text):
        return _look_up(match[1], root, readers)
    match = CALL.fullmatch(text)
    if match is None or match[1] not in RESOLVERS:
        raise _NotPlain
    numbers = [_number(argument, root, readers) for argument in match.groups()[1:]]
    try:
        return RESOLVERS[match[1]](*numbers)
    except ArithmeticError as error:
        raise _NotPlain from error


def _look_up(key: str, root: dict[str, Any], readers: tuple[str, ...]) -> Any:
    *parents, name = key.split(".")
    holder = at(root, tuple(parents))
    if key in readers or not isinstance(holder, dict) or name not in holder:
        raise _NotPlain
    return _resolve_plain(holder[name], root, (*readers, key))


def _number(argument: str, root: dict[str, Any], readers: tuple[str, ...]) -> int | float:
    value = _look_up(match[1], root, readers) if (match := REFERENCE.fullmatch(argument)) else argument
    if isinstance(value, str) and value == argument:
        return float(argument) if "." in argument else int(argument)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NotPlain
    return value


def _resolve_with_omegaconf(raw: dict[str, Any], recipe: Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf  # here: it takes a tenth of a second
    from omegaconf.errors import OmegaConfBaseException

    for name, resolver in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolver)
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)  # pyright: ignore
    except OmegaConfBaseException as error:
        for path, layer in walk_layers(recipe) if recipe is not None else ():
            try:
                OmegaConf.create(layer)
            except OmegaConfBaseException as in_layer:
                raise make_interpolation_error(in_layer, None, source=str(path)) from in_layer
        raise make_interpolation_error(error, raw) from error


def escape(value: Any) -> Any:
    """Escape strings so that a second load does not read them as interpolations."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
