"""Scorers with a deadline and checked scores, batched or not."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.scorers.checked_scorer import BatchedScorer, CheckedScorer
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Failure, FailureClass, Message, ResponseFault, ScoreRequest
from tests.fakes.scorers import FakeScorer


def request(number: int) -> ScoreRequest:
    return ScoreRequest((Message("user", "q"), Message("assistant", "a" * number)), {"number": number})


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("count", [1, 7, 9, 64, 1000])
def test_any_number_of_requests_resolves_whatever_the_batch_size(count: int, multiple: int) -> None:
    fake = FakeScorer()

    async def main() -> tuple[list[list[float | Failure | ResponseFault]], float]:
        scorer = BatchedScorer(fake, BatchingConfig(max_batch_size=multiple, max_wait_ms=5), timeout_s=60)
        scores = await asyncio.gather(*(scorer.score([request(i)]) for i in range(count)))
        await scorer.close()
        return scores, scorer.mean_batch_size

    scores, mean_batch_size = asyncio.run(main())
    assert scores == [[float(i)] for i in range(count)]
    assert sum(fake.batch_sizes) == count
    assert max(fake.batch_sizes) <= multiple
    assert mean_batch_size == count / len(fake.batch_sizes)


async def hang(requests: Sequence[ScoreRequest]) -> None:
    if any(one.metadata["number"] == 3 for one in requests):
        await asyncio.Event().wait()


async def die(requests: Sequence[ScoreRequest]) -> None:
    if any(one.metadata["number"] == 3 for one in requests):
        raise ConnectionError("gone")


async def lose(requests: Sequence[ScoreRequest]) -> None:
    """As a pool that is shut down: its futures are cancelled, those who wait for them are not."""
    if any(one.metadata["number"] == 3 for one in requests):
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        await lost


@pytest.mark.parametrize(
    ("before", "said"),
    [(hang, "no score in 0.2 s"), (die, "ConnectionError: gone"), (lose, "CancelledError")],
    ids=["hangs", "dies", "is cancelled from within"],
)
def test_a_backend_that_hangs_or_dies_fails_exactly_the_requests_of_its_call(before: Any, said: str) -> None:
    async def main() -> list[float | Failure | ResponseFault]:
        scorer = BatchedScorer(
            FakeScorer(before=before), BatchingConfig(max_batch_size=2, max_wait_ms=5), timeout_s=0.2
        )
        scores = await scorer.score([request(i) for i in range(6)])
        await scorer.close()
        return scores

    scores = run_in_virtual_time(main())
    failed = [i for i, score in enumerate(scores) if isinstance(score, Failure)]
    assert failed == [2, 3]
    assert all(isinstance(scores[i], Failure) and said in scores[i].cause for i in failed)  # type: ignore[union-attr]
    assert [scores[i] for i in (0, 1, 4, 5)] == [0.0, 1.0, 4.0, 5.0]


class OneTooFew(FakeScorer):
    async def score(self, requests: Sequence[ScoreRequest]) -> list[Any]:
        scores = await super().score(requests)
        return scores[:-1] if any(one.metadata["number"] == 3 for one in requests) else scores


def test_one_score_too_few_fails_the_requests_of_that_call() -> None:
    async def main() -> list[float | Failure | ResponseFault]:
        scorer = BatchedScorer(OneTooFew(), BatchingConfig(max_batch_size=2, max_wait_ms=5), timeout_s=60)
        return await scorer.score([request(i) for i in range(4)])

    scores = asyncio.run(main())
    assert scores[:2] == [0.0, 1.0]
    for score in scores[2:]:
        assert isinstance(score, Failure)
        assert score.failure_class is FailureClass.REWARD
        assert "1 scores for 2 requests" in score.cause


@pytest.mark.parametrize("score", [math.nan, math.inf, None, "good", True])
def test_what_is_no_finite_number_is_a_failure_and_never_zero(score: object) -> None:
    async def main() -> list[float | Failure | ResponseFault]:
        return await CheckedScorer(FakeScorer(lambda _: score), timeout_s=60).score([request(1)])

    (result,) = asyncio.run(main())
    assert isinstance(result, Failure)
    assert "not a finite number" in result.cause
