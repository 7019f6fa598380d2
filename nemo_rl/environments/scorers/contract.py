"""What every scorer's answer has to satisfy, whoever wrote it; and many rollouts' requests in few calls of it."""

import asyncio
import logging
import math
from collections.abc import Sequence

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.batcher import Batcher
from nemo_rl.environments.contract import failure_of, raise_own_cancellation
from nemo_rl.errors import EnvironmentContractError
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import Failure, FailureClass

logger = logging.getLogger(__name__)


async def checked_scores(
    scorer: Scorer, requests: Sequence[ScoreRequest], *, timeout_s: float | None
) -> list[float | Failure]:
    """One finite score or failure a request, in order, whatever the scorer does; raises nothing but cancellation."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            scores = await scorer.score(requests)
        if len(scores) != len(requests):
            raise EnvironmentContractError(f"{len(scores)} scores for {len(requests)} requests")
        return [_checked(score) for score in scores]
    except (Exception, asyncio.CancelledError) as error:  # the boundary to code of others, and to other processes
        raise_own_cancellation(error)
        cause = TimeoutError(f"no score in {timeout_s:g} s") if deadline.expired() else error
        logger.warning("a scorer failed %d requests", len(requests), exc_info=cause)
        return [failure_of(cause, FailureClass.REWARD)] * len(requests)


def _checked(score: object) -> float | Failure:
    if isinstance(score, Failure):
        return score
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        return Failure(FailureClass.REWARD, f"the score is {score!r}, not a finite number")
    return float(score)


class CheckedScorer:
    """Any scorer with a deadline on its calls and its scores checked; `score` raises nothing."""

    def __init__(self, inner: Scorer, *, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await checked_scores(self._inner, requests, timeout_s=self._timeout_s)

    async def close(self) -> None:
        await self._inner.close()


class BatchedScorer:
    """A scorer in front of any other: requests of rollouts that end at different times share its calls.

    A call that passes `timeout_s`, raises or gives a wrong number of scores fails its own requests and no others.
    """

    def __init__(self, inner: Scorer, batching: BatchingConfig, *, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._batcher: Batcher[ScoreRequest, float | Failure] = Batcher(self._answer, batching)

    @property
    def mean_batch_size(self) -> float:
        """Requests a call; 0 before the first."""
        return self._batcher.num_items / self._batcher.num_calls if self._batcher.num_calls else 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return await self._batcher.submit(requests)

    async def close(self) -> None:
        await self._batcher.close()
        await self._inner.close()

    async def _answer(self, requests: list[ScoreRequest]) -> list[float | Failure]:
        return await checked_scores(self._inner, requests, timeout_s=self._timeout_s)
