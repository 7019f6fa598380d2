"""Environments by name: built-in, registered, or by dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from nemo_rl.config.env import ENVIRONMENT_CONFIGS, CustomEnvironmentConfig
from nemo_rl.config.environment import BatchingConfig, EnvironmentConfig, RemoteConfig
from nemo_rl.environments.adapters import FunctionEnvironment, NemoRLEnvironment, is_nemo_rl_environment
from nemo_rl.environments.batcher import BatchedEnvironment
from nemo_rl.environments.contract import CheckedEnvironment
from nemo_rl.errors import ConfigError, suggest_name
from nemo_rl.interfaces import Environment

Factory: TypeAlias = Callable[[str, Any], Environment]  # (the entry's name, its section)
FactoryT = TypeVar("FactoryT", bound=Factory)

ENVIRONMENTS: dict[str, Factory] = {}


def register(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make a class or function, called with an entry's name and section, known as `env.<entry>.type: name`."""

    def add(factory: FactoryT) -> FactoryT:
        if name in ENVIRONMENTS:
            raise ValueError(f"environment {name!r} is registered already")
        ENVIRONMENTS[name] = factory
        return factory

    return add


def make_environment(name: str, section: EnvironmentConfig) -> Environment:
    """The environment of the entry `env.<name>`: its calls bounded by `timeout_s`, batched or remote as it says.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path "package.module:Name" or
    "package.module.Name" of one of

    - a class with `async step(conversations, states)` and `async close()`: interfaces.Environment;
    - a NeMo-RL environment class, `step(message_log_batch, metadata) -> EnvironmentReturn`, `@ray.remote` or not;
    - a function `(messages, metadata) -> float | dict[str, float]`, async or not: the reward of a whole conversation,
      a list of {"role", "content"}, given the prompt's env_state.

    Classes by path are made with `section.kwargs`. Raises ConfigError for what cannot be found or made.
    """
    if section.remote.enabled:
        from nemo_rl.environments.remote import RemoteEnvironment  # loads Ray

        inner: Environment = RemoteEnvironment(name, section)
    else:
        inner = _make_local(name, section)
    timeout_s = (
        None if isinstance(inner, FunctionEnvironment) else section.timeout_s
    )  # a function's items have their own
    if section.batching.enabled:
        return BatchedEnvironment(inner, section.batching, timeout_s)
    return CheckedEnvironment(inner, timeout_s)


def without_wrappers(section: EnvironmentConfig) -> EnvironmentConfig:
    """The same environment inside an actor: not remote again, and batched outside."""
    return section.model_copy(
        update={"remote": RemoteConfig.model_validate({}), "batching": BatchingConfig.model_validate({})}
    )


def _make_local(name: str, section: EnvironmentConfig) -> Environment:
    kind = section.type or name
    if "." in kind or ":" in kind:
        return _from_path(name, kind, section)
    if kind in ENVIRONMENT_CONFIGS:
        importlib.import_module(f"nemo_rl.environments.{kind}")  # registers itself
    if kind not in ENVIRONMENTS:
        near = suggest_name(kind, {*ENVIRONMENT_CONFIGS, *ENVIRONMENTS})
        raise ConfigError(f"env.{name}.type", kind, f"unknown environment, and no dotted path{near}")
    return ENVIRONMENTS[kind](name, section)


def _from_path(name: str, path: str, section: EnvironmentConfig) -> Environment:
    key = f"env.{name}.type"
    target = import_path(key, path)
    kwargs = section.kwargs if isinstance(section, CustomEnvironmentConfig) else {}
    if is_nemo_rl_environment(target):
        return NemoRLEnvironment(name, target, kwargs)
    if inspect.isclass(target):
        _check_methods(key, path, target)
        return _made(key, path, target, kwargs)
    if not callable(target):
        raise ConfigError(key, path, "neither a class nor a function")
    if kwargs:
        raise ConfigError(f"env.{name}.kwargs", kwargs, "a function takes none; they are for classes")
    return FunctionEnvironment(name, target, timeout_s=section.timeout_s)


def _check_methods(key: str, path: str, target: type) -> None:
    """What interfaces.Environment asks of a class, as far as it shows before a call."""
    for method in ("step", "close"):
        found = getattr(target, method, None)
        if found is None:
            raise ConfigError(key, path, f"the class has no method `{method}`")
        if not inspect.iscoroutinefunction(found):
            raise ConfigError(key, path, f"the class's method `{method}` must be `async def`")


def _made(key: str, path: str, target: type, kwargs: dict[str, Any]) -> Environment:
    try:
        return target(**kwargs)
    except Exception as error:  # a user's own constructor
        raise ConfigError(
            key, path, f"cannot be made with kwargs {kwargs!r}: {type(error).__name__}: {error}"
        ) from error


def import_path(key: str, path: str) -> Any:
    """What "package.module:Name" names; raises ConfigError for `key` where there is no such thing."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or module_name.startswith("."):
        raise ConfigError(key, path, "no dotted path such as package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module of the user's, beside where the run is started
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(key, path, f"module {module_name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(key, path, f"module {module_name!r} has no {attribute!r}{suggest_name(attribute, public)}")
    return getattr(module, attribute)
