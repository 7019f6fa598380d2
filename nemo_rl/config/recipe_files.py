"""Recipe files: YAML read within limits, the files that `defaults:` names, and interpolations.

`${grpo.seed}`, `${mul:${a},${b}}` and the like mean what they do in NeMo-RL's recipes. OmegaConf resolves them; the
plain forms, whose meaning is the same in any grammar, are resolved here, since the import of OmegaConf takes longer
than all else that reads a recipe. Imports neither the schema nor pydantic nor, if all forms are plain, OmegaConf.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from nemo_rl.errors import ConfigError, conceal_value, interpolation_of
from nemo_rl.recipes import find_packaged, missing_recipe

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

KeyPath = tuple[str, ...]
Family = Literal["grpo", "distillation", "sft", "dpo", "rm", "eval", "collect"]
COMMANDS: Mapping[Family, str] = {  # the verb of `nemo-rl` that runs a recipe with this section
    "grpo": "grpo",
    "distillation": "distill",
    "sft": "sft",
    "dpo": "dpo",
    "rm": "rm",
    "eval": "eval",
    "collect": "collect",
}
MAX_RECIPE_BYTES, MAX_NODES, MAX_DEPTH, MAX_DIGITS, MAX_BRACKETS = 10 * 2**20, 100_000, 64, 1000, 1000
FLOAT, TIMESTAMP = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
# Also the numbers that YAML 1.1 reads as text: 1e-4, 1e5 and .5.
NUMBER = re.compile(r"[-+]?(?:\d+(?:_\d+)*(?:\.[\d_]*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)|\.\d+(?:_\d+)*(?:[eE][-+]\d+)?)$")


# libyaml's loader, ten times as fast, if PyYAML was built with it.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DOTTED_KEY = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
ARGUMENT = rf"\$\{{{DOTTED_KEY}\}}|(?:0|[1-9]\d*)(?:\.\d+)?"
REFERENCE = re.compile(rf"\$\{{({DOTTED_KEY})\}}", re.ASCII)
CALL = re.compile(rf"\$\{{(\w+):({ARGUMENT}),({ARGUMENT})\}}", re.ASCII)
ENVIRONMENT = "oc.env"  # OmegaConf's resolver
VARIABLE = re.compile(r"oc\.env:\s*([^\s,{}]+)")
NOT_PLAIN = re.compile(rf"\$\{{(?!{DOTTED_KEY}\}}|(?:add|mul|div|max):)")  # an interpolation of another form
MISSING = "???"  # OmegaConf's mark of a value that must be set


class _RecipeLoader(SAFE_LOADER):
    """The YAML of OmegaConf: 1e-4 is a number, a date is text, and a key may stand only once in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                if key.value in seen:
                    problem = f"found duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(None, node.start_mark, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """Return a float; refuse text of another number that a float rounds to 0 or to infinity."""
        number = self.construct_yaml_float(node)
        if is_beyond_float(node.value, number):
            problem = f"the number {node.value} is {number} as a float"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return number


_RecipeLoader.add_constructor(FLOAT, _RecipeLoader.construct_number)
_RecipeLoader.add_implicit_resolver(FLOAT, NUMBER, list("-+0123456789."))
_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
    for first, resolvers in _RecipeLoader.yaml_implicit_resolvers.items()
}


def is_beyond_float(text: str, number: float) -> bool:
    """Return whether a text of another number is read as 0 or as infinity: 1e-400, 1e400."""
    mantissa = text.lower().partition("e")[0]
    return bool(re.search("[1-9]", mantissa)) and (number == 0 or math.isinf(number))


def read_layer(path: Path, included_by: Path | None = None) -> dict[str, Any]:
    """Return the sections of one file, without the files that it names. Raises ConfigError naming file and line.

    `included_by` is the recipe whose `defaults:` names the file.
    """
    key = f"defaults of {included_by}" if included_by else "config"
    if not path.is_file():
        raise ConfigError(key, str(path), "no such file")
    try:
        text = _read_within_limits(key, path)
        layer = yaml.load(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(key, where, f"malformed YAML: {error.problem or error.context}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(key, str(path), f"cannot be read: {str(error).splitlines()[0]}") from error
    if layer is not None and not isinstance(layer, dict):
        raise ConfigError(key, str(path), "a recipe must be a mapping of sections, e.g. grpo, policy, data")
    return _without_aliases(layer or {})


def names_below(path: Path, layer: dict[str, Any]) -> list[Path]:
    """Return the files that a recipe's `defaults:` names, in order: each beside it, or else a packaged recipe."""
    names = layer.get("defaults") or []
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ConfigError("defaults", names, f"must be a file name or a list of file names (in {path})")
    return [_find_below(path, name) for name in names]


def walk_layers(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a recipe's file, then those below it, nearest first and each once, with their sections."""
    waiting: list[tuple[Path, Path | None]] = [(path, None)]
    seen: set[Path] = set()
    while waiting:
        current, above = waiting.pop(0)
        if (resolved := current.resolve()) in seen:
            continue
        seen.add(resolved)
        layer = read_layer(current, above)
        yield current, layer
        waiting += [(below, current) for below in names_below(current, layer)]


def find_family(sections: Mapping[str, Any]) -> Family | None:
    """Return the algorithm of a recipe by its sections; None if it has none of this project's."""
    return next((family for family in COMMANDS if family in sections), None)


def at(raw: Any, path: Sequence[str | int]) -> Any:
    """Return the value at `path` of plain mappings and lists; None if it is absent."""
    for name in path:
        if isinstance(raw, Mapping) and name in raw:
            raw = raw[name]
        elif isinstance(raw, list) and str(name).isdigit() and int(name) < len(raw):
            raw = raw[int(name)]
        else:
            return None
    return raw


def _find_below(path: Path, name: str) -> Path:
    if (beside := path.parent / name).is_file():
        return beside
    if (packaged := find_packaged(name)) is not None:
        return packaged
    raise missing_recipe(f"defaults of {path}", name, "no such file")


def _without_aliases(value: Any) -> Any:
    """Return a copy in which no two places share a mapping or list, since layers are changed in place."""
    if isinstance(value, dict):
        return {key: _without_aliases(item) for key, item in value.items()}
    return [_without_aliases(item) for item in value] if isinstance(value, list) else value


def _read_within_limits(key: str, path: Path) -> str:  # one branch per YAML event  # noqa: C901
    """Return the text; raises ConfigError for YAML that is larger or deeper than any recipe, aliases counted where they
    are used."""
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise ConfigError(key, str(path), f"is no recipe: it has more than {MAX_RECIPE_BYTES} bytes")
    text = path.read_text(encoding="utf-8")
    steps = accumulate((one in "[{") - (one in "]}") for one in text if one in "[]{}")
    if max(steps, default=0) > MAX_BRACKETS:  # the parser's time grows with the square of their depth
        raise ConfigError(key, str(path), f"is no recipe: more than {MAX_BRACKETS} brackets are open at once")
    sizes: dict[str, int] = {}  # number of values below each anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            continue
        anchor, size = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == open_anchor for open_anchor, _ in open_nodes):
                where = f"{path}:{event.start_mark.line + 1}"
                raise ConfigError(key, where, f"the anchor &{event.anchor} contains itself; allowed: other values")
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if len(event.value) > MAX_DIGITS and event.value.lstrip("+-").isdecimal():
                where = f"{path}:{event.start_mark.line + 1}"
                raise ConfigError(key, where, f"a number of {len(event.value)} digits; allowed: at most {MAX_DIGITS}")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        if anchor and not isinstance(event, yaml.AliasEvent):
            sizes[anchor] = size
        open_nodes[-1] = open_nodes[-1][0], open_nodes[-1][1] + size
        if open_nodes[-1][1] > MAX_NODES or len(open_nodes) > MAX_DEPTH:
            where = f"{path}:{event.start_mark.line + 1}"
            problem = f"is no recipe: more than {MAX_NODES} values, or nested deeper than {MAX_DEPTH}"
            raise ConfigError(key, where, problem)
    return text


class _NotPlain(Exception):
    """Something that OmegaConf must resolve or refuse."""


def _divide(a: float, b: float) -> float:
    """Divide, to an integer if it comes out even, since most keys are counts."""
    return a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b


RESOLVERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "max": lambda a, b: max(a, b),
}


def resolve_interpolations(raw: dict[str, Any], recipe: Path | None = None) -> dict[str, Any]:
    """Return a configuration with the values of its interpolations; raises ConfigError for one that cannot be resolved.

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


def register_resolvers() -> None:
    """Make the RESOLVERS known to OmegaConf, in place of those that other code of this process has registered."""
    from omegaconf import OmegaConf  # here: it takes a tenth of a second

    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _resolve_with_omegaconf(raw: dict[str, Any], recipe: Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)  # pyright: ignore
    except OmegaConfBaseException as error:
        for path, layer in walk_layers(recipe) if recipe is not None else ():
            try:
                OmegaConf.create(layer)
            except OmegaConfBaseException as in_layer:
                raise _make_interpolation_error(in_layer, None, source=str(path)) from in_layer
        raise _make_interpolation_error(error, raw) from error


def _make_interpolation_error(error: "OmegaConfBaseException", raw: Any, source: str | None = None) -> ConfigError:
    """Return the error of a value that cannot be resolved: an unknown key or resolver, or text that is no
    interpolation."""
    key = (getattr(error, "full_key", None) or "").replace("[", ".").replace("]", "")
    if type(error).__name__ == "MissingMandatoryValue":
        return ConfigError(key, "???", "must be set")
    reason = str(error).splitlines()[0]
    if "not found" in reason:
        reason += " (an interpolation sees what recipes and overrides set, not the schema's defaults)"
    where = f" (in {source})" if source else ""
    return ConfigError(key or "interpolation", at(raw, key.split(".")), f"cannot be resolved: {reason}{where}")


def find_environment_values(raw: Any, resolved: Any) -> dict[KeyPath, str]:
    """Return, by path, the text in the recipe of each value that depends on the environment.

    Their values are shown in no error or log line from here on: see `errors.conceal`.
    """
    found: dict[KeyPath, str] = {}
    if ENVIRONMENT not in str(raw):
        return found
    waiting: list[tuple[KeyPath, Any]] = [((), resolved)]
    while waiting:
        path, value = waiting.pop()
        text = _text_at(raw, path)
        if text is not None and _depends_on_environment(text, raw):
            found[path] = text
            _conceal(value, text)
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, str(name)), item) for name, item in items]
    return found


def unresolve(value: Any, texts: Mapping[KeyPath, str], path: KeyPath = (), *, escaped: bool = False) -> Any:
    """Return a configuration with the recipe's texts in place of values that depend on the environment.

    `escaped`: other strings are escaped, so that a second load does not read them as interpolations. A value that was
    moved or copied to another key is recognised if it is a string.
    """
    if path in texts:
        return texts[path]
    if isinstance(value, dict):
        return {key: unresolve(item, texts, (*path, str(key)), escaped=escaped) for key, item in value.items()}
    if isinstance(value, list):
        return [unresolve(item, texts, (*path, str(i)), escaped=escaped) for i, item in enumerate(value)]
    if (text := interpolation_of(value)) is not None:
        return text
    return escape_interpolations(value) if escaped else value


def _text_at(raw: Any, path: KeyPath) -> str | None:
    """Return the recipe's text of the value at `path`, where references lead to; None if it is no text."""
    for _ in range(MAX_DEPTH):
        node, rest = raw, path
        while rest and not isinstance(node, str):
            node, rest = at(node, rest[:1]), rest[1:]
        if not isinstance(node, str):
            return None
        if (match := REFERENCE.fullmatch(node)) is None:
            return None if rest else node
        path = (*match[1].split("."), *rest)
    return None


def _depends_on_environment(text: str, raw: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether a text has an interpolation that reads the environment, or another that is not plain."""
    if NOT_PLAIN.search(text) or not depth:
        return True
    texts = (_text_at(raw, tuple(key.split("."))) for key in REFERENCE.findall(text))
    return any(one is not None and _depends_on_environment(one, raw, depth - 1) for one in texts)


def _conceal(value: Any, text: str) -> None:
    """Register the value of a text, and those of the variables in it, unless all of them are unset."""
    names = VARIABLE.findall(text)
    for name in names:
        conceal_value(os.environ.get(name, ""), f"${{{ENVIRONMENT}:{name}}}")
    if isinstance(value, str) and (not names or any(map(os.environ.get, names))):
        conceal_value(value, text)


def escape_interpolations(value: Any) -> Any:
    """Escape strings so that a second load does not read them as interpolations."""
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
