"""Kinds: everything pluggable, found by name or by dotted path through one resolver; and the base of every section.

A kind (loss, advantage estimator, engine, weight transport, environment, scorer, dataset, processor, policy backend,
logger) has entries. An `Entry` owns, in one file or directory of its package, its torch-free configuration section, the
check of that section against the rest of the configuration, and the factory. Built-in entries are listed by where they
live and imported on first use, so that a configuration loads in a fraction of a second; entries of a user's own package
are named by dotted path and need no change here.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from nemo_rl.errors import ConfigError, suggest_name

# Functions that may know what became of a module or name that a user's code cannot import.
IMPORT_EXPLAINERS = ("nemo_rl.compat.python_names:explain_import",)
# Functions (module, name) -> what scripts written for another program import from one of our modules; None: nothing.
FOREIGN_NAMES = ("nemo_rl.compat.python_names:find_name",)


class Section(BaseModel):
    """One mapping of the YAML. Unknown keys are refused; nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True, str_min_length=1
    )
    # In a whole configuration: the recipe's text of each value that depends on the environment, by path
    _environment_texts: Mapping[tuple[str, ...], str] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Let texts be empty in sections of a user's own."""
        super().__pydantic_init_subclass__(**options)
        if not cls.__module__.startswith("nemo_rl."):
            cls.model_config = {**cls.model_config, "str_min_length": 0}

    @classmethod
    def with_defaults(cls, **values: Any) -> Self:
        """Return the section with these values and defaults for all others, as the default of a field.

        Unlike a call of the class this validates nothing, and so builds no validator, which takes milliseconds each.
        """
        return cls.model_construct(**values)

    def set_environment_texts(self, texts: Mapping[tuple[str, ...], str]) -> None:
        """Keep the recipe's texts of values that depend on the environment; for `config/loading.py` alone."""
        self._environment_texts = texts

    @property
    def environment_texts(self) -> Mapping[tuple[str, ...], str]:
        """Return the recipe's text of each value that depends on the environment, by path."""
        return self._environment_texts


SectionT = TypeVar("SectionT", bound=Section)
TargetT = TypeVar("TargetT")


@dataclass(frozen=True, slots=True)
class Entry(Generic[SectionT]):
    """One implementation of a kind.

    Example: `CISPO = Entry(CISPOConfig, make=CISPOLoss, check=check_cispo)`
    """

    section: type[SectionT]
    make: Callable[..., Any]  # called with the section; each kind says with what else
    check: Callable[[str, SectionT, Any], None] | None = None  # (key, section, run config); raises ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The entries of one kind: built in, registered, or by dotted path.

    As an annotation of a field it makes the field's value a section of the entry that the value names:
    `loss_fn: Annotated[SerializeAsAny[LossConfig], LOSSES]`, or of a mapping of named sections, where each section may
    be named after its entry: `env: Annotated[dict[str, SerializeAsAny[EnvironmentConfig]], ENVIRONMENTS]`.
    """

    noun: str  # its name in errors, with the article: "an environment"
    name_key: str  # the key of a section that names its entry, e.g. "type"
    built_in: Mapping[str, str]  # name -> "package.module:ATTRIBUTE" of its Entry
    adapter: str  # "package.module:function" (key, path, target) -> Entry, for a user's class or function
    default: str | None = None  # the entry of a section that names none; None: the key of the section
    is_fixed: bool = False  # the default alone: the section's own key decides the entry, and `name_key` is no key of it
    registered: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a configuration may use, built in first."""
        return (*self.built_in, *self.registered)

    @property
    def installed(self) -> tuple[str, ...]:
        """Return the built-in names whose package exists: leaves such as environments/ecosystem/ may be deleted."""
        packages = {name: path.partition(":")[0].rpartition(".")[0] for name, path in self.built_in.items()}
        return tuple(name for name, package in packages.items() if importlib.util.find_spec(package) is not None)

    def register(self, name: str) -> Callable[[TargetT], TargetT]:
        """Return a decorator that makes an `Entry`, a class or a function known under `name` in this process."""

        def add(target: TargetT) -> TargetT:
            if name in self.names:
                raise ValueError(f"{self.noun} named {name!r} is registered already")
            self.registered[name] = target
            return target

        return add

    @contextmanager
    def registered_for(self, name: str, target: Any) -> Iterator[None]:
        """Make `target` known under `name` while the block runs, in place of what has this name."""
        before = self.registered.get(name)
        self.registered[name] = target
        try:
            yield
        finally:
            if before is None:
                del self.registered[name]
            else:
                self.registered[name] = before

    def entry(self, name: str, *, key: str) -> Entry[Any]:
        """Return the entry called `name`; raises ConfigError for `key` if there is none.

        `name` is a built-in or registered name, or the dotted path ("package.module:Name" or "package.module.Name") of
        an `Entry`, or of a class or function that the kind's adapter makes an entry of. Modules beside the directory
        that the run is started in are found too.
        """
        if name in self.registered:
            target = self.registered[name]
        elif name in self.built_in:
            target = import_path(key, self.built_in[name])
        elif "." in name or ":" in name:
            target = import_path(key, name)
        else:
            hint = suggest_name(name, self.names)
            raise ConfigError(key, name, f"unknown {self.noun.partition(' ')[2]}, and no dotted path{hint}")
        return target if isinstance(target, Entry) else import_path(key, self.adapter)(key, name, target)

    def name_of(self, data: Any, fallback: str | None = None) -> str | None:
        """Return the name set in a section's data: that of `name_key`, else the default, else `fallback`."""
        name = data.get(self.name_key) if isinstance(data, Mapping) and not self.is_fixed else None
        return name if isinstance(name, str) else self.default or fallback

    def refuse_name(self, data: Any, *, key: str) -> None:
        """Raise ConfigError for a name that is no text, and for a fixed entry that is named all the same."""
        if self.is_fixed and isinstance(data, Mapping) and self.name_key in data:
            problem = f"this section is always that of {self.default}; choose the entry one key above"
            raise ConfigError(f"{key}.{self.name_key}".lstrip("."), data[self.name_key], problem)
        name = data.get(self.name_key) if isinstance(data, Mapping) else None
        if name is not None and not isinstance(name, str):
            problem = f"must be the name of {self.noun}: {', '.join(self.names)}; or a dotted path"
            raise ConfigError(f"{key}.{self.name_key}".lstrip("."), name, problem)

    def section(self, name: str, *, key: str = "") -> type[Section]:
        """Return the section class of the entry called `name`."""
        return self.entry(name, key=key).section

    def read(self, data: Any, fallback: str | None = None, *, key: str = "") -> Any:
        """Return `data` as the section of its entry; anything but a mapping is left for pydantic to refuse."""
        name = self.name_of(data, fallback)
        if not isinstance(data, dict) or name is None:
            return data
        self.refuse_name(data, key=key)
        return self.section(name, key=f"{key}.{self.name_key}").model_validate({**data, self.name_key: name})

    def read_all(self, entries: Any, *, key: str = "") -> Any:
        """Return a mapping of named sections, each read by its own entry."""
        if not isinstance(entries, dict):
            return entries
        return {name: self.read(data, name, key=f"{key}.{name}") for name, data in entries.items()}

    def new(self) -> Any:
        """Return the section of the default entry with all its defaults."""
        return self.read({})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        read = self.read_all if get_origin(source) is dict else self.read
        return core_schema.no_info_before_validator_function(read, handler(source))


def factory_at(path: str) -> Callable[..., Any]:
    """Return a factory that imports "package.module:function" when it is called, for entries with heavy imports."""

    def make(*arguments: Any, **named: Any) -> Any:
        return import_path("factory", path)(*arguments, **named)

    return make


def entry_from_callable(
    section: type[SectionT],
    protocol: type,
    *,
    key: str,
    path: str,
    target: Any,
    check: Callable[[str, SectionT, Any], None] | None = None,
) -> Entry[SectionT]:
    """Return the entry of a user's class, or function, that is called with its section's `kwargs` alone.

    Raises ConfigError for `key` if `target` cannot be called; the entry's check does for `kwargs` that do not fit
    and for a result that is not of `protocol`, then runs `check`.
    """
    contract = f"interfaces.{protocol.__name__}"
    if not callable(target):
        raise ConfigError(key, path, f"must name a class, or a function, that makes an {contract}")

    def make(own: Any, *context: Any) -> Any:
        return target(**own.kwargs)

    def check_section(section_key: str, own: Any, config: Any) -> None:
        try:
            inspect.signature(target).bind(**own.kwargs)
        except TypeError as error:
            raise ConfigError(f"{section_key}.kwargs", own.kwargs, f"{path} cannot be called: {error}") from error
        if not isinstance(make(own), protocol):
            *members, last = (name for name in vars(protocol) if name == "__call__" or not name.startswith("_"))
            raise ConfigError(key, path, f"makes no {contract}: {', '.join(members)} and {last}")
        if check is not None:
            check(section_key, own, config)

    return Entry(section, make=make, check=check_section)


def import_path(key: str, path: str) -> Any:
    """Return the object that "package.module:Name" names; raises ConfigError for `key` if there is no such thing."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or module_name.startswith("."):
        raise ConfigError(key, path, "no dotted path such as package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module of the user's, beside where the run is started
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        problem = f"module {module_name!r} cannot be imported: {error}"
        known = [explain(error) for explain in load_optional(IMPORT_EXPLAINERS)]
        raise ConfigError(key, path, " ".join([problem, *filter(None, known)])) from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(key, path, f"module {module_name!r} has no {attribute!r}{suggest_name(attribute, public)}")
    return getattr(module, attribute)


def foreign_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module from which scripts written for another program import names of theirs."""

    def __getattr__(name: str) -> Any:
        for find in load_optional(() if name.startswith("__") else FOREIGN_NAMES):
            if (found := find(module, name)) is not None:
                return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return __getattr__


def load_optional(paths: Iterable[str]) -> Iterator[Any]:
    """Yield the objects that the dotted paths name, without those whose module is not installed."""
    for path in paths:
        module_name, _, attribute = path.partition(":")
        try:
            is_installed = importlib.util.find_spec(module_name) is not None
        except ModuleNotFoundError:  # its package is not installed either
            is_installed = False
        if is_installed:
            module = importlib.import_module(module_name)
            yield getattr(module, attribute) if attribute else module
