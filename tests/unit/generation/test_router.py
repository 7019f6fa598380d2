"""Placement, deaths and refits of several engines, on fakes that die when told."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.generation.router import MAX_DEATHS, ReplicatedGeneration
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams
from nemo_rl.weight_manifests import WeightManifest, Weights
from nemo_rl.weight_sync.transports import engine_replicas
from tests.fakes.generation import FakeGeneration, sample

MANIFEST = WeightManifest("", ())
DEADLINE_S = 120.0


class Mortal(FakeGeneration):
    """Dies after `answers` results, or in the control call named `dies_in`; then every call raises."""

    def __init__(self, *, answers: int | None = None, dies_in: str | None = None, **fake: Any) -> None:
        super().__init__(**fake)
        self.answers_left = answers
        self.dies_in = dies_in
        self.dead = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        self._check()
        async for result in super().generate(requests):
            if self.answers_left == 0:
                self.dead = True
            self._check()
            if self.answers_left is not None:
                self.answers_left -= 1
            yield result

    def _check(self, name: str | None = None) -> None:
        self.dead = self.dead or (name is not None and name == self.dies_in)
        if self.dead:
            raise GenerationError("it died")

    async def pause(self, *, keep_cache: bool = False) -> None:
        self._check("pause")
        await super().pause(keep_cache=keep_cache)

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        self._check("update_weights")
        await super().update_weights(manifest, weight_version)


def asked(name: str, session: str | None = None, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), SamplingParams(max_new_tokens=4), seed, session or name)


def several(count: int) -> list[GenerationRequest]:
    return [asked(f"r{i}", seed=i) for i in range(count)]


async def answers(engine: Any, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    results = [result async for result in engine.generate(requests)]
    assert sorted(result.request_id for result in results) == sorted(request.request_id for request in requests)
    return {result.request_id: result for result in results}


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, DEADLINE_S))


def test_requests_are_spread_and_a_session_stays():
    async def main():
        first, second = FakeGeneration(), FakeGeneration()
        router = ReplicatedGeneration([first, second])
        await answers(router, [asked("a", "s"), asked("b", "t"), asked("c", "u"), asked("d", "v")])
        for turn in range(3):
            await answers(router, [asked(f"a{turn}", "s")])
        return first, second

    first, second = run(main())
    assert [r.request_id for r in first.requests] == ["a", "c", "a0", "a1", "a2"]
    assert [r.request_id for r in second.requests] == ["b", "d"]


def test_answers_are_those_of_one_engine_whatever_the_replica():
    requests = several(7)
    router = ReplicatedGeneration([FakeGeneration() for _ in range(3)])
    assert run(answers(router, requests)) == run(answers(FakeGeneration(), requests))


def test_what_a_dead_replica_did_not_answer_is_asked_again_with_the_same_seed(caplog):
    requests = several(10)

    async def main():
        dying, other = Mortal(answers=2), Mortal()
        router = ReplicatedGeneration([dying, other])
        results = await answers(router, requests)
        more = await answers(router, [asked("later", "r0")])  # of a session that was on the dead one
        await router.close()
        return results, more, other, dying, router

    with caplog.at_level(logging.WARNING):
        results, more, other, dying, _ = run(main())
    expected = {r.request_id: sample(r, 64) for r in requests}
    assert results == expected
    assert isinstance(more["later"], Completion)
    again = [r for r in other.requests if "#" in r.request_id]
    assert len(again) == 3
    assert {r.request_id for r in again} <= {f"r{i}#1" for i in (0, 2, 4, 6, 8)}
    assert all(r.request_id == f"r{r.seed}#1" for r in again)
    assert dying.calls == ["close"]
    assert [record.message for record in caplog.records] == [
        "removed engine replica 0; 1 of 2 still serving: GenerationError: it died"
    ]


def test_only_when_none_is_left_the_call_fails():
    async def main():
        router = ReplicatedGeneration([Mortal(answers=1), Mortal(answers=1)])
        with pytest.raises(GenerationError, match=r"no engine replica is left of 2; the last: it died"):
            await answers(router, several(8))
        with pytest.raises(GenerationError, match="no engine replica is left"):
            await answers(router, several(1))
        with pytest.raises(GenerationError, match="no engine replica is left"):
            await router.pause()

    run(main())


def test_a_request_that_kills_every_engine_fails_alone():
    class Fragile(FakeGeneration):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            if any(request.seed == 13 for request in requests):
                raise GenerationError("it died")
            async for result in super().generate(requests):
                yield result

    async def main():
        router = ReplicatedGeneration([Fragile() for _ in range(MAX_DEATHS + 1)])
        poison = await answers(router, [asked("poison", seed=13)])
        assert len(router.replicas) == 1
        return poison, await answers(router, several(3))

    poison, others = run(main())
    assert "3 engine replicas died while they had it" in poison["poison"].cause
    assert all(isinstance(other, Completion) for other in others.values())


def test_a_refused_request_is_no_death_and_its_session_is_placed_anew():
    async def main():
        router = ReplicatedGeneration([FakeGeneration(failing_share=1.0), FakeGeneration()])
        first = await answers(router, [asked("a", "s")])
        again = await answers(router, [asked("b", "s"), asked("c", "s2")])
        return router, first, again

    router, first, again = run(main())
    assert isinstance(first["a"], FailedRequest)
    assert len(router.replicas) == 2
    assert sum(isinstance(result, Completion) for result in again.values()) == 1


def test_a_prompt_that_no_engine_takes_leaves_its_session_where_it_is():
    class Short(FakeGeneration):
        async def generate(self, requests):
            self.requests += requests
            for each in requests:
                yield FailedRequest(each.request_id, "too long", is_too_long=True)

    async def main():
        engines = [Short(), Short()]
        router = ReplicatedGeneration(engines)
        for name in "abcd":
            await answers(router, [asked(name, "s")])
        return sorted(len(engine.requests) for engine in engines)

    assert run(main()) == [0, 4]


def test_other_errors_reach_the_caller():
    class Broken(FakeGeneration):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            raise KeyError("a bug")
            yield  # pragma: no cover

    async def main():
        with pytest.raises(KeyError):
            await answers(ReplicatedGeneration([Broken()]), several(1))

    run(main())


def test_closing_the_iterator_cancels_what_is_left():
    async def main():
        cancelled: list[str] = []
        all_cancelled = asyncio.Event()

        async def latency(request: GenerationRequest) -> None:
            try:
                if request.request_id != "r0":
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(request.request_id)
                if len(cancelled) == 3:
                    all_cancelled.set()
                raise

        router = ReplicatedGeneration([FakeGeneration(latency=latency), FakeGeneration(latency=latency)])
        stream = router.generate(several(4))
        first = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await all_cancelled.wait()
        return first, cancelled, router._load_balancer.load

    first, cancelled, running = run(main())
    assert first.request_id == "r0"
    assert sorted(cancelled) == ["r1", "r2", "r3"]
    assert running == {0: 0, 1: 0}


def test_a_refit_pauses_all_updates_all_and_resumes_all():
    async def main():
        calls: list[str] = []
        engines = [FakeGeneration(), FakeGeneration()]
        for engine in engines:
            engine.calls = calls
        router = ReplicatedGeneration(engines)
        await router.pause(keep_cache=True)
        await router.update_weights(MANIFEST, 3)
        await router.resume()
        await router.sleep()
        await router.wake()
        await router.close()
        await router.close()
        return calls

    names = ["pause keep_cache", "update_weights 3", "resume", "sleep", "wake", "close"]
    assert run(main()) == [name for name in names for _ in range(2)]


def test_a_replica_that_dies_in_a_refit_is_taken_out_and_its_requests_are_answered_under_the_new_weights():
    async def main():
        started = asyncio.Event()
        hold = asyncio.Event()

        async def latency(request: GenerationRequest) -> None:
            started.set()
            await hold.wait()

        dying, other = Mortal(dies_in="update_weights", latency=latency), Mortal()
        router = ReplicatedGeneration([dying, other])
        running = asyncio.create_task(answers(router, [asked("a"), asked("b")]))
        await started.wait()
        await router.pause()
        await router.update_weights(MANIFEST, 1)
        await router.resume()
        hold.set()
        dying._running.set()
        return await running, router.replicas == (other,), engine_replicas(router)

    results, is_out, replicas = run(main())
    assert is_out
    assert len(replicas) == 1
    assert results["a"].weight_versions == (1, 1)


def test_weights_that_an_engine_refuses_are_no_death():
    class Refusing(FakeGeneration):
        async def update_weights(self, manifest: Weights, weight_version: int) -> None:
            raise WeightSyncError("another shape")

    async def main():
        router = ReplicatedGeneration([Refusing(), FakeGeneration()])
        with pytest.raises(WeightSyncError, match="another shape"):
            await router.update_weights(MANIFEST, 1)
        return len(router.replicas)

    assert run(main()) == 2


def test_a_replica_that_does_not_answer_in_time_is_taken_out():
    class Stuck(FakeGeneration):
        async def pause(self, *, keep_cache: bool = False) -> None:
            await asyncio.Event().wait()

    async def main():
        stuck, other = Stuck(), FakeGeneration()
        router = ReplicatedGeneration([stuck, other], control_s=0.01)
        await router.pause()
        return router.replicas == (other,)

    assert run(main())


def test_a_replica_that_dies_before_it_is_asked_costs_nothing():
    """One call's requests find it dead in the very moment in which another call has chosen it."""

    async def main():
        dying, other = Mortal(answers=0), Mortal()
        router = ReplicatedGeneration([dying, other])
        chosen = [asyncio.create_task(answers(router, [asked(f"r{i}")])) for i in range(2)]
        await asyncio.sleep(0)  # both have been handed out, neither was begun
        router._remove_replica(0, dying, GenerationError("it died"))
        return [answer for task in chosen for answer in (await task).values()], router.replicas == (other,)

    results, is_out = run(main())
    assert is_out
    assert all(isinstance(result, Completion) for result in results)


def test_a_late_error_of_an_old_engine_does_not_take_its_successor_out():
    async def main():
        old, fresh = FakeGeneration(), FakeGeneration()

        async def restart(index: int) -> FakeGeneration:
            return fresh

        router = ReplicatedGeneration([old, FakeGeneration()], restart=restart)
        router._remove_replica(0, old, GenerationError("it died"))
        await asyncio.gather(*router._background)
        await router.pause()
        router._remove_replica(0, old, GenerationError("its last request"))
        return fresh in router.replicas

    assert run(main())


def test_requests_of_closed_engines_fail():
    async def main():
        router = ReplicatedGeneration([FakeGeneration(), FakeGeneration()])
        await router.close()
        with pytest.raises(GenerationError, match="closed"):
            await answers(router, [asked("a")])

    run(main())


def test_a_restarted_replica_serves_only_after_it_has_the_weights():
    async def main():
        fresh = FakeGeneration()

        async def restart(index: int) -> FakeGeneration:
            assert index == 0
            return fresh

        router = ReplicatedGeneration([Mortal(answers=0), FakeGeneration()], restart=restart)
        await answers(router, several(4))
        await asyncio.gather(*router._background)
        await answers(router, [asked(f"old{i}") for i in range(4)])
        assert fresh.requests == []
        await router.pause()
        await router.update_weights(MANIFEST, 2)
        await router.resume()
        results = await answers(router, [asked(f"new{i}") for i in range(4)])
        await router.close()
        return fresh, results

    fresh, results = run(main())
    assert fresh.calls == ["pause", "update_weights 2", "resume", "close"]
    assert len(fresh.requests) >= 2
    assert all(result.weight_versions == (2, 2) for result in results.values())


def test_a_replica_that_cannot_be_restarted_is_said(caplog):
    async def main():
        async def restart(index: int) -> FakeGeneration:
            raise GenerationError("no memory")

        router = ReplicatedGeneration([Mortal(answers=0), FakeGeneration()], restart=restart)
        await answers(router, several(2))
        await asyncio.gather(*router._background)
        return len(router.replicas), router.state

    with caplog.at_level(logging.WARNING):
        left, state = run_in_virtual_time(main())
    assert left == 1
    assert (state.wanted, state.failed, state.problem) == (2, ("engine 0",), "GenerationError: no memory")
    assert caplog.messages[1:] == [
        "cannot restart engine replica 0, next attempt in 10 s: GenerationError: no memory",
        "cannot restart engine replica 0, next attempt in 60 s: GenerationError: no memory",
        "cannot restart engine replica 0, given up: GenerationError: no memory",
    ]


def test_a_start_that_fails_is_tried_again_and_a_resize_tries_anew():
    async def main():
        outcomes = iter([GenerationError("a"), FakeGeneration(), *[GenerationError("b")] * 3, FakeGeneration()])

        async def start(index: int) -> FakeGeneration:
            if isinstance(outcome := next(outcomes), GenerationError):
                raise outcome
            return outcome

        router = ReplicatedGeneration([FakeGeneration()], restart=start)
        states = []
        for count in (2, 3, 3):
            router.resize(count)
            await asyncio.gather(*router._background)
            states.append((router.state.waiting, router.state.failed))
        await router.close()
        return states

    assert run_in_virtual_time(main()) == [
        (("engine 1",), ()),
        (("engine 1",), ("engine 2",)),
        (("engine 1", "engine 2"), ()),
    ]


@settings(max_examples=60, deadline=None)
@given(
    lives=st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=1, max_size=4),
    calls=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=5),
    delays=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_each_request_is_answered_exactly_once_while_an_engine_lives(lives, calls, delays):
    async def latency(request: GenerationRequest) -> None:
        for _ in range(delays[request.seed % len(delays)]):
            await asyncio.sleep(0)

    async def main():
        engines = [Mortal(answers=life, latency=latency) for life in lives]
        router = ReplicatedGeneration([*engines, Mortal(latency=latency)])
        requests = [
            [asked(f"c{c}r{r}", f"s{session}", seed=7 * c + r) for r, session in enumerate(call)]
            for c, call in enumerate(calls)
        ]
        results = await asyncio.gather(*(answers(router, call) for call in requests))
        await router.close()
        return requests, results

    requests, results = run(main())
    for call, answered in zip(requests, results, strict=True):
        for request in call:
            result = answered[request.request_id]
            if isinstance(result, FailedRequest):
                assert len(lives) >= MAX_DEATHS
            else:
                assert result.token_ids == sample(request, 64).token_ids


def test_an_engine_is_needed():
    with pytest.raises(ValueError, match="no engine"):
        ReplicatedGeneration([])


class Slow(FakeGeneration):
    """Answers when told."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        await self.go.wait()
        async for result in super().generate(requests):
            yield result


async def refit(router: ReplicatedGeneration, weight_version: int) -> None:
    await router.pause()
    await router.update_weights(MANIFEST, weight_version)
    await router.resume()


async def started(router: ReplicatedGeneration) -> None:
    while router.state.starting:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)


def test_replicas_join_and_leave_without_a_lost_request():
    async def main():
        slow = [Slow(), Slow()]
        engines: dict[int, FakeGeneration] = dict(enumerate(slow))

        async def start(index: int) -> FakeGeneration:
            engines[index] = FakeGeneration()
            return engines[index]

        router = ReplicatedGeneration(slow, restart=start)
        running = asyncio.create_task(answers(router, several(6)))
        await asyncio.sleep(0)
        router.resize(4)
        assert router.state.starting == ("engine 2", "engine 3")
        await started(router)
        assert router.state.waiting == ("engine 2", "engine 3")
        assert router.state.serving == ("engine 0", "engine 1")
        await refit(router, 1)
        assert len(router.state.serving) == 4
        assert [engines[index].weight_version for index in range(4)] == [1, 1, 1, 1]
        router.resize(1)
        assert router.state.serving == ("engine 0",)
        assert router.state.leaving == ("engine 1", "engine 2", "engine 3")
        await refit(router, 2)  # the idle ones end
        assert router.state.leaving == ("engine 1",)
        assert engines[2].calls[-1] == engines[3].calls[-1] == "close"
        for engine in slow:
            engine.go.set()
        results = await running
        await refit(router, 3)
        assert router.state.leaving == ()
        later = await answers(router, [asked("later", "r1")])  # of a session that was on one that has left
        await router.close()
        return results, later, slow

    results, later, slow = run(main())
    expected = {request.request_id: sample(request, 64).token_ids for request in several(6)}
    assert {name: result.token_ids for name, result in results.items()} == expected
    assert isinstance(later["later"], Completion)
    assert slow[0].requests[-1].request_id == "later"
    assert len(slow[1].requests) == 3
    assert slow[1].calls[-1] == "close"


def test_a_replica_that_leaves_may_stay_and_one_that_starts_may_be_called_off():
    async def main():
        begun: list[int] = []

        async def start(index: int) -> FakeGeneration:
            begun.append(index)
            await asyncio.Event().wait()
            raise AssertionError

        first, second = FakeGeneration(), FakeGeneration()
        router = ReplicatedGeneration([first, second], restart=start)
        router.resize(1)
        router.resize(2)
        assert router.state.serving == ("engine 0", "engine 1")
        router.resize(3)
        await asyncio.sleep(0)
        router.resize(2)
        await asyncio.sleep(0)
        assert router.state.starting == ()
        await answers(router, several(4))
        await router.close()
        return begun, first, second

    begun, first, second = run(main())
    assert begun == [2]
    assert len(first.requests) == len(second.requests) == 2


def test_a_replica_that_dies_while_it_leaves_is_not_started_again():
    async def main():
        async def start(index: int) -> FakeGeneration:
            raise AssertionError(f"replica {index} was started")

        router = ReplicatedGeneration([FakeGeneration(), Mortal(dies_in="pause")], restart=start)
        router._load_balancer.acquire()
        router._load_balancer.acquire()  # both still answer
        router.resize(1)
        await refit(router, 1)
        assert router.state.leaving == router.state.starting == ()
        await router.close()

    run(main())


@pytest.mark.parametrize(
    ("count", "limit", "said"), [(0, 8, "must be from 1 to 8"), (9, 8, "must be from 1 to 8"), (-1, 2, "from 1 to 2")]
)
def test_a_number_of_replicas_that_cannot_be_had_changes_nothing(count: int, limit: int, said: str):
    async def start(index: int) -> FakeGeneration:
        raise AssertionError

    router = ReplicatedGeneration([FakeGeneration(), FakeGeneration()], restart=start, max_replicas=limit)
    with pytest.raises(ValueError, match=said):
        router.resize(count)
    assert router.state.wanted == 2
    with pytest.raises(ValueError, match="none can be started"):
        ReplicatedGeneration([FakeGeneration()]).resize(2)


@given(counts=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_requests_are_answered_by_engines_with_new_weights_whatever_the_resizing(
    counts: list[tuple[int, bool]], seed: int
) -> None:
    async def main():
        async def start(index: int) -> FakeGeneration:
            return FakeGeneration()

        router = ReplicatedGeneration([FakeGeneration(), FakeGeneration()], restart=start)
        for version, (count, refits) in enumerate(counts, start=1):
            running = asyncio.create_task(answers(router, several(7)))
            await asyncio.sleep(0)
            router.resize(count)
            if seed % 2:
                await started(router)
            if refits:
                await refit(router, version)
            assert len(await running) == 7
            assert router.state.wanted == count
        await started(router)
        await refit(router, 100)
        await refit(router, 101)
        state = router.state
        assert len(state.serving) == counts[-1][0]
        assert state.leaving == state.waiting == state.starting == ()
        await router.close()

    run(main())


def test_a_replica_that_stays_after_all_keeps_the_count_of_its_requests():
    async def main():
        slow = [Slow(), Slow()]

        async def start(index: int) -> FakeGeneration:
            raise AssertionError

        router = ReplicatedGeneration(slow, restart=start)
        running = asyncio.create_task(answers(router, several(6)))
        await asyncio.sleep(0)
        router.resize(1)
        router.resize(2)
        later = asyncio.create_task(answers(router, [asked(f"later{i}") for i in range(4)]))
        await asyncio.sleep(0)
        for engine in slow:
            engine.go.set()
        await asyncio.gather(running, later)
        await router.close()
        return [len(engine.requests) for engine in slow]

    assert run(main()) == [5, 5]


def test_a_replica_that_was_to_leave_serves_when_no_other_is_left():
    async def main():
        async def start(index: int) -> FakeGeneration:
            await asyncio.Event().wait()
            raise AssertionError

        dying, leaving = Mortal(answers=1), FakeGeneration()
        router = ReplicatedGeneration([dying, leaving], restart=start)
        router.resize(1)
        results = await answers(router, several(4))
        await refit(router, 1)
        assert router.state.serving == ("engine 1",)
        await router.close()
        return results

    assert len(run(main())) == 4


def test_a_replica_starts_after_the_one_before_it_has_ended():
    events: list[str] = []

    class Closing(FakeGeneration):
        async def close(self) -> None:
            await asyncio.sleep(0)
            events.append("closed")

    async def main():
        async def start(index: int) -> FakeGeneration:
            events.append(f"start {index}")
            return FakeGeneration()

        router = ReplicatedGeneration([FakeGeneration(), Closing()], restart=start)
        router.resize(1)
        await refit(router, 1)
        router.resize(2)
        await started(router)
        await router.close()

    run(main())
    assert events == ["closed", "start 1"]
