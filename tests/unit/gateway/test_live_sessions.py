import asyncio

import pytest

from nemo_rl.gateway.live_sessions import SessionRegistry
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import Message
from tests.unit.gateway.engines import DEADLINE_S, codec_of
from tests.unit.gateway.test_echoes import Clock


def registry_of(clock: Clock | None = None, *, max_sessions: int = 3, max_client_sessions: int = 2) -> SessionRegistry:
    limits = {"max_sessions": max_sessions, "max_client_sessions": max_client_sessions}
    return SessionRegistry(codec_of("chatml"), **limits, ttl_s=60.0, clock=clock or Clock())


def status_of(registry: SessionRegistry, session_id: str) -> int:
    with pytest.raises(RequestError) as error:
        registry.get(session_id)
    return error.value.status


def test_unknown_sessions_are_404_and_closed_ones_409():
    registry = registry_of()
    live = registry.open(seed=1)
    assert registry.get(live.session_id) is live
    registry.close(live.session_id)
    assert status_of(registry, live.session_id) == 409
    assert status_of(registry, "never was") == 404


def test_ids_cannot_be_guessed():
    registry = registry_of(max_sessions=100)
    ids = {registry.open(seed=1).session_id for _ in range(100)}
    assert len(ids) == 100
    assert min(map(len, ids)) >= 32


def test_too_many_sessions_are_429_until_one_is_closed():
    registry = registry_of(max_sessions=2)
    first, _ = registry.open(seed=1), registry.open(seed=2)
    with pytest.raises(RequestError) as error:
        registry.open(seed=3)
    assert error.value.status == 429
    registry.close(first.session_id)
    assert registry.open(seed=3)


def test_sessions_of_clients_and_of_the_run_have_limits_of_their_own():
    registry = registry_of(max_sessions=2, max_client_sessions=1)
    client = registry.open(seed=1, by_client=True)
    for _ in range(2):
        with pytest.raises(RequestError, match="1 sessions of clients are open"):
            registry.open(seed=1, by_client=True)
    for seed in (1, 2):
        registry.open(seed=seed)
    registry.close(client.session_id)
    assert registry.open(seed=1, by_client=True)
    with pytest.raises(RequestError, match="2 sessions are open"):
        registry.open(seed=3)


class CountingClock(Clock):
    """Counts how often it is read: once per opening and once per session that is looked at."""

    num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return super().__call__()


def test_opening_a_session_looks_at_none_of_those_that_are_open():
    clock = CountingClock()
    registry = registry_of(clock, max_sessions=100_000)
    for seed in range(100_000):
        registry.open(seed=seed)
    assert len(registry) == 100_000
    assert clock.num_reads == 2 * 100_000
    with pytest.raises(RequestError):
        registry.open(seed=0)


def test_sessions_expire_when_unused_but_not_while_something_runs():
    async def main() -> None:
        clock = Clock()
        registry = registry_of(clock)
        idle, used, busy = (registry.open(seed=i) for i in range(3))
        task: asyncio.Task[object] = asyncio.create_task(asyncio.sleep(DEADLINE_S))
        busy.running.add(task)
        clock.now = 50.0
        registry.get(used.session_id)
        clock.now = 70.0
        assert registry.expire() == [idle.session_id]
        assert status_of(registry, idle.session_id) == 409
        registry.close(busy.session_id)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_memory_of_closed_sessions_is_bounded():
    registry = registry_of()
    ids = []
    for _ in range(10_001):
        ids.append(registry.open(seed=1).session_id)
        registry.close(ids[-1])
    assert len(registry) == 0
    assert status_of(registry, ids[0]) == 404
    assert status_of(registry, ids[1]) == 409


def test_places_tell_equal_calls_apart_and_failed_ones_give_theirs_back():
    live = registry_of().open(seed=1)
    call = live.session.begin((Message("user", "hi"),))
    other = live.session.begin((Message("user", "ho"),))
    assert [live.acquire_sample_index(call), live.acquire_sample_index(call), live.acquire_sample_index(other)] == [
        0,
        1,
        0,
    ]
    live.release_sample_index(call, 0)
    assert [live.acquire_sample_index(call), live.acquire_sample_index(call)] == [0, 2]
