import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.environment import EndpointScorerConfig
from nemo_rl.config.policy import EndpointLimitsConfig
from nemo_rl.distributed.endpoint import Endpoint, EndpointError, RateLimiter
from nemo_rl.errors import ConfigError
from tests.fakes.scoring_server import scoring_server


def section(*urls: str, **limits: Any) -> EndpointScorerConfig:
    bounds = EndpointLimitsConfig(retry_backoff_s=0.0, **limits)
    return EndpointScorerConfig(base_urls=list(urls), model="m", limits=bounds)


async def asked(section_of: EndpointScorerConfig, *, count: int = 1) -> list[Any]:
    """The answers, or the errors' texts."""
    endpoint = Endpoint("scorers.rm", section_of)
    try:
        answers = await asyncio.gather(
            *(endpoint.post("/score", {"i": i}, num_tokens=1) for i in range(count)), return_exceptions=True
        )
    finally:
        await endpoint.close()
    assert all(not isinstance(a, BaseException) or isinstance(a, EndpointError) for a in answers)
    return [str(answer) if isinstance(answer, EndpointError) else answer for answer in answers]


class Scripted:
    """Answers with the statuses in turn, then with what it was asked."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.num_requests = 0
        self._statuses = list(statuses)
        self._headers = headers

    async def __call__(self, path: str, body: dict[str, Any]) -> web.Response:
        self.num_requests += 1
        if self._statuses:
            return web.Response(status=self._statuses.pop(0), text="not now", headers=self._headers)
        return web.json_response({"path": path, **body})


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_what_may_pass_is_asked_again(status: int) -> None:
    async def main() -> None:
        server = Scripted(status, status)
        async with scoring_server(server) as url:
            assert await asked(section(url + "/v1")) == [{"path": "/score", "i": 0}]
        assert server.num_requests == 3

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_other_refusals_are_not(status: int) -> None:
    async def main() -> None:
        server = Scripted(status)
        async with scoring_server(server) as url:
            (error,) = await asked(section(url))
        assert server.num_requests == 1
        assert f"{url}/score: {status} not now" in error

    asyncio.run(main())


def test_attempts_are_bounded_and_the_last_cause_is_told() -> None:
    async def main() -> None:
        server = Scripted(*([503] * 10))
        async with scoring_server(server) as url:
            (error,) = await asked(section(url, max_retries=2))
        assert server.num_requests == 3
        assert "503 not now, after 3 attempts" in error

    asyncio.run(main())


def test_a_server_that_hangs_is_given_up_and_its_connection_closed() -> None:
    async def hang(path: str, body: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        async with scoring_server(hang) as url:
            (error,) = await asked(section(url, max_retries=0, request_timeout_s=0.2))
        assert "no answer in 0.2 s" in error

    asyncio.run(main())


def test_a_dead_replica_costs_no_request() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> list[Any]:
            async with scoring_server(Scripted()) as url:
                return await asked(section(dead, url), count=8)

        assert [answer["i"] for answer in asyncio.run(main())] == list(range(8))


def test_no_more_requests_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    async def count(path: str, body: dict[str, Any]) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return web.json_response({})

    async def main() -> None:
        async with scoring_server(count) as url:
            await asked(section(url, max_concurrency=3), count=20)

    asyncio.run(main())
    assert 1 <= most <= 3


def test_a_key_comes_from_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not set"):
        Endpoint("scorers.rm", EndpointScorerConfig(base_urls=["http://x"], model="m", api_key_env="NO_SUCH_KEY"))


def test_an_attempt_may_take_longer_than_aiohttps_own_five_minutes() -> None:
    async def main() -> None:
        endpoint = Endpoint("scorers.rm", section("http://127.0.0.1:1", request_timeout_s=900.0))
        assert endpoint._session().timeout.total is None
        await endpoint.close()

    asyncio.run(main())


class VirtualTime:
    """A clock that moves with the sleep that ends first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleeping.append((self.now + seconds, woken))
        await woken.wait()

    async def run(self, tasks: list["asyncio.Task[None]"]) -> None:
        while not all(task.done() for task in tasks):
            for _ in range(3):
                await asyncio.sleep(0)
            if self._sleeping:
                self._sleeping.sort(key=lambda one: one[0])
                self.now, woken = self._sleeping.pop(0)
                woken.set()


def times_of(rate: float | None, units: list[float]) -> list[float]:
    """When each of the callers that all come at once is let through."""

    async def main() -> list[float]:
        time, passed = VirtualTime(), []
        limit = RateLimiter(rate, clock=lambda: time.now, sleep=time.sleep)

        async def one(count: float) -> None:
            await limit.take(count)
            passed.append(time.now)

        await time.run([asyncio.create_task(one(count)) for count in units])
        return passed

    return asyncio.run(main())


def test_sixty_requests_a_minute_are_one_a_second() -> None:
    times = times_of(60, [1.0] * 180)
    assert times == pytest.approx([float(i) for i in range(180)])
    for start in range(120):  # in any minute
        assert sum(start <= t < start + 60 for t in times) <= 60 * 1.05


def test_a_request_of_many_tokens_keeps_the_next_for_as_long() -> None:
    assert times_of(600, [50, 20, 1]) == pytest.approx([0.0, 5.0, 7.0])


def test_without_a_rate_nobody_waits() -> None:
    assert times_of(None, [100.0] * 5) == [0.0] * 5
