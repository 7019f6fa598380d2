"""Requests that are scored one by one: what one raises is its failure alone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from nemo_rl.environments.contract import failure_of
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, FailureClass

log = logging.getLogger(__name__)


async def score_each(
    requests: Sequence[ScoreRequest], score: Callable[[ScoreRequest], Awaitable[float]]
) -> list[float | Failure]:
    """Each request on its own: what one raises is its failure alone."""

    async def one(request: ScoreRequest) -> float | Failure:
        try:
            return await score(request)
        except Exception as error:  # a server's words, a template's and a parser's code
            log.debug("a request could not be scored", exc_info=error)
            return failure_of(error, FailureClass.REWARD)

    return list(await asyncio.gather(*map(one, requests)))
