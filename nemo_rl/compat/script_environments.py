"""Environments of NeMo-RL's run scripts: named by `register_env`, or made by the script."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_rl.compat.environment_interface import PY_EXECUTABLES
from nemo_rl.compat.environments import NemoRLEnvironment
from nemo_rl.config.environment import CustomEnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.errors import ConfigError

ENV_REGISTRY: dict[str, dict[str, str]] = {}


def init_ray(log_dir: str | None = None) -> None:
    """Do nothing: a run connects to Ray when it needs it."""


def get_actor_python_env(actor_class_fqn: str) -> str:
    """Return the running interpreter: one environment serves all processes."""
    return PY_EXECUTABLES.SYSTEM


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Make an environment class, by its dotted path, known under a name of `env`; raises ValueError for a known one."""
    if env_name in ENV_REGISTRY or env_name in ENVIRONMENTS.names:
        raise ValueError(f"an environment named {env_name!r} is registered already")
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def name_environments(recipe: dict[str, Any]) -> None:
    """Write the classes of `register_env` into the entries of `env` that have their names, in place."""
    environments = recipe.get("env") or {}
    for name, registered in ENV_REGISTRY.items():
        section = environments.get(name)
        if isinstance(section, Mapping) and "type" not in section:
            environments[name] = {"type": registered["actor_class_fqn"], "kwargs": {"cfg": dict(section)}}


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An environment of this project that a script makes by NeMo-RL's class, with its section."""

    type: str
    section: Mapping[str, Any]


class MathEnvironment:
    """NeMo-RL's environment of mathematics: `MathEnvironment.options(...).remote(section)`."""

    @classmethod
    def options(cls, **options: Any) -> type["MathEnvironment"]:
        """Return the class: where it runs is the run's business."""
        return cls

    @classmethod
    def remote(cls, cfg: Mapping[str, Any]) -> BuiltIn:
        """Return the environment of a section of `env`."""
        return BuiltIn("math", cfg)


def create_env(env_name: str, env_config: Mapping[str, Any]) -> BuiltIn:
    """Return an environment by its name in `register_env`, or of this project."""
    if env_name in ENV_REGISTRY:
        return BuiltIn(ENV_REGISTRY[env_name]["actor_class_fqn"], {"kwargs": {"cfg": dict(env_config)}})
    return BuiltIn(env_name, env_config)


class RemoteEnvironment:
    """An environment in an actor that the script started."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> Any:
        """Return the result of the actor's `step`."""
        return sys.modules["ray"].get(self._actor.step.remote(message_log_batch, metadata))  # the script imported it


@contextmanager
def open_environments(recipe: dict[str, Any], tasks: Iterable[str], *by_task: Mapping[str, Any]) -> Iterator[None]:
    """Write a script's environments into `env`, by task, as entries that exist while the block runs."""
    sections: dict[str, Any] = {}
    with ExitStack() as stack:
        for task in sorted(tasks):
            environment = _find(task, by_task)
            if isinstance(environment, BuiltIn):
                sections[task] = {**environment.section, "type": environment.type}
                continue
            entry = _make_entry(environment)
            stack.enter_context(ENVIRONMENTS.registered_for(f"script_{task}", entry))
            sections[task] = {"type": f"script_{task}"}
        recipe["env"] = sections
        yield


def _find(task: str, by_task: Iterable[Mapping[str, Any]]) -> Any:
    for environments in by_task:
        try:
            return environments[task]  # a defaultdict may make it
        except KeyError:
            continue
    known = {name for environments in by_task for name in environments}
    raise ConfigError("task_to_env", task, "the script's datasets have this task, but no environment", known=known)


def _make_entry(environment: Any) -> Entry[CustomEnvironmentConfig]:
    is_actor = type(environment).__name__ == "ActorHandle"
    inner = RemoteEnvironment(environment) if is_actor else environment

    def existing(**kwargs: Any) -> Any:
        return inner

    return Entry(CustomEnvironmentConfig, make=lambda name, section: NemoRLEnvironment(name, existing, {}))
