"""Parts found by a registered name or by a dotted path."""

import importlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from nemo_rl.errors import ConfigError, suggest_name

PartT = TypeVar("PartT", bound=Callable[..., object])


def find_registered(name: str, registered: Mapping[str, PartT], *, key: str) -> PartT:
    """The registered part of that name, or the callable at that dotted path.

    Raises ConfigError with `key` and the known names when there is neither.
    """
    if name in registered:
        return registered[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(key, name, f"no registered name and no dotted path{suggest_name(name, registered)}")
    try:
        part = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(key, name, f"cannot be imported: {error}") from error
    if not callable(part):
        raise ConfigError(key, name, f"is no function but {type(part).__name__}")
    return part  # type: ignore[return-value]
