"""Scorers by name: built-in, registered, or a class by dotted path."""

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import SCORERS
from nemo_rl.config.scorers import (
    BatchedScorerConfig,
    CustomScorerConfig,
    RewardModelScorerConfig,
    ScorerConfig,
)
from nemo_rl.environments.batcher import Batcher
from nemo_rl.environments.boundary import error_to_failure, reraise_own_cancellation
from nemo_rl.errors import ConfigError, EnvironmentContractError
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import Failure, FailureClass

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot

logger = logging.getLogger(__name__)


async def score_with_checks(
    scorer: Scorer, requests: Sequence[ScoreRequest], *, timeout_s: float | None
) -> list[float | Failure]:
    """One finite score or failure a request, in order, whatever the scorer does; raises nothing but cancellation."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            scores = await scorer.score(requests)
        if len(scores) != len(requests):
            raise EnvironmentContractError(f"{len(scores)} scores for {len(requests)} requests")
        return [_validate_score(score) for score in scores]
    except (Exception, asyncio.CancelledError) as error:  # the boundary to code of others, and to other processes
        reraise_own_cancellation(error)
        cause = TimeoutError(f"no score in {timeout_s:g} s") if deadline.expired() else error
        logger.warning("a scorer failed %d requests", len(requests), exc_info=cause)
        return [error_to_failure(cause, FailureClass.REWARD)] * len(requests)


def _validate_score(score: object) -> float | Failure:
    if isinstance(score, Failure):
        return score
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return Failure(FailureClass.REWARD, f"the score is {score!r}, not a finite number")
    return float(score)


class CheckedScorer:
    """Any scorer with a deadline on its calls and its scores checked; `score` raises nothing."""

    def __init__(self, inner: Scorer, *, timeout_s: float | None) -> None:
        self._make_inner = inner
        self._timeout_s = timeout_s

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await score_with_checks(self._make_inner, requests, timeout_s=self._timeout_s)

    async def close(self) -> None:
        await self._make_inner.close()


class BatchedScorer:
    """A scorer in front of any other: requests of rollouts that end at different times share its calls.

    A call that passes `timeout_s`, raises or gives a wrong number of scores fails its own requests and no others.
    """

    def __init__(self, inner: Scorer, batching: BatchingConfig, *, timeout_s: float | None) -> None:
        self._make_inner = inner
        self._timeout_s = timeout_s
        self._batcher: Batcher[ScoreRequest, float | Failure] = Batcher(self._score_batch, batching)

    @property
    def mean_batch_size(self) -> float:
        """Requests a call; 0 before the first."""
        return self._batcher.num_items / self._batcher.num_calls if self._batcher.num_calls else 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await self._batcher.submit(requests)

    async def close(self) -> None:
        await self._batcher.close()
        await self._make_inner.close()

    async def _score_batch(self, requests: list[ScoreRequest]) -> list[float | Failure]:
        return await score_with_checks(self._make_inner, requests, timeout_s=self._timeout_s)


async def score_each(
    requests: Sequence[ScoreRequest], score: Callable[[ScoreRequest], Awaitable[float]]
) -> list[float | Failure]:
    """Each request on its own: what one raises is its failure alone."""

    async def one(request: ScoreRequest) -> float | Failure:
        try:
            return await score(request)
        except Exception as error:  # a server's words, a template's and a parser's code
            logger.debug("a request could not be scored", exc_info=error)
            return error_to_failure(error, FailureClass.REWARD)

    return list(await asyncio.gather(*map(one, requests)))


Factory: TypeAlias = Callable[..., Scorer]  # (the entry's name, its section), and of reward models `slots`
FactoryT = TypeVar("FactoryT", bound=Factory)


def register_scorer(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make a class or function, called with an entry's name and section, known as `scorers.<entry>.type: name`."""

    def add(factory: FactoryT) -> FactoryT:
        SCORERS.register(name)(Entry(CustomScorerConfig, make=factory))
        return factory

    return add


def adapt_scorer(key: str, path: str, target: Any) -> Entry[CustomScorerConfig]:
    """Return the entry of a user's class that satisfies interfaces.Scorer; its section has `kwargs`."""
    return Entry(CustomScorerConfig, make=functools.partial(_make_from_target, key, path, target))


def make_scorer(
    name: str, section: ScorerConfig, *, slots: "Sequence[ReservedSlot]" = ()
) -> CheckedScorer | BatchedScorer:
    """The scorer of the entry `scorers.<name>`, its calls bounded by `timeout_s` and batched as it says.

    `slots`: of the reward models' pool, where there is one; each holds a replica of every reward model.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of a class that satisfies
    interfaces.Scorer, made with `section.kwargs`. Raises ConfigError for what cannot be found or made.
    """
    if isinstance(section, RewardModelScorerConfig) and slots:
        section = section.model_copy(update={"in_actor": True, "num_replicas": len(slots)})
    inner = _make_inner(name, section, slots)
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


def _make_inner(name: str, section: ScorerConfig, slots: "Sequence[ReservedSlot]") -> Scorer:
    make = SCORERS.entry(section.type or name, key=f"scorers.{name}.type").make
    return (
        make(name, section, slots=slots)
        if isinstance(section, RewardModelScorerConfig) and slots
        else make(name, section)
    )


def _make_from_target(_key: str, path: str, target: Any, name: str, section: CustomScorerConfig) -> Scorer:
    key = f"scorers.{name}"
    if not inspect.isclass(target):
        raise ConfigError(f"{key}.type", path, "not a class; for a function: type: function, function: <path>")
    for method in ("score", "close"):
        if not inspect.iscoroutinefunction(getattr(target, method, None)):
            raise ConfigError(f"{key}.type", path, f"the class needs `async def {method}`")
    kwargs = section.kwargs
    try:
        scorer: Any = target(**kwargs)
    except Exception as error:  # a user's own constructor
        problem = f"{path} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(f"{key}.kwargs", kwargs, problem) from error
    return scorer
