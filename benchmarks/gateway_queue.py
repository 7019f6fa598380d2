"""Waits of many sessions on one engine: calls that queue in the gateway, against calls that are told to come back.

uv run benchmarks/gateway_queue.py

The engine is a stand-in that answers RUNNING calls at once, each in CALL_S. Every session makes one call through the
official client, which backs off on 429 as it does for any agent. An ideal queue serves the last of them after
SESSIONS / RUNNING * CALL_S.
"""

import asyncio
import logging
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from openai import AsyncOpenAI

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager, SessionHandle
from nemo_rl.launch.model_files import QUICKSTART_MODEL
from nemo_rl.launch.models import resolve_model
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams

SESSIONS, RUNNING, CALL_S = 2000, 100, 1.0
CLIENTS = 200  # HTTP clients, each of as many sessions as it takes
MAX_RETRIES = 1000  # of the client: every call is answered in the end
LIMIT_S = 280.0  # of one round


class StandIn:
    """An engine that takes CALL_S for each call."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            await asyncio.sleep(CALL_S)
            yield Completion(request.request_id, (40,) * 4, (-1.0,) * 4, "length")


async def measure(codec: Codec, *, max_queued_calls: int) -> list[float]:
    """Return the seconds that each session waited for its answer, shortest first; LIMIT_S where there was none."""
    sampling = SamplingParams(4, temperature=1.0, stop_token_ids=codec.encoder.stop_token_ids)
    limits = {"max_concurrent_calls": RUNNING, "max_queued_calls": max_queued_calls, "queue_timeout_s": LIMIT_S}
    rules = CompletionRules("policy", 512, sampling, seed=1, timeout_s=LIMIT_S, **limits)
    engine: Any = StandIn()  # never slept, woken or closed
    manager = await GatewayManager.start(engine, codec, rules, GatewayConfig(max_sessions=SESSIONS))
    root = manager.default_base_url
    clients = [AsyncOpenAI(base_url=root, api_key="unused", max_retries=MAX_RETRIES) for _ in range(CLIENTS)]
    handles = [manager.open_session(seed=index) for index in range(SESSIONS)]

    async def ask(index: int, handle: SessionHandle) -> float:
        client = clients[index % CLIENTS].with_options(base_url=handle.base_url)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        except TimeoutError:
            return LIMIT_S
        return time.perf_counter() - started

    try:
        return sorted(await asyncio.gather(*(ask(index, handle) for index, handle in enumerate(handles))))
    finally:
        await asyncio.gather(*(client.close() for client in clients))
        await manager.close()


async def main() -> None:
    """Print the waits of both ways."""
    logging.disable(logging.WARNING)
    tokenizer = load_tokenizer(TokenizerConfig(), await resolve_model(QUICKSTART_MODEL))
    codec = Codec(ChatEncoder(tokenizer), tool_parser_name="hermes")
    print(f"{SESSIONS} sessions, {RUNNING} calls of {CALL_S:g} s at once: ideal {SESSIONS / RUNNING * CALL_S:g} s")
    for name, queued in (("429 and back-off", 0), ("queue", SESSIONS)):
        waits = await measure(codec, max_queued_calls=queued)
        p99 = waits[len(waits) * 99 // 100]
        print(f"{name}: p50 {statistics.median(waits):.1f} s, p99 {p99:.1f} s, last {waits[-1]:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
