"""The boundary to scorers: deadlines, batches, checked scores, and errors as typed failures."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.batcher import Batcher
from nemo_rl.environments.boundary import (
    error_to_failure,
    find_fault_problem,
    reraise_own_cancellation,
)
from nemo_rl.environments.user_code import contain_exit, gather_apart, name_user_code
from nemo_rl.errors import EnvironmentContractError, NemoRLError
from nemo_rl.interfaces import Scorer
from nemo_rl.types import Failure, FailureClass, ResponseFault, ScoreRequest

logger = logging.getLogger(__name__)

TOO_LONG = "too_long_for_scorer"  # a response fault


class ScoreError(NemoRLError):
    """A server's answer without a score, or with a score out of range."""


class CheckedScorer:
    """Any scorer with a deadline for its calls and checked scores; `score` raises nothing."""

    def __init__(self, inner: Scorer, *, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure | ResponseFault]:
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
        self._batcher: Batcher[ScoreRequest, float | Failure | ResponseFault] = Batcher(self._score_batch, batching)

    @property
    def mean_batch_size(self) -> float:
        """Return the mean number of requests per call; 0 before the first."""
        return self._batcher.num_items / self._batcher.num_calls if self._batcher.num_calls else 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure | ResponseFault]:
        return await self._batcher.submit(requests)

    async def close(self) -> None:
        await self._batcher.close()
        await self._inner.close()

    async def _score_batch(self, requests: list[ScoreRequest]) -> list[float | Failure | ResponseFault]:
        return await score_with_checks(self._inner, requests, timeout_s=self._timeout_s)


async def score_with_checks(
    scorer: Scorer, requests: Sequence[ScoreRequest], *, timeout_s: float | None
) -> list[float | Failure | ResponseFault]:
    """Return one finite score or failure per request, in order; raises nothing but cancellation."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            scores = await contain_exit(scorer.score(requests), name_user_code(scorer))
        if len(scores) != len(requests):
            raise EnvironmentContractError(f"{len(scores)} scores for {len(requests)} requests")
        return [_validate_score(score) for score in scores]
    except (Exception, asyncio.CancelledError) as error:  # the boundary to user code and to other processes
        reraise_own_cancellation(error)
        cause = TimeoutError(f"no score in {timeout_s:g} s") if deadline.expired() else error
        logger.warning("a scorer failed %d requests", len(requests), exc_info=cause)
        return [error_to_failure(cause, FailureClass.REWARD)] * len(requests)


async def score_each(
    requests: Sequence[ScoreRequest], score: Callable[[ScoreRequest], Awaitable[float | ResponseFault]]
) -> list[float | Failure | ResponseFault]:
    """Return the score of each request on its own: an exception is the failure of its request alone.

    A request with more tokens than the served model takes is the fault of its response.
    """
    from nemo_rl.distributed.endpoint import ContextLengthExceeded  # loads aiohttp

    async def score_one(request: ScoreRequest) -> float | Failure | ResponseFault:
        try:
            return await contain_exit(score(request))
        except ContextLengthExceeded:
            return ResponseFault(TOO_LONG)
        except Exception as error:  # a server's words, a template's and a parser's code
            logger.debug("scoring a request failed", exc_info=error)
            return error_to_failure(error, FailureClass.REWARD)

    return await gather_apart(map(score_one, requests))


def _validate_score(score: object) -> float | Failure | ResponseFault:
    if isinstance(score, Failure):
        return score
    if isinstance(score, ResponseFault):
        problem = find_fault_problem(score.name)
        return score if problem is None else Failure(FailureClass.REWARD, problem)
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return Failure(FailureClass.REWARD, f"the score is {score!r}, not a finite number")
    return float(score)
