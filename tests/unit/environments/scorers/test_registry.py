import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl.config.environment import BatchingConfig, ScorerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import SCORERS
from nemo_rl.environments.scorers.registry import BatchedScorer, CheckedScorer, make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, FailureClass, Message
from tests.fakes.scorers import FakeScorer
from tests.fakes.virtual_time import run_in_virtual_time

HERE = "tests.unit.environments.scorers.test_registry"


def length(messages: Sequence[dict[str, str]], metadata: dict[str, Any]) -> float:
    answer = messages[-1]["content"]
    if answer == "crash":
        os._exit(1)
    if answer == "raise":
        raise ValueError("no such answer")
    return float(len(answer)) + metadata["bonus"]


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        return [self.value] * len(requests)

    async def close(self) -> None:
        pass


def scores_of(entry: dict[str, Any], answers: Sequence[str]) -> list[float | Failure]:
    async def main() -> list[float | Failure]:
        scorer = make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"))
        requests = [ScoreRequest((Message("user", "q"), Message("assistant", a)), {"bonus": 0.5}) for a in answers]
        try:
            return await scorer.score(requests)
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_a_rule_runs_in_a_process_whose_end_fails_one_request() -> None:
    entry = {"type": "function", "function": f"{HERE}:length", "num_workers": 1}
    good, crashed, raised, after = scores_of(entry, ["four", "crash", "raise", ""])
    assert (good, after) == (4.5, 0.5)
    assert isinstance(crashed, Failure)
    assert crashed.failure_class is FailureClass.REWARD
    assert isinstance(raised, Failure)
    assert "no such answer" in raised.cause


class BonusConfig(ScorerConfig):
    bonus: float


BONUS = Entry(BonusConfig, make=lambda name, section: Constant(section.bonus))


def test_an_entry_by_its_path_has_a_section_of_its_own() -> None:
    assert scores_of({"type": f"{HERE}:BONUS", "bonus": 3.0}, ["a"]) == [3.0]


def test_a_class_by_its_path_is_a_scorer() -> None:
    assert scores_of({"type": f"{HERE}:Constant", "kwargs": {"value": 2.0}}, ["a", "b"]) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("entry", "key", "said"),
    [
        ({"type": "rewardmodel"}, "scorers.rule.type", "did you mean reward_model"),
        ({"type": f"{HERE}:length"}, "scorers.rule.type", "type: function"),
        ({"type": f"{HERE}:Constant"}, "scorers.rule.kwargs", "cannot be constructed"),
        ({"type": "function", "function": f"{HERE}:lenght"}, "scorers.rule.function", "did you mean"),
    ],
)
def test_scorers_that_cannot_be_made_are_refused(entry: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"))
    assert caught.value.key == key


def request(number: int) -> ScoreRequest:
    return ScoreRequest((Message("user", "q"), Message("assistant", "a" * number)), {"number": number})


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("count", [1, 7, 9, 64, 1000])
def test_any_number_of_requests_resolves_whatever_the_batch_size(count: int, multiple: int) -> None:
    fake = FakeScorer()

    async def main() -> tuple[list[list[float | Failure]], float]:
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
    async def main() -> list[float | Failure]:
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
    async def main() -> list[float | Failure]:
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
    async def main() -> list[float | Failure]:
        return await CheckedScorer(FakeScorer(lambda _: score), timeout_s=60).score([request(1)])

    (result,) = asyncio.run(main())
    assert isinstance(result, Failure)
    assert "not a finite number" in result.cause
