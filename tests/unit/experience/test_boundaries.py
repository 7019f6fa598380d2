"""Deadlines, retries and typed failures around the engine and the environments."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from nemo_rl.errors import GenerationError
from nemo_rl.experience.boundaries import RetryPolicy, StallWatchdog, generate, step_environment
from nemo_rl.experience.turns import EnvironmentCall
from nemo_rl.types import (
    Completion,
    EnvStep,
    FailedRequest,
    Failure,
    FailureClass,
    GenerationRequest,
    Message,
    SamplingParams,
)
from tests.fakes.environments import FakeEnvironment, hang
from tests.fakes.generation import FakeGeneration

CALLS = [EnvironmentCall((Message("assistant", text),), {}) for text in ("a", "bb", "ccc")]


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingParams(max_new_tokens=4), seed=1, session_id=name)


def ask(generation, *names: str, max_retries: int = 2, timeout_s: float = 60.0) -> list[Completion | Failure]:
    async def main() -> list[Completion | Failure]:
        return await generate(
            generation,
            [replace(request(name), timeout_s=timeout_s) for name in names],
            retries=RetryPolicy(max_retries, backoff_s=0.0),
            watchdog=StallWatchdog(60.0),
        )

    return asyncio.run(main())


def score(environment, *, timeout_s: float = 60.0) -> list[EnvStep | Failure]:
    async def main() -> list[EnvStep | Failure]:
        return await step_environment(environment, "game", CALLS, timeout_s=timeout_s, watchdog=StallWatchdog(60.0))

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


def test_error_of_an_engine_becomes_one_line():
    result = ask(ScriptedEngine(answer_first_then_die), "a", "b", max_retries=0)[1]
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
        await generate(engine, [request("a")], retries=retries, watchdog=StallWatchdog(60.0))

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(main(monkeypatch))
    assert waits == [0.5, 1.0, 2.0]


def test_failed_item_of_an_environment_fails_alone():
    failure = Failure(FailureClass.ENVIRONMENT, "no such file")
    environment = FakeEnvironment(lambda c, s: failure if c[-1].content == "bb" else EnvStep())
    assert score(environment) == [EnvStep(), failure, EnvStep()]


def test_error_of_a_call_fails_all_of_its_items():
    async def refuse(conversations) -> None:
        raise KeyError("answer")

    assert score(FakeEnvironment(before=refuse)) == [Failure(FailureClass.ENVIRONMENT, "game: KeyError: 'answer'")] * 3


def test_environment_that_hangs_trips_its_deadline():
    cause = Failure(FailureClass.ENVIRONMENT, "game: no answer in 0.01 s")
    assert score(FakeEnvironment(before=hang), timeout_s=0.01) == [cause] * 3


def test_timeout_inside_an_environment_is_no_deadline_of_ours():
    async def time_out(conversations) -> None:
        raise TimeoutError("the judge is busy")

    assert score(FakeEnvironment(before=time_out))[0] == Failure(
        FailureClass.ENVIRONMENT, "game: TimeoutError: the judge is busy"
    )


def test_wrong_number_of_results_fails_all_items():
    class Short(FakeEnvironment):
        async def step(self, conversations, states):
            return [EnvStep()]

    cause = "game: EnvironmentContractError: 1 results for 3 conversations"
    assert score(Short()) == [Failure(FailureClass.ENVIRONMENT, cause)] * 3


def test_no_results_at_all_fail_all_items():
    class Silent(FakeEnvironment):
        async def step(self, conversations, states):
            return None

    assert all(isinstance(result, Failure) for result in score(Silent()))


def test_cancellation_inside_an_environment_fails_its_items_alone():
    async def cancel(conversations) -> None:
        raise asyncio.CancelledError("a worker was closed")

    cause = "game: CancelledError: a worker was closed"
    assert score(FakeEnvironment(before=cancel)) == [Failure(FailureClass.ENVIRONMENT, cause)] * 3
