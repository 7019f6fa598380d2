"""Measurement of the rollout schedulers against what engine and environments allow.

A simulated engine of C slots, first in, first out, and an environment of any number of slots take times drawn by
seed: fixed or heavy-tailed (log-normal). The same trace goes through an exact discrete-event simulation, which costs
nothing but the waits; its makespan is what a perfect driver reaches. The bound max(longest episode, engine's work / C)
is below it. Like an engine in a process of its own, the simulated one does not slow down with the driver. A turn takes
200 ms on average: 150 in the engine, 50 in the environment.

With `--open` only CPU time counts: of the driver alone, a turn and a group of 8, and its memory, while N rollouts are
open at once. The engine, in a process of its own, answers ANSWERS requests at a time, drawn from all that wait. Each
size runs in a process of its own.

    python benchmarks/rollout_schedule.py [--sizes 64 512 4096] [--concurrency 256] [--turns 3]
    python benchmarks/rollout_schedule.py --open 256 4096 65536
"""

import argparse
import asyncio
import gc
import hashlib
import heapq
import math
import os
import random
import resource
import select
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.interfaces import EnginePart, Environment
from nemo_rl.launch.training import tuned_garbage_collection
from nemo_rl.types import Completion, EnvStep, FailedRequest, GenerationRequest, Message, Prompt, SamplingParams
from nemo_rl.weight_manifests import Weights
from tests.fakes.encoder import END, FakeEncoder

GENERATION_S, ENVIRONMENT_S, JUDGE_S = 0.15, 0.05, 0.05
SIGMA = 1.0  # of the log-normal: 1 in 100 takes six times the mean
RESPONSE = (*range(2, 34), END)  # 33 tokens
LOGPROBS = (-1.0,) * len(RESPONSE)
GROUP_SIZE, NUM_STEPS = 8, 4  # rollouts; steps of background collection, half of the open groups each
ANSWERS = 256  # requests that the remote engine answers at once, as a step of an engine does
IDLE_S = 0.02  # without a further request, after which the engine does not wait for all rollouts any more
TURN_BAR_MS, GROUP_BAR_MS = 0.10, 1.2


@dataclass(frozen=True)
class Trace:
    """Seconds of every turn of every sample."""

    generation_s: list[list[float]]
    environment_s: list[list[float]]

    def longest_episode_s(self) -> float:
        pairs = zip(self.generation_s, self.environment_s, strict=True)
        return max(sum(generation) + sum(environment) for generation, environment in pairs)

    def engine_s(self) -> float:
        return sum(map(sum, self.generation_s))


def draw_trace(num_samples: int, num_turns: int, latency: str, seed: int = 0) -> Trace:
    draws = random.Random(seed)

    def drawn(mean: float) -> float:
        if latency == "fixed":
            return mean
        return mean * math.exp(draws.gauss(0, SIGMA) - SIGMA**2 / 2)

    def table(mean: float) -> list[list[float]]:
        return [[drawn(mean) for _ in range(num_turns)] for _ in range(num_samples)]

    return Trace(table(GENERATION_S), table(ENVIRONMENT_S))


def simulate(trace: Trace, concurrency: int) -> float:
    """Return the makespan of first-in, first-out, event by event, with a driver that takes no time."""
    free = [0.0] * concurrency  # when each slot of the engine is free
    arrivals = [(0.0, sample, sample, 0) for sample in range(len(trace.generation_s))]  # time, order, sample, turn
    heapq.heapify(arrivals)
    order, end = len(arrivals), 0.0
    while arrivals:
        at, _, sample, turn = heapq.heappop(arrivals)
        done = max(at, heapq.heappop(free)) + trace.generation_s[sample][turn]
        heapq.heappush(free, done)
        scored = done + trace.environment_s[sample][turn]
        end = max(end, scored)
        if turn + 1 < len(trace.generation_s[sample]):
            order += 1
            heapq.heappush(arrivals, (scored, order, sample, turn + 1))
    return end


class SimulatedEngine:
    """Answers each request after its time in the trace, at most `concurrency` at once, in the order of arrival."""

    is_async = True

    def __init__(self, trace: Trace, concurrency: int) -> None:
        self._trace = trace
        self._free = [0.0] * concurrency  # when each slot is free

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        sample, _, turn = request.request_id.split(":")
        now = asyncio.get_running_loop().time()
        done = max(now, heapq.heappop(self._free)) + self._trace.generation_s[int(sample)][int(turn)]
        heapq.heappush(self._free, done)
        await asyncio.sleep(done - now)
        yield Completion(request.request_id, RESPONSE, (-1.0,) * len(RESPONSE), "stop")

    async def pause(self, *, keep_cache: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, manifest: Weights, weight_version: int) -> None: ...
    async def sleep(self, *, discards_weights: bool = False) -> None: ...
    async def wake(self, *parts: EnginePart) -> None: ...
    async def close(self) -> None: ...


class SimulatedEnvironment:
    """Answers each call after `latency` of its first item; its judge, where it has one, serves a call at a time."""

    def __init__(self, num_turns: int, latency: Callable[[int, int], float], *, is_serial: bool = False) -> None:
        self._num_turns = num_turns
        self._latency = latency
        self._judge = asyncio.Semaphore(1 if is_serial else sys.maxsize)
        self.num_calls = 0

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> list[EnvStep]:
        self.num_calls += 1
        async with self._judge:
            await asyncio.sleep(self._latency(states[0]["sample"], states[0]["turn"]))
        return [
            EnvStep(
                observation=(Message("user", "tryAgain"),),
                rewards={"r": 1.0},
                done=state["turn"] + 1 == self._num_turns,
                state={**state, "turn": state["turn"] + 1},
            )
            for state in states
        ]

    async def close(self) -> None: ...


OPTIONS = RolloutOptions(SamplingParams(max_new_tokens=64, stop_token_ids=(END,)), seed=0)


def make_dependencies(
    engine: "SimulatedEngine | RemoteEngine", environment: Environment, num_turns: int
) -> RolloutDependencies:
    limits = RolloutLimits(max_turns=num_turns, max_total_length=4096)
    return RolloutDependencies(engine, {"game": CheckedEnvironment(environment, None)}, FakeEncoder(), limits)


def jobs_of(num_samples: int) -> list[RolloutJob]:
    text = hashlib.sha256(b"prompt").hexdigest()
    return [
        RolloutJob(Prompt(str(i), "game", (Message("user", text),), {"sample": i, "turn": 0}), str(i), 0)
        for i in range(num_samples)
    ]


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_s: float
    num_calls: int


def measure(num_samples: int, num_turns: int, trace: Trace, concurrency: int) -> Measured:
    async def main() -> Measured:
        environment = SimulatedEnvironment(num_turns, lambda sample, turn: trace.environment_s[sample][turn])
        dependencies = make_dependencies(SimulatedEngine(trace, concurrency), environment, num_turns)
        jobs = jobs_of(num_samples)
        started, cpu = time.perf_counter(), time.process_time()
        trajectories = await run_async_multi_turn_rollout(jobs, dependencies, OPTIONS)
        measured = Measured(time.perf_counter() - started, time.process_time() - cpu, environment.num_calls)
        assert all(t.num_turns == num_turns and t.failure is None for t in trajectories)
        return measured

    return asyncio.run(main())


def measure_judge(scheduler: Callable[..., Any], num_samples: int) -> Measured:
    """One turn with instant generation, scored by a judge that takes 50 ms a call, one at a time."""

    async def main() -> Measured:
        trace = Trace([[0.0]] * num_samples, [[0.0]] * num_samples)
        environment = SimulatedEnvironment(1, lambda sample, turn: JUDGE_S, is_serial=True)
        dependencies = make_dependencies(SimulatedEngine(trace, num_samples), environment, 1)
        started = time.perf_counter()
        await scheduler(jobs_of(num_samples), dependencies, OPTIONS)
        return Measured(time.perf_counter() - started, 0.0, environment.num_calls)

    return asyncio.run(main())


def report_pipelined(sizes: Sequence[int], concurrency: int, num_turns: int) -> None:
    print(f"Pipelined training: {num_turns} turns of 200 ms, {concurrency} slots in the engine\n")
    print("| samples | latency | bound s | simulated FIFO s | measured s | measured / FIFO | driver CPU ms a turn |")
    print("|---|---|---|---|---|---|---|")
    for num_samples in sizes:
        for latency in ("fixed", "heavy-tailed"):
            trace = draw_trace(num_samples, num_turns, latency)
            fifo = simulate(trace, concurrency)
            bound = max(trace.longest_episode_s(), trace.engine_s() / concurrency)
            measured = measure(num_samples, num_turns, trace, concurrency)
            cpu_ms = 1000 * measured.cpu_s / (num_samples * num_turns)
            print(
                f"| {num_samples} | {latency} | {bound:.3f} | {fifo:.3f} | {measured.seconds:.3f} "
                f"| {measured.seconds / fifo:.3f} | {cpu_ms:.3f} |",
                flush=True,
            )


def report_judge(num_samples: int) -> None:
    print(f"\nOne turn of {num_samples} samples, a serial judge of {1000 * JUDGE_S:.0f} ms a call\n")
    print("| scheduler | calls | seconds |\n|---|---|---|")
    for scheduler in (run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation):
        measured = measure_judge(scheduler, num_samples)
        print(f"| {scheduler.__name__} | {measured.num_calls} | {measured.seconds:.3f} |", flush=True)


def answer_requests(connection: socket.socket, num_open: int) -> None:
    """Answer request numbers in a process of its own, at random once all rollouts wait, until the driver closes."""
    draws, waiting, received, is_idle = random.Random(0), array("I"), b"", False
    while True:
        while waiting and (is_idle or len(waiting) >= num_open):
            answered = array("I")
            for _ in range(min(ANSWERS, len(waiting))):
                drawn = draws.randrange(len(waiting))
                waiting[drawn], waiting[-1] = waiting[-1], waiting[drawn]
                answered.append(waiting.pop())
            connection.sendall(answered.tobytes())
            is_idle = False
        is_idle = not select.select([connection], [], [], IDLE_S if waiting else None)[0]
        if not is_idle:
            part = connection.recv(1 << 16)
            if not part:
                return
            numbers, received = _whole_numbers(received + part)
            waiting += numbers


def _whole_numbers(received: bytes) -> "tuple[array[int], bytes]":
    """Return the numbers that have arrived whole, and the bytes after them."""
    end = len(received) // 4 * 4
    return array("I", received[:end]), received[end:]


class RemoteEngine:
    """Sends the numbers of requests to another process, those of one turn of the event loop together."""

    is_async = True

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._unsent, self._received, self._num_requests = array("I"), b"", 0
        self.weight_version = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        version = self.weight_version
        self._num_requests += 1
        answered = self._waiting[self._num_requests] = self._loop.create_future()
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(self._num_requests)
        await answered
        yield Completion(request.request_id, RESPONSE, LOGPROBS, "stop", (version, self.weight_version))

    def _send(self) -> None:
        self._connection.sendall(self._unsent.tobytes())
        self._unsent = array("I")

    def _read(self) -> None:
        numbers, self._received = _whole_numbers(self._received + self._connection.recv(4 * ANSWERS))
        for number in numbers:
            self._waiting.pop(number).set_result(None)

    async def pause(self, *, keep_cache: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, manifest: Weights, weight_version: int) -> None: ...
    async def sleep(self, *, discards_weights: bool = False) -> None: ...
    async def wake(self, *parts: EnginePart) -> None: ...
    async def close(self) -> None: ...


class InstantEnvironment:
    """Ends each rollout after its turns; takes no time."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> list[EnvStep]:
        turns = [state["turn"] + 1 for state in states]
        again = (Message("user", "tryAgain"),)
        return [EnvStep(again, {"r": 1.0}, turn == self._num_turns, {"turn": turn}) for turn in turns]

    async def close(self) -> None: ...


async def measure_open_turns(engine: RemoteEngine, num_open: int, num_turns: int) -> float:
    """Return the driver's CPU seconds a turn of `num_open` rollouts that begin together."""
    dependencies = make_dependencies(engine, InstantEnvironment(num_turns), num_turns)
    jobs, cpu_s = jobs_of(num_open), time.process_time()
    trajectories = await run_async_multi_turn_rollout(jobs, dependencies, OPTIONS)
    cpu_s = time.process_time() - cpu_s
    assert all(t.num_turns == num_turns and t.failure is None for t in trajectories)
    return cpu_s / (num_open * num_turns)


async def measure_open_groups(engine: RemoteEngine, num_open: int) -> float:
    """Return the driver's CPU seconds a group of a background collection with `num_open` rollouts open."""
    num_prompts = num_open // GROUP_SIZE // 2  # of a step: at age 1 those of two steps are open
    prompts = [Prompt(str(i), "game", (Message("user", "q"),), {"turn": 0}) for i in range(num_prompts * NUM_STEPS)]
    source = AsyncSource(
        PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1),
        make_dependencies(engine, InstantEnvironment(1), 1),
        OPTIONS,
        num_prompts_per_step=num_prompts,
        num_generations_per_prompt=GROUP_SIZE,
        max_age_steps=1,
        stale_groups="wait",
        max_generation_failures=0,
        failures=RolloutConfig(),
    )
    cpu_s = time.process_time()
    for version in range(NUM_STEPS):
        collected = await source.next_groups(version)
        assert len(collected.groups) == num_prompts
        source.state_dict()
        async with source.hold():  # of a refit, which requests outlast
            engine.weight_version = version + 1
    cpu_s = time.process_time() - cpu_s
    await source.close()
    return cpu_s / len(prompts)


def measure_beside_engine(measured: Callable[[RemoteEngine], Awaitable[float]], num_open: int) -> float:
    """Return what is measured in this process, with the engine in another."""

    async def main() -> float:
        return await measured(RemoteEngine(ours))

    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        answer_requests(theirs, num_open)
        os._exit(0)
    theirs.close()
    try:
        with tuned_garbage_collection():  # as a run does once everything is loaded
            return asyncio.run(main())
    finally:
        ours.close()
        os.waitpid(child, 0)


def report_open(num_open: int, num_turns: int) -> None:
    """Print the driver's CPU a turn and a group, and its memory, with `num_open` rollouts open."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    turn_s = measure_beside_engine(partial(measure_open_turns, num_open=num_open, num_turns=num_turns), num_open)
    kib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / num_open
    group_s = measure_beside_engine(partial(measure_open_groups, num_open=num_open), num_open)
    print(f"| {num_open} | {1000 * turn_s:.3f} | {1000 * group_s:.2f} | {kib:.1f} |", flush=True)


def report_each_open(sizes: Sequence[int], num_turns: int) -> None:
    """Print the table of `report_open`, each row made in a process of its own."""
    if len(sizes) == 1:
        report_open(sizes[0], num_turns)
        return
    print(f"Rollouts of {num_turns} turns; groups of {GROUP_SIZE} rollouts of one turn, collected in the background\n")
    print(f"| open rollouts | driver CPU ms a turn [{TURN_BAR_MS}] | a group [{GROUP_BAR_MS}] | KiB a rollout |")
    print("|---|---|---|---|", flush=True)
    for size in sizes:
        subprocess.run([sys.executable, __file__, "--open", str(size), "--turns", str(num_turns)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--open", type=int, nargs="+", help="CPU and memory with so many rollouts open, nothing else")
    arguments = parser.parse_args()
    if arguments.open:
        report_each_open(arguments.open, arguments.turns)
        return
    measure(8, 1, draw_trace(8, 1, "fixed"), 8)  # warm up
    gc.collect()
    gc.freeze()  # what the imports left is not looked at again
    report_pipelined(arguments.sizes, arguments.concurrency, arguments.turns)
    report_judge(64)


if __name__ == "__main__":
    main()
