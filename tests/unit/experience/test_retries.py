"""Deadlines, retries and typed failures around the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from nemo_rl.errors import GenerationError
from nemo_rl.experience.retries import RetryPolicy, generate_with_retries
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.types import (
    Completion,
    FailedRequest,
    Failure,
    FailureClass,
    GenerationRequest,
    SamplingParams,
)
from tests.fakes.generation import FakeGeneration


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingParams(max_new_tokens=4), seed=1, session_id=name)


def ask(generation, *names: str, max_retries: int = 2, timeout_s: float = 60.0) -> list[Completion | Failure]:
    async def main() -> list[Completion | Failure]:
        return await generate_with_retries(
            generation,
            [replace(request(name), timeout_s=timeout_s) for name in names],
            retries=RetryPolicy(max_retries, backoff_s=0.0),
            watchdog=StallWatchdog(60.0),
        )

    return asyncio.run(main())


class ScriptedEngine(FakeGeneration):
    """Runs one script a call; a script yields results, raises, or waits for ever."""

    def __init__(self, *scripts) -> None:
        super().__init__()
        self.scripts = list(scripts)
        self.asked: list[list[str]] = []
        self.num_closed = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        self.asked.append([r.request_id for r in requests])
        try:
            async for result in self.scripts.pop(0)(requests):
                yield result
        finally:
            self.num_closed += 1


async def answer_all(requests):
    for one in requests:
        yield Completion(one.request_id, (1,), (-1.0,), "stop")


async def answer_first_then_die(requests):
    yield Completion(requests[0].request_id, (1,), (-1.0,), "stop")
    raise GenerationError("engine core died\nwith a long trace")


async def refuse_all(requests):
    for one in requests:
        yield FailedRequest(one.request_id, "out of memory")


async def say_nothing(requests):
    return
    yield


async def wait_for_ever(requests):
    await asyncio.Event().wait()
    yield


def test_results_come_in_the_order_of_the_requests():
    async def last_first(requests):
        for one in reversed(requests):
            yield Completion(one.request_id, (1,), (-1.0,), "stop")

    results = ask(ScriptedEngine(last_first), "a", "b", "c")
    assert [r.request_id for r in results if isinstance(r, Completion)] == ["a", "b", "c"]


def test_only_what_failed_is_asked_again():
    engine = ScriptedEngine(answer_first_then_die, answer_all)
    assert all(isinstance(r, Completion) for r in ask(engine, "a", "b", "c"))
    assert engine.asked == [["a", "b", "c"], ["b", "c"]]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (refuse_all, "out of memory"),
        (say_nothing, "GenerationError: the engine gave no result"),
        (wait_for_ever, "no result in 0.01 s"),
    ],
)
def test_request_fails_as_infra_once_its_retries_are_used_up(script, cause):
    engine = ScriptedEngine(script, script, script)
    assert ask(engine, "a", timeout_s=0.01) == [Failure(FailureClass.INFRA, cause)]
    assert engine.asked == [["a"]] * 3
    assert engine.num_closed == 3


def test_error_of_an_engine_becomes_one_line_and_keeps_its_traceback():
    result = ask(ScriptedEngine(answer_first_then_die), "a", "b", max_retries=0)[1]
    assert isinstance(result, Failure)
    assert "with a long trace" in result.traceback
    assert result == Failure(FailureClass.INFRA, "GenerationError: engine core died")


def test_first_cause_is_kept_over_those_of_retries():
    engine = ScriptedEngine(refuse_all, say_nothing)
    assert ask(engine, "a", max_retries=1) == [Failure(FailureClass.INFRA, "out of memory")]


def test_waits_between_retries_double():
    waits: list[float] = []

    async def main(monkeypatch: pytest.MonkeyPatch) -> None:
        async def note(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", note)
        engine = ScriptedEngine(*[refuse_all] * 4)
        retries = RetryPolicy(max_retries=3, backoff_s=0.5)
        await generate_with_retries(engine, [request("a")], retries=retries, watchdog=StallWatchdog(60.0))

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(main(monkeypatch))
    assert waits == [0.5, 1.0, 2.0]
