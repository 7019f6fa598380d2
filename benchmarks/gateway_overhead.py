"""Cost of the gateway: 64 agents in a process of their own, and the same requests straight to the engine, in turns.

uv run benchmarks/gateway_overhead.py                     all tables, on vLLM and on an engine that answers at once
uv run benchmarks/gateway_overhead.py calls --engine none one table, without vLLM
uv run benchmarks/gateway_overhead.py --client openai     agents on the official package, whose own time counts too

Server CPU is what this process uses more for a call over the gateway than for the same request asked directly; vLLM's
half of this process is in both, its engine is a process of its own. An engine that answers at once shows the same
without vLLM's noise. Agents share the processors with engine and server, so by default they send and read plain bytes.
"""

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.gateway.server import GatewayServer, ServerSettings
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.launch.model_files import QUICKSTART_MODEL
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.training import tuned_garbage_collection
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams

NUM_AGENTS, CALLS = 64, 4  # calls of an agent in a round, one after another, each a conversation of its own
WARM_UP_ROUNDS = 2
MAX_MODEL_LEN = 512
SESSION_TOKENS = 64
RATIO_BARS = {64: 0.85, 256: 0.97}  # of direct throughput
CPU_BAR_MS = 0.8  # a call of 64 tokens
FIRST_EVENT_BAR_MS = 50.0
SESSIONS_BAR_GB = 2.0


class AnswersAtOnce:
    """No engine at all."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            length = request.sampling.max_new_tokens
            tokens = (40,) * length
            if request.on_tokens is not None:
                for index in range(length):
                    request.on_tokens(index, tokens[index : index + 1])
                    await asyncio.sleep(0)
            yield Completion(request.request_id, tokens, (-1.0,) * length, "length")


Engine = VllmGeneration | AnswersAtOnce


class Recorded:
    """The engine, what the gateway asked of it, and when each request's first token came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[str, list[GenerationRequest]] = defaultdict(list)  # by session
        self.first_token_s: dict[str, list[float]] = defaultdict(list)  # of the monotonic clock, which processes share

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        self.asked[request.session_id].append(request)
        tell = request.on_tokens
        if tell is not None:

            def timed(start: int, token_ids: Sequence[int]) -> None:
                if start == 0:
                    self.first_token_s[request.session_id].append(time.monotonic())
                tell(start, token_ids)

            request = replace(request, on_tokens=timed)
        async for result in self.engine.generate([request]):
            yield result

    async def directly(self) -> None:
        """Ask the same again: the agents at once, the calls of each one after another."""

        def ignore(start: int, token_ids: Sequence[int]) -> None:
            pass

        async def agent(requests: Sequence[GenerationRequest]) -> None:
            for request in requests:
                tell = None if request.on_tokens is None else ignore
                again = replace(request, request_id=f"{request.request_id}-direct", on_tokens=tell)
                async for result in self.engine.generate([again]):
                    assert isinstance(result, Completion), result

        await asyncio.gather(*(agent(requests) for requests in self.asked.values()))


# ---- agents ----


def question(index: int, call: int) -> list[Any]:
    content = f"Spell this word backward (example: sun -> nus): {index}a{call}"
    return [{"role": "user", "content": content}]


async def agents(kind: str) -> None:
    """Run the client process: each line of its input is a round, answered with a line of the seconds that it took.

    A streamed round also tells the time at which the first event of each call came.
    """
    import aiohttp
    from openai import AsyncOpenAI

    limits = aiohttp.TCPConnector(limit=0)
    openai = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0, timeout=600)
    async with openai, aiohttp.ClientSession(connector=limits) as plain:

        async def ask_plainly(url: str, messages: list[Any], stream: bool) -> float:
            body = {"model": "policy", "messages": messages, "stream": stream}
            async with plain.post(f"{url}/chat/completions", json=body) as response:
                await response.content.readany()
                first = time.monotonic()
                await response.read()
                assert response.status == 200
            return first

        async def ask_by_package(url: str, messages: list[Any], stream: bool) -> float:
            own, first = openai.with_options(base_url=url), 0.0
            done: Any = await own.chat.completions.create(model="policy", messages=messages, stream=stream)
            async for _ in done if stream else nothing():
                first = first or time.monotonic()
            return first

        ask = ask_plainly if kind == "plain" else ask_by_package

        async def agent(url: str, index: int, stream: bool, calls: int) -> list[float]:
            return [await ask(url, question(index, call), stream) for call in range(calls)]

        for line in sys.stdin:  # nothing else runs in this loop between rounds
            order = json.loads(line)
            started = time.perf_counter()
            waits = (agent(url, i, order["stream"], order["calls"]) for i, url in enumerate(order["urls"]))
            first = await asyncio.gather(*waits)
            print(json.dumps({"seconds": time.perf_counter() - started, "first": first}), flush=True)


async def nothing() -> AsyncIterator[None]:
    return
    yield


class Client:
    """The process of the agents."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, kind: str) -> "Client":
        pipe, limit = asyncio.subprocess.PIPE, 2**24
        command = (sys.executable, __file__, "agents", "--client", kind)
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=limit))

    async def round(self, urls: Sequence[str], *, stream: bool, calls: int = CALLS) -> Mapping[str, Any]:
        """Let each session's agent make its calls; return the seconds and the times of first events."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"urls": urls, "stream": stream, "calls": calls}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


# ---- tables ----


def codec_and_rules(model_path: str, num_tokens: int) -> tuple[Codec, CompletionRules]:
    codec = Codec(ChatEncoder(load_tokenizer(TokenizerConfig(), model_path)), tool_parser_name="hermes")
    sampling = SamplingParams(num_tokens)  # without stop tokens: all responses are equally long
    return codec, CompletionRules("policy", MAX_MODEL_LEN, sampling, seed=1, max_concurrent_calls=256, timeout_s=600)


async def measure(engine: Engine, model_path: str, num_tokens: int, *, stream: bool, kind: str, rounds: int) -> str:
    """Return a row of the first table."""
    recorded = Recorded(engine)
    codec, rules = codec_and_rules(model_path, num_tokens)
    manager = await GatewayManager.start(recorded, codec, rules, GatewayConfig())  # type: ignore[arg-type]
    client = await Client.start(kind)
    figures: list[tuple[float, ...]] = []
    waits_ms: list[float] = []
    tokens = NUM_AGENTS * CALLS * num_tokens
    for index in range(WARM_UP_ROUNDS + rounds):
        recorded.asked.clear()
        recorded.first_token_s.clear()
        handles = [manager.open_session(seed=seed) for seed in range(NUM_AGENTS)]
        cpu = [time.process_time()]
        result = await client.round([handle.base_url for handle in handles], stream=stream)
        cpu.append(time.process_time())
        sampled = [m for handle in handles for c in (await manager.finish(handle)).chains for m in c.message_log]
        assert sum(len(m.token_ids) for m in sampled if m.is_generated) == tokens
        cpu.append(time.process_time())
        started = time.perf_counter()
        await recorded.directly()
        direct_s = time.perf_counter() - started
        cpu.append(time.process_time())
        if index < WARM_UP_ROUNDS:
            continue
        ms, direct_ms = (1000 * (cpu[i + 1] - cpu[i]) / (NUM_AGENTS * CALLS) for i in (0, 2))
        speeds = tokens / result["seconds"], tokens / direct_s
        figures.append((*speeds, direct_s / result["seconds"], ms, direct_ms, ms - direct_ms))
        for handle, seen in zip(handles, result["first"], strict=True):
            came = recorded.first_token_s[handle.id]
            waits_ms += [1000 * (b - a) for a, b in zip(came, seen, strict=True)] if stream else []
    await client.close()
    await manager.close()
    medians = [statistics.median(each) for each in zip(*figures, strict=True)]
    formats = (",.0f", ",.0f", ".3f", ".2f", ".2f", ".2f")
    cells = [format(median, spec) for median, spec in zip(medians, formats, strict=True)]
    waits = sorted(waits_ms) or [float("nan")]
    cells += [f"{waits[len(waits) // 2]:.1f}, {waits[int(0.99 * len(waits))]:.1f}, {waits[-1]:.1f}"]
    return f"| {type(engine).__name__} | {num_tokens} | {'yes' if stream else 'no'} | {' | '.join(cells)} |"


async def print_calls(engines: Sequence[Engine], model_path: str, *, kind: str, rounds: int) -> None:
    bars = ", ".join(f"{bar} at {num_tokens}" for num_tokens, bar in RATIO_BARS.items())
    print(f"{NUM_AGENTS} agents ({kind}), {CALLS} calls each a round; medians of {rounds} rounds")
    print("| engine | tokens a call | streamed | gateway tok/s | direct tok/s ", end="")
    print(f"| ratio [{bars}] | CPU ms a call | direct | difference [{CPU_BAR_MS} at 64] ", end="")
    print(f"| ms to the first event: median, 99%, longest [{FIRST_EVENT_BAR_MS:.0f}] |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tuned_garbage_collection():  # as a run does once everything is loaded
        for num_tokens, stream, engine in itertools.product(RATIO_BARS, (False, True), engines):
            print(await measure(engine, model_path, num_tokens, stream=stream, kind=kind, rounds=rounds), flush=True)


async def print_sessions(model_path: str, sizes: Sequence[int]) -> None:
    """Hold so many sessions of one call each; all memory of this process counts, with the libraries that it imported.

    The CPU of a call is that of further calls of some of them while all are open.
    """
    print(f"\n| open sessions | process before, GB | with them [{SESSIONS_BAR_GB} at 10,000] | KB a session ", end="")
    print("| peak | CPU ms a call |\n|---|---|---|---|---|---|", flush=True)
    with tuned_garbage_collection():
        for size in sizes:
            await print_open_sessions(model_path, size)


async def print_open_sessions(model_path: str, num_sessions: int) -> None:
    settings = ServerSettings(max_sessions=num_sessions)  # a run's manager has no more than the open files allow
    engine: Any = AnswersAtOnce()
    server = await GatewayServer.start(engine, *codec_and_rules(model_path, SESSION_TOKENS), settings)
    client = await Client.start("plain")
    before = resident_bytes()
    ids = [server.open_session(seed=seed) for seed in range(num_sessions)]
    urls = [server.session_url(each) for each in ids]
    for start in range(0, num_sessions, 256):
        await client.round(urls[start : start + 256], stream=False, calls=1)
    held = resident_bytes()
    cpu_s = time.process_time()
    await client.round(urls[-256:], stream=False, calls=CALLS)
    cpu_ms = 1000 * (time.process_time() - cpu_s) / (min(256, num_sessions) * CALLS)
    assert server.num_sessions == num_sessions
    assert sum(len(server.close_session(each).chains()) for each in ids) >= num_sessions
    await client.close()
    await server.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = f"{before / 1e9:.2f} | {held / 1e9:.2f} | {(held - before) / num_sessions / 1e3:.1f} | {peak / 1e9:.2f}"
    print(f"| {num_sessions} | {memory} | {cpu_ms:.2f} |", flush=True)


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS:"))


async def main(arguments: argparse.Namespace) -> None:
    model_path = await resolve_model(QUICKSTART_MODEL)
    if arguments.what in ("all", "sessions"):  # first: an engine's memory is none of the gateway's
        await print_sessions(model_path, arguments.open)
    if arguments.what == "sessions":
        return
    settings = {"kind": arguments.client, "rounds": arguments.rounds}
    if arguments.engine == "none":
        await print_calls([AnswersAtOnce()], model_path, **settings)
        return
    section = VllmGenerationConfig(
        vllm_cfg=VllmConfig(max_num_seqs=NUM_AGENTS, enable_prefix_caching=False),
        vllm_kwargs={"hf_overrides": {"max_position_embeddings": MAX_MODEL_LEN}},
    )
    engine = await VllmGeneration.create(section, EngineModel(model_path, "float32", MAX_MODEL_LEN, "cpu"))
    try:
        await print_calls([engine, AnswersAtOnce()], model_path, **settings)
    finally:
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "calls", "sessions", "agents"], default="all")
    parser.add_argument("--engine", choices=["vllm", "none"], default="vllm", help="none: only the one that is none")
    parser.add_argument("--client", choices=["plain", "openai"], default="plain")
    parser.add_argument("--open", type=int, nargs="+", default=[256, 10_000], help="sessions, for the table of these")
    parser.add_argument("--rounds", type=int, default=10)
    parsed = parser.parse_args()
    asyncio.run(agents(parsed.client) if parsed.what == "agents" else main(parsed))
