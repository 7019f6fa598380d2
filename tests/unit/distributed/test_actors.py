"""Actors: results, errors with their traceback, streams, deadlines, death. One local Ray serves the whole session."""

import asyncio
import importlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_rl.distributed.actors import spawn_actor
from nemo_rl.distributed.cluster import connect
from nemo_rl.errors import WorkerDied, WorkerError

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def local_ray() -> None:
    connect(num_cpus=2)


class Counter:
    """Nothing in it knows of Ray."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("start is negative")
        self.value = start
        self.stream_closed = asyncio.Event()

    def add(self, amount: int, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    async def never(self) -> None:
        await asyncio.Event().wait()

    def fail(self) -> None:
        raise KeyError("lost")

    def die(self) -> None:
        os._exit(1)

    async def count(self, stop: int) -> AsyncIterator[int]:
        for i in range(stop):
            yield i
            await asyncio.sleep(0)

    async def count_then_fail(self) -> AsyncIterator[int]:
        yield 1
        raise KeyError("lost")

    async def one_then_wait(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.stream_closed.set()

    async def wait_for_closed_stream(self) -> bool:
        return await self.stream_closed.wait()


def test_methods_streams_and_errors_of_an_actor() -> None:
    async def main() -> None:
        counter = spawn_actor(Counter, start=3, max_concurrency=8)
        assert await counter.call("add", 2, times=2, timeout_s=DEADLINE_S) == 7
        assert [i async for i in counter.stream("count", 3)] == [0, 1, 2]
        with pytest.raises(WorkerError, match=r"(?s)Counter.fail raised KeyError: 'lost'.*in fail"):
            await counter.call("fail", timeout_s=DEADLINE_S)
        failing = counter.stream("count_then_fail")
        assert await anext(failing) == 1
        with pytest.raises(WorkerError, match="KeyError"):
            await anext(failing)
        with pytest.raises(WorkerError, match="AttributeError"):
            await counter.call("no_such_method", timeout_s=DEADLINE_S)
        with pytest.raises(WorkerError, match=r"did not answer in 0.2 s"):
            await counter.call("never", timeout_s=0.2)
        stream = counter.stream("one_then_wait")
        assert await anext(stream) == 1
        await stream.aclose()
        assert await counter.call("wait_for_closed_stream", timeout_s=DEADLINE_S)
        assert await counter.call("add", 1, timeout_s=DEADLINE_S) == 8
        counter.kill()

    asyncio.run(main())


def test_failed_constructor_and_dead_process_raise_worker_error() -> None:
    async def main() -> None:
        broken = spawn_actor(Counter, -1)
        with pytest.raises(WorkerError, match="ValueError: start is negative"):
            await broken.call("add", 1, timeout_s=DEADLINE_S)
        with pytest.raises(WorkerError, match="Counter has died"):
            await spawn_actor(Counter).call("die", timeout_s=DEADLINE_S)
        broken.kill()

    asyncio.run(main())


def test_module_that_the_actor_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own_game.py").write_text("class Game:\n    def step(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)  # of this process alone
    actor = spawn_actor(importlib.import_module("users_own_game").Game)
    with pytest.raises(WorkerDied, match=r"Game has died: .* cannot import code \(No module named 'users_own_game'\)"):
        asyncio.run(actor.call("step"))


def test_environment_variables_reach_the_actor() -> None:
    class Reader:
        def read(self, name: str) -> str | None:
            return os.environ.get(name)

    reader = spawn_actor(Reader, env_vars={"NEMO_RL_TEST": "set"})
    assert asyncio.run(reader.call("read", "NEMO_RL_TEST", timeout_s=DEADLINE_S)) == "set"
