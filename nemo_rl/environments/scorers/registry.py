"""Scorers by name: built-in, registered, or a class by dotted path."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nemo_rl.config.scorers import (
    SCORER_CONFIGS,
    BatchedScorerConfig,
    CustomScorerConfig,
    RewardModelScorerConfig,
    ScorerConfig,
)
from nemo_rl.environments.registry import import_path
from nemo_rl.environments.scorers.contract import BatchedScorer, CheckedScorer
from nemo_rl.errors import ConfigError, suggest_name
from nemo_rl.interfaces import Scorer

if TYPE_CHECKING:
    from nemo_rl.distributed.placement import Seat

Factory: TypeAlias = Callable[..., Scorer]  # (the entry's name, its section), and of reward models `seats`
FactoryT = TypeVar("FactoryT", bound=Factory)

SCORERS: dict[str, Factory] = {}
MODULES = {"function": "rules", "reward_model": "reward_model", "classify": "classify", "judge": "judge"}


def register_scorer(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make a class or function, called with an entry's name and section, known as `scorers.<entry>.type: name`."""

    def add(factory: FactoryT) -> FactoryT:
        if name in SCORERS:
            raise ValueError(f"scorer {name!r} is registered already")
        SCORERS[name] = factory
        return factory

    return add


def make_scorer(name: str, section: ScorerConfig, *, seats: "Sequence[Seat]" = ()) -> CheckedScorer | BatchedScorer:
    """The scorer of the entry `scorers.<name>`, its calls bounded by `timeout_s` and batched as it says.

    `seats`: of the reward models' pool, where there is one; each holds a replica of every reward model.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of a class that satisfies
    interfaces.Scorer, made with `section.kwargs`. Raises ConfigError for what cannot be found or made.
    """
    if isinstance(section, RewardModelScorerConfig) and seats:
        section = section.model_copy(update={"in_actor": True, "num_replicas": len(seats)})
    inner = _inner(name, section, seats)
    if not isinstance(section, BatchedScorerConfig):  # an endpoint bounds each attempt; waiting for one is no failure
        return CheckedScorer(inner, timeout_s=None)
    batching = section.batching
    if (
        isinstance(section, RewardModelScorerConfig) and batching.max_calls is None
    ):  # each replica computes one at a time
        batching = batching.model_copy(update={"max_calls": section.num_replicas})
    if batching.enabled:
        return BatchedScorer(inner, batching, timeout_s=section.timeout_s)
    return CheckedScorer(inner, timeout_s=section.timeout_s)


def _inner(name: str, section: ScorerConfig, seats: "Sequence[Seat]") -> Scorer:
    kind = section.type or name
    if "." in kind or ":" in kind:
        return _from_path(f"scorers.{name}", kind, section)
    if kind in SCORER_CONFIGS:
        importlib.import_module(f"nemo_rl.environments.scorers.{MODULES[kind]}")  # registers itself
    if kind not in SCORERS:
        near = suggest_name(kind, {*SCORER_CONFIGS, *SCORERS})
        raise ConfigError(f"scorers.{name}.type", kind, f"unknown scorer, and no dotted path{near}")
    if isinstance(section, RewardModelScorerConfig) and seats:
        return SCORERS[kind](name, section, seats=seats)
    return SCORERS[kind](name, section)


def _from_path(key: str, path: str, section: ScorerConfig) -> Scorer:
    target = import_path(f"{key}.type", path)
    if not inspect.isclass(target):
        raise ConfigError(f"{key}.type", path, "not a class; for a function: type: function, function: <path>")
    for method in ("score", "close"):
        if not inspect.iscoroutinefunction(getattr(target, method, None)):
            raise ConfigError(f"{key}.type", path, f"the class needs `async def {method}`")
    kwargs = section.kwargs if isinstance(section, CustomScorerConfig) else {}
    try:
        scorer: Any = target(**kwargs)
    except Exception as error:  # a user's own constructor
        problem = f"{path} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(f"{key}.kwargs", kwargs, problem) from error
    return scorer
