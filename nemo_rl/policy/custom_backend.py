"""Policy backends of a user's own: a worker class named by dotted path, with its options."""

from collections.abc import Callable
from typing import Any

from pydantic import Field

from nemo_rl.config.kinds import Entry
from nemo_rl.config.policy import BackendConfig
from nemo_rl.errors import ConfigError


class CustomBackendConfig(BackendConfig):
    """Options of a worker class that is named by dotted path; it runs on data-parallel ranks alone."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # arguments of the class besides those of every worker


def adapt_backend(key: str, path: str, target: Any) -> Entry[CustomBackendConfig]:
    """Return the entry of a user's worker class, or of a function that returns a worker."""
    if not callable(target):
        raise ConfigError(key, path, "is neither an Entry nor a worker class")
    make: Callable[..., Any] = target

    def make_worker(options: CustomBackendConfig, /, config: Any, **arguments: Any) -> Any:
        return make(config, **arguments, **options.kwargs)

    return Entry(CustomBackendConfig, make=make_worker)
