"""A scorer without a model."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nemo_rl.types import ScoreRequest


class FakeScorer:
    """Scores by `answer(request)`; `before(requests)` is awaited first. The sizes of all calls are in `batch_sizes`."""

    def __init__(
        self,
        answer: Callable[[ScoreRequest], Any] = lambda request: float(len(request.messages[-1].content)),
        *,
        before: Callable[[Sequence[ScoreRequest]], Awaitable[None]] | None = None,
    ) -> None:
        self.batch_sizes: list[int] = []
        self.is_closed = False
        self._answer = answer
        self._before = before

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        self.batch_sizes.append(len(requests))
        if self._before is not None:
            await self._before(requests)
        return [self._answer(request) for request in requests]

    async def close(self) -> None:
        self.is_closed = True
