"""Scorers of the entries of `scorers`, the boundary to their code, and the adapter of the kind for a user's class."""

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from nemo_rl.config.environment import (
    BatchedScorerConfig,
    BatchingConfig,
    CustomScorerConfig,
    ModelScorerConfig,
    ScorerConfig,
)
from nemo_rl.config.kinds import Entry, import_path
from nemo_rl.config.registries import SCORERS
from nemo_rl.environments.boundary import Batcher, contain_exit, error_to_failure, reraise_own_cancellation
from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.errors import ConfigError, EnvironmentContractError, NemoRLError, WorkerError
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import Failure, FailureClass

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot

logger = logging.getLogger(__name__)


class ScoreError(NemoRLError):
    """A server's answer without a score, or with a score out of range."""


def make_scorer(
    name: str, section: ScorerConfig, *, slots: "Sequence[ReservedSlot]" = ()
) -> "CheckedScorer | BatchedScorer":
    """Return the scorer of the entry `scorers.<name>`, its calls bounded by `timeout_s` and batched as configured.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of an `Entry` or of a class that
    satisfies interfaces.Scorer, constructed with `section.kwargs`. `slots` are those of the reward models' pool, if
    there is one; each holds a replica of every model. Raises ConfigError for a name or path that is not found and for a
    class that cannot be constructed.
    """
    entry = SCORERS.entry(section.type or name, key=f"scorers.{name}.type")
    if isinstance(section, ModelScorerConfig) and slots:
        section = section.with_replicas(len(slots))
        inner: Scorer = entry.make(name, section, slots=slots)
    else:
        inner = entry.make(name, section)
    if not isinstance(section, BatchedScorerConfig):  # an endpoint bounds each attempt; queueing is no failure
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


class CheckedScorer:
    """Any scorer with a deadline for its calls and checked scores; `score` raises nothing."""

    def __init__(self, inner: Scorer, *, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await score_with_checks(self._inner, requests, timeout_s=self._timeout_s)

    async def close(self) -> None:
        await self._inner.close()


class BatchedScorer:
    """Any scorer with a batcher in front of it: requests of rollouts that end at different times share its calls.

    A call that exceeds `timeout_s`, raises or returns a wrong number of scores fails its own requests and no others.
    """

    def __init__(self, inner: Scorer, batching: BatchingConfig, *, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._batcher: Batcher[ScoreRequest, float | Failure] = Batcher(self._score_batch, batching)

    @property
    def mean_batch_size(self) -> float:
        """Return the mean number of requests per call; 0 before the first."""
        return self._batcher.num_items / self._batcher.num_calls if self._batcher.num_calls else 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await self._batcher.submit(requests)

    async def close(self) -> None:
        await self._batcher.close()
        await self._inner.close()

    async def _score_batch(self, requests: list[ScoreRequest]) -> list[float | Failure]:
        return await score_with_checks(self._inner, requests, timeout_s=self._timeout_s)


async def score_with_checks(
    scorer: Scorer, requests: Sequence[ScoreRequest], *, timeout_s: float | None
) -> list[float | Failure]:
    """Return one finite score or failure per request, in order; raises nothing but cancellation."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            scores = await contain_exit(scorer.score(requests))
        if len(scores) != len(requests):
            raise EnvironmentContractError(f"{len(scores)} scores for {len(requests)} requests")
        return [_validate_score(score) for score in scores]
    except (Exception, asyncio.CancelledError) as error:  # the boundary to user code and to other processes
        reraise_own_cancellation(error)
        cause = TimeoutError(f"no score in {timeout_s:g} s") if deadline.expired() else error
        logger.warning("a scorer failed %d requests", len(requests), exc_info=cause)
        return [error_to_failure(cause, FailureClass.REWARD)] * len(requests)


async def score_each(
    requests: Sequence[ScoreRequest], score: Callable[[ScoreRequest], Awaitable[float]]
) -> list[float | Failure]:
    """Return the score of each request on its own: an exception is the failure of its request alone."""

    async def score_one(request: ScoreRequest) -> float | Failure:
        try:
            return await contain_exit(score(request))
        except Exception as error:  # a server's words, a template's and a parser's code
            logger.debug("scoring a request failed", exc_info=error)
            return error_to_failure(error, FailureClass.REWARD)

    return list(await asyncio.gather(*map(score_one, requests)))


class FunctionScorerConfig(BatchedScorerConfig):
    """A rule: `(messages, metadata) -> float`, in processes of its own."""

    function: str  # a dotted path
    num_workers: int = Field(default=2, gt=0)  # processes that run the function


class RuleScorer:
    """A rule `(messages, metadata) -> float`; an exception, a hang or a crash fails its own request alone."""

    def __init__(self, name: str, section: FunctionScorerConfig) -> None:
        key = f"scorers.{name}.function"
        function = import_path(key, section.function)
        if not callable(function):
            raise ConfigError(key, section.function, "not a function")
        module, qualified_name = function.__module__, function.__qualname__
        if "<" in qualified_name or "." in qualified_name:
            raise ConfigError(key, section.function, "a function in a process of its own must be found by its path")
        self._pool = ProcessPool(f"{module}:{qualified_name}", section.num_workers, timeout_s=section.timeout_s)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return list(await asyncio.gather(*map(self._score, requests)))

    async def _score(self, request: ScoreRequest) -> float | Failure:
        try:
            return await self._pool.call(messages_to_dicts(request.messages), dict(request.metadata))
        except WorkerError as error:
            return error_to_failure(error, FailureClass.REWARD)

    async def close(self) -> None:
        await self._pool.close()


FUNCTION = Entry(FunctionScorerConfig, make=RuleScorer)


def _validate_score(score: object) -> float | Failure:
    if isinstance(score, Failure):
        return score
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return Failure(FailureClass.REWARD, f"the score is {score!r}, not a finite number")
    return float(score)


def _construct(name: str, path: str, target: type, kwargs: dict[str, Any]) -> Scorer:
    try:
        return target(**kwargs)
    except (Exception, SystemExit) as error:  # a user's own constructor
        problem = f"{path} cannot be constructed: {type(error).__name__}: {error}"
        raise ConfigError(f"scorers.{name}.kwargs", kwargs, problem) from error
