"""Many agents at once over HTTP: nothing that goes wrong with one call shows in any chain, and nothing is kept."""

import asyncio
import gc
import logging
import random
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.gateway.manager import FinishedSession, GatewayManager, SessionHandle
from nemo_rl.types import GenerationRequest
from tests.fakes.generation import FakeGeneration, draws_of
from tests.unit.gateway.engines import DEADLINE_S, codec_of, rules, tokenizer_of

NUM_AGENTS = 64
NUM_SERVERS = 2


class UnsteadyGeneration(FakeGeneration):
    """Takes its time with each request, and raises at the first attempt of a share of them."""

    def __init__(self, *, failing_share: float, delays: random.Random | None) -> None:
        super().__init__(vocab_size=len(tokenizer_of("chatml")), latency=self._before)
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.num_failed = 0
        self._share = failing_share
        self._delays = delays

    async def _before(self, request: GenerationRequest) -> None:
        identity = (request.seed, len(request.token_ids))
        self.attempts[identity] += 1
        if self._delays is not None:
            await asyncio.sleep(0.02 * self._delays.random())
        if draws_of(request).random() < self._share and self.attempts[identity] == 1:
            self.num_failed += 1
            raise ConnectionError("a tenth of the calls fail at first")


async def converse(manager: GatewayManager, client: AsyncOpenAI, index: int) -> FinishedSession:
    """Three turns of one agent; the client asks again by itself when a call fails."""
    handle = manager.open_session(seed=index)
    own = client.with_options(base_url=handle.base_url)
    messages: list[Any] = [{"role": "user", "content": f"agent {index}"}]
    for turn in range(3):
        done = await own.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": done.choices[0].message.content})
        messages.append({"role": "user", "content": f"turn {turn} of {index}"})
    return await manager.finish(handle)


def run_agents(generation: UnsteadyGeneration) -> list[FinishedSession]:
    """What the sessions of all agents, at once, hold."""

    async def main() -> list[FinishedSession]:
        section = GatewayConfig(num_servers=NUM_SERVERS)
        manager = await GatewayManager.start(generation, codec_of("chatml"), rules(max_new_tokens=12), section)
        try:
            async with AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=8) as client:
                agents = [converse(manager, client, index) for index in range(NUM_AGENTS)]
                finished = await asyncio.wait_for(asyncio.gather(*agents), DEADLINE_S)
            assert manager.num_sessions == (0,) * NUM_SERVERS
        finally:
            await manager.close()
        return finished

    return asyncio.run(main())


def test_64_sessions_with_delays_failures_and_retries_equal_a_clean_run_over_http(caplog):
    clean = run_agents(UnsteadyGeneration(failing_share=0.0, delays=None))
    caplog.set_level(logging.CRITICAL, logger="nemo_rl.gateway")
    unsteady = UnsteadyGeneration(failing_share=0.1, delays=random.Random(1))
    disturbed = run_agents(unsteady)
    assert unsteady.num_failed > 5
    assert max(unsteady.attempts.values()) == 2
    assert disturbed == clean
    for index, finished in enumerate(clean):
        (chain,) = finished.chains
        asked = [each.message.content for each in chain.message_log if each.message.role == "user"]
        assert asked == [f"agent {index}", f"turn 0 of {index}", f"turn 1 of {index}"]
        assert sum(each.is_generated for each in chain.message_log) == 3


async def short_session(manager: GatewayManager, client: ClientSession, index: int) -> None:
    """One turn, or two; every fifth session is abandoned, every seventh is used by a client that does not wait."""
    handle: SessionHandle = manager.open_session(seed=index)
    url = f"{handle.base_url}/chat/completions"
    messages: list[Any] = [{"role": "user", "content": f"agent {index}"}]
    for _ in range(1 + (index % 4 == 0)):
        if index % 7 == 0:
            task = asyncio.create_task(client.post(url, json={"messages": messages}).__aenter__())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            continue
        async with client.post(url, json={"messages": messages}) as response:
            said = (await response.json())["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "more"}]
    if index % 5 == 0:
        await manager.abandon(handle)
    else:
        finished = await manager.finish(handle)
        assert len(finished.chains) == 1 or index % 7 == 0


@pytest.mark.parametrize("num_sessions", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_sessions(num_sessions):
    """Kept is the id of a session that was closed, so that it is told apart from one that never was."""
    warm_up = 300

    async def run_batch(manager: GatewayManager, client: ClientSession, first: int, last: int) -> None:
        numbers = iter(range(first, last))

        async def agent() -> None:
            for index in numbers:
                await short_session(manager, client, index)

        await asyncio.gather(*(agent() for _ in range(16)))

    async def main() -> tuple[int, int]:
        generation = FakeGeneration(vocab_size=200)
        manager = await GatewayManager.start(
            generation, codec_of("chatml"), rules(max_new_tokens=8), GatewayConfig(num_servers=NUM_SERVERS)
        )
        held = []
        try:
            async with ClientSession() as client:
                for first, last in ((0, warm_up), (warm_up, num_sessions)):
                    await run_batch(manager, client, first, last)
                    generation.requests.clear()
                    generation._attempts.clear()
                    gc.collect()
                    held.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
            assert sum(manager.num_sessions) == 0
        finally:
            await manager.close()
        return held[1][0] - held[0][0], held[1][1] - held[0][1]

    tracemalloc.start()
    try:
        more_objects, more_bytes = asyncio.run(main())
    finally:
        tracemalloc.stop()
    assert more_objects < (num_sessions - warm_up) / 4
    assert more_bytes < 1024 * (num_sessions - warm_up)  # an id takes a quarter of that, a session four times that
