"""Cost of the gateway: 64 agents in a process of their own, and the same requests straight to the engine, in turns.

uv run benchmarks/gateway_overhead.py

Server CPU is what this process uses more for a call over the gateway than for the same request asked directly; vLLM's
half of this process is in both, its engine is a process of its own. An engine that answers at once shows the same
without vLLM's noise.
"""

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.run import GatewayConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.launch.model_files import QUICKSTART_MODEL
from nemo_rl.launch.models import resolve_model
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams

NUM_AGENTS, CALLS = 64, 4  # calls of an agent in a round, one after another, each a conversation of its own
WARM_UP_ROUNDS, ROUNDS = 2, 10
MAX_MODEL_LEN = 512
BAR_MS, BAR_RATIO = 1.5, 0.9


class AnswersAtOnce:
    """No engine at all."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            length = request.sampling.max_new_tokens
            yield Completion(request.request_id, (40,) * length, (-1.0,) * length, "length")


Engine = VllmGeneration | AnswersAtOnce


class Recorded:
    """The engine, and what the gateway asked of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[str, list[GenerationRequest]] = defaultdict(list)  # by session

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            self.asked[request.session_id].append(request)
        async for result in self.engine.generate(requests):
            yield result

    async def directly(self) -> None:
        """Ask the same again: the agents at once, the calls of each one after another."""

        async def agent(requests: Sequence[GenerationRequest]) -> None:
            for request in requests:
                again = replace(request, request_id=f"{request.request_id}-direct")
                async for result in self.engine.generate([again]):
                    assert isinstance(result, Completion), result

        await asyncio.gather(*(agent(requests) for requests in self.asked.values()))


async def agents() -> None:
    """Run the client process: each line of base URLs is a round, answered with a line of the seconds that it took."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0, timeout=600) as client:

        async def agent(base_url: str, index: int) -> None:
            own = client.with_options(base_url=base_url)
            for call in range(CALLS):
                content = f"Spell this word backward (example: sun -> nus): {index}a{call}"
                await own.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])

        for line in sys.stdin:  # nothing else runs in this loop between rounds
            started = time.perf_counter()
            await asyncio.gather(*(agent(url, index) for index, url in enumerate(json.loads(line))))
            print(time.perf_counter() - started, flush=True)


async def over_gateway(manager: GatewayManager, client: asyncio.subprocess.Process, num_tokens: int) -> float:
    """Seconds of a round of the client."""
    assert client.stdin is not None
    assert client.stdout is not None
    handles = [manager.open_session(seed=index) for index in range(NUM_AGENTS)]
    client.stdin.write(json.dumps([handle.base_url for handle in handles]).encode() + b"\n")
    seconds = float(await client.stdout.readline())
    sampled = 0
    for handle in handles:
        finished = await manager.finish(handle)
        sampled += sum(len(m.token_ids) for chain in finished.chains for m in chain.message_log if m.is_generated)
    assert sampled == NUM_AGENTS * CALLS * num_tokens
    return seconds


async def measure(engine: Engine, model_path: str, num_tokens: int) -> str:
    """One line of the table."""
    recorded = Recorded(engine)
    codec = Codec(ChatEncoder(load_tokenizer(TokenizerConfig(), model_path)), tool_parser_name="hermes")
    sampling = SamplingParams(num_tokens)  # without stop tokens: all responses are equally long
    rules = CompletionRules("policy", MAX_MODEL_LEN, sampling, seed=1, max_concurrent_calls=256, timeout_s=600)
    manager = await GatewayManager.start(recorded, codec, rules, GatewayConfig())  # type: ignore[arg-type]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(sys.executable, __file__, "agents", stdin=pipe, stdout=pipe)
    figures: list[tuple[float, ...]] = []
    tokens = NUM_AGENTS * CALLS * num_tokens
    for index in range(WARM_UP_ROUNDS + ROUNDS):
        recorded.asked.clear()
        cpu = [time.process_time()]
        seconds = await over_gateway(manager, client, num_tokens)
        cpu.append(time.process_time())
        started = time.perf_counter()
        await recorded.directly()
        direct_s = time.perf_counter() - started
        cpu.append(time.process_time())
        if index >= WARM_UP_ROUNDS:
            ms, direct_ms = (1000 * (cpu[i + 1] - cpu[i]) / (NUM_AGENTS * CALLS) for i in (0, 1))
            speeds = tokens / seconds, tokens / direct_s
            figures.append((*speeds, direct_s / seconds, ms, direct_ms, ms - direct_ms))
    assert client.stdin is not None
    client.stdin.close()
    await client.wait()
    await manager.close()
    medians = [statistics.median(each) for each in zip(*figures, strict=True)]
    formats = (",.0f", ",.0f", ".3f", ".2f", ".2f", ".2f")
    cells = [format(median, spec) for median, spec in zip(medians, formats, strict=True)]
    return f"| {' | '.join((type(engine).__name__, str(num_tokens), *cells))} |"


async def main() -> None:
    model_path = await resolve_model(QUICKSTART_MODEL)
    section = VllmGenerationConfig(
        vllm_cfg=VllmConfig(max_num_seqs=NUM_AGENTS, enable_prefix_caching=False),
        vllm_kwargs={"hf_overrides": {"max_position_embeddings": MAX_MODEL_LEN}},
    )
    engine = await VllmGeneration.create(section, EngineModel(model_path, "float32", MAX_MODEL_LEN, "cpu"))
    print(f"{NUM_AGENTS} agents, {CALLS} calls each a round; medians of {ROUNDS} rounds")
    print(f"| engine | tokens a call | gateway tok/s | direct tok/s | ratio, at 256 [{BAR_RATIO}] ", end="")
    print(f"| CPU ms a call | direct | difference [{BAR_MS}] |\n|---|---|---|---|---|---|---|---|", flush=True)
    try:
        for num_tokens in (64, 256):
            for measured in (engine, AnswersAtOnce()):
                print(await measure(measured, model_path, num_tokens), flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(agents() if sys.argv[1:] == ["agents"] else main())
