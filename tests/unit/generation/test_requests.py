import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from nemo_rl.generation.requests import answer_by_deadline, as_completed, generate_by_deadline
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams
from tests.fakes.generation import FakeGeneration


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1,), SamplingParams(max_new_tokens=1), seed=0, session_id=name)


class Engine:
    """Answers a request when it is let go."""

    def __init__(self, *names: str) -> None:
        self.gates = {name: asyncio.Event() for name in names}
        self.ended: list[str] = []

    async def answer(self, asked: GenerationRequest) -> Completion | FailedRequest:
        try:
            await self.gates[asked.request_id].wait()
        finally:
            self.ended.append(asked.request_id)
        if asked.request_id == "broken":
            raise ZeroDivisionError
        return FailedRequest(asked.request_id, "a test")


def test_answers_come_as_they_finish_and_closing_ends_the_rest() -> None:
    async def main() -> tuple[list[str], list[str]]:
        engine, seen = Engine("a", "b", "c"), []
        engine.gates["c"].set()
        async with aclosing(as_completed([request(name) for name in "abc"], engine.answer)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                seen.append(answer.request_id)
                if len(seen) == 2:
                    break
                engine.gates["b"].set()
        return seen, engine.ended

    assert asyncio.run(main()) == (["c", "b"], ["c", "b", "a"])


@pytest.mark.parametrize("names", [("broken",), ("broken", "other")])
def test_what_an_answer_raises_is_raised_and_ends_the_rest(names: tuple[str, ...]) -> None:
    async def main() -> list[str]:
        engine = Engine(*names)
        engine.gates["broken"].set()
        answers = as_completed([request(name) for name in names], engine.answer)
        with pytest.raises(ZeroDivisionError):
            await anext(answers)
        return engine.ended

    assert asyncio.run(main()) == list(names)


async def results_of(generation, requests: Sequence[GenerationRequest]) -> list[tuple[str, str]]:
    """Return each result's id with its cause, empty for a completion."""
    results = generate_by_deadline(generation, requests)
    return [(r.request_id, r.cause if isinstance(r, FailedRequest) else "") async for r in results]


async def result_of_one(generation, requests: Sequence[GenerationRequest]) -> list[tuple[str, str]]:
    """Return what `results_of` does, of one request."""
    (one,) = requests
    result = await answer_by_deadline(generation, one)
    if result is None:
        return []
    return [(result.request_id, result.cause if isinstance(result, FailedRequest) else "")]


each_way = pytest.mark.parametrize("ask", [results_of, result_of_one])


@each_way
@pytest.mark.parametrize(("timeout_s", "cause"), [(120.0, ""), (119.0, "no result in 119 s")])
def test_late_request_fails_by_its_own_deadline_and_is_cancelled(ask, timeout_s: float, cause: str) -> None:
    cancelled: list[str] = []

    async def take_two_minutes(asked: GenerationRequest) -> None:
        try:
            await asyncio.sleep(119.5)
        except asyncio.CancelledError:
            cancelled.append(asked.request_id)
            raise

    engine = FakeGeneration(latency=take_two_minutes)
    assert run_in_virtual_time(ask(engine, [replace(request("a"), timeout_s=timeout_s)])) == [("a", cause)]
    assert cancelled == (["a"] if cause else [])


def test_time_of_requests_computed_in_turn_starts_anew_with_each_result() -> None:
    class InTurn(FakeGeneration):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            for one in requests:
                await asyncio.sleep(1000.0 if one.request_id == "slow" else 50.0)
                yield Completion(one.request_id, (1,), (-1.0,), "stop")

    requests = [replace(request(name), timeout_s=60.0) for name in ("a", "b", "slow", "d")]
    late = "no result in 60 s"
    assert run_in_virtual_time(results_of(InTurn(), requests)) == [("a", ""), ("b", ""), ("slow", late), ("d", late)]


@each_way
def test_cancelled_caller_cancels_its_request(ask) -> None:
    async def main() -> list[str]:
        started, ended = asyncio.Event(), asyncio.Event()
        cancelled: list[str] = []

        async def hang(asked: GenerationRequest) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(asked.request_id)
                raise
            finally:
                ended.set()

        waiting = asyncio.create_task(ask(FakeGeneration(latency=hang), [request("a")]))
        await started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await ended.wait()
        return cancelled

    assert run_in_virtual_time(main()) == ["a"]


@each_way
def test_engine_that_yields_nothing_gives_no_result(ask) -> None:
    class Silent(FakeGeneration):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            for one in ():
                yield one

    assert run_in_virtual_time(ask(Silent(), [request("a")])) == []


@each_way
def test_timeout_that_an_engine_raises_is_no_deadline_of_ours(ask) -> None:
    async def time_out(asked: GenerationRequest) -> None:
        raise TimeoutError("a socket")

    with pytest.raises(TimeoutError, match="a socket"):
        asyncio.run(ask(FakeGeneration(latency=time_out), [request("a")]))
