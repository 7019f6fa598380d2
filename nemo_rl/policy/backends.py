"""Choosing the backend of a model: its entry makes the worker. Backends of one's own are adapted here."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field

from nemo_rl.config.kinds import Entry
from nemo_rl.config.policy import BackendConfig, PolicyConfig, TeacherConfig
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.policy.worker import PolicyWorker, TeacherWorker


def make_policy_worker(config: PolicyConfig, **arguments: Any) -> "PolicyWorker":
    """Return a policy worker of the chosen backend; `arguments` are those of `PolicyWorker` but `config`."""
    section = config.parallelism
    return config.BACKENDS.entry(section.backend, key="policy.backend").make(section, config, **arguments)


def make_teacher_worker(config: TeacherConfig, *, section: str, **arguments: Any) -> "TeacherWorker":
    """Return a teacher worker of the chosen backend; `arguments` are those of `TeacherWorker` but `config`."""
    chosen = config.parallelism
    entry = config.BACKENDS.entry(chosen.backend, key=f"{section}.backend")
    return entry.make(chosen, config, section=section, **arguments)


class CustomBackendConfig(BackendConfig):
    """Options of a worker class that is named by dotted path; it runs on data-parallel ranks alone."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # of the class, besides the arguments of every worker


def adapt_backend(key: str, path: str, target: Any) -> Entry[CustomBackendConfig]:
    """Return the entry of a user's worker class, or of a function that returns a worker."""
    if not callable(target):
        raise ConfigError(key, path, "is neither an Entry nor a worker class")
    make: Callable[..., Any] = target

    def make_worker(options: CustomBackendConfig, /, config: Any, **arguments: Any) -> Any:
        return make(config, **arguments, **options.kwargs)

    return Entry(CustomBackendConfig, make=make_worker)
