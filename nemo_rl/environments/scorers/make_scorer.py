"""Scorers of the entries of `scorers`, and the adapter of the kind for a user's class."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.config.environment import BatchedScorerConfig, CustomScorerConfig, ModelScorerConfig, ScorerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.layout import Device
from nemo_rl.config.registries import SCORERS
from nemo_rl.environments.scorers.checked_scorer import BatchedScorer, CheckedScorer
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import Scorer

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot


def make_scorer(
    name: str, section: ScorerConfig, *, device: Device | None, slots: "Sequence[ReservedSlot]" = ()
) -> "CheckedScorer | BatchedScorer":
    """Return the scorer of the entry `scorers.<name>`, its calls bounded by `timeout_s` and batched as configured.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of an `Entry` or of a class that
    satisfies interfaces.Scorer, constructed with `section.kwargs`. `device` is that of the run's other models, None if
    there are none. `slots` are those of the reward models' pool, if there is one; each holds a replica of every model.
    Raises ConfigError for a name or path that is not found and for a class that cannot be constructed.
    """
    entry = SCORERS.entry(section.type or name, key=f"scorers.{name}.type")
    if isinstance(section, ModelScorerConfig):
        section = section.place(device, num_slots=len(slots))
    else:
        slots = ()
    inner: Scorer = entry.make(name, section, **({"slots": slots} if slots else {}))
    if not isinstance(
        section, BatchedScorerConfig
    ):  # an endpoint bounds each attempt; waiting in its queue is not a failure
        return CheckedScorer(inner, timeout_s=None)
    if section.batching.enabled:
        batching = section.batching.model_copy(update={"max_calls": section.max_calls})
        return BatchedScorer(inner, batching, timeout_s=section.timeout_s)
    return CheckedScorer(inner, timeout_s=section.timeout_s)


def adapt_scorer(key: str, path: str, target: Any) -> Entry[CustomScorerConfig]:
    """Return the entry for a user's class; raises ConfigError for `key` for anything but an interfaces.Scorer."""
    if not inspect.isclass(target):
        raise ConfigError(key, path, "not a class; for a function: type: function, function: <path>")
    for method in ("score", "close"):
        if not inspect.iscoroutinefunction(getattr(target, method, None)):
            raise ConfigError(key, path, f"the class needs `async def {method}`")
    return Entry(CustomScorerConfig, make=lambda name, section: _construct(name, path, target, section.kwargs))


def _construct(name: str, path: str, target: type, kwargs: dict[str, Any]) -> Scorer:
    try:
        return target(**kwargs)
    except (Exception, SystemExit) as error:  # a user's own constructor
        problem = f"{path} cannot be constructed: {type(error).__name__}: {error}"
        raise ConfigError(f"scorers.{name}.kwargs", kwargs, problem) from error
