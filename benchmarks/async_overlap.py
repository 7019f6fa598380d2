"""Measurement of how closely background collection overlaps generation and training.

A simulated engine of C slots, first in, first out, serves requests whose times are heavy-tailed (log-normal, cut at
LONGEST times their median, as a token limit does); a simulated trainer sleeps T. E is the engine's work for a step
divided by C: no step can be faster than max(E, T). A synchronous one takes T and the makespan of its groups, which ends
with the slowest. The real AsyncSource, rollouts and all, runs a loop of steps over them; the same trace goes through a
discrete-event simulation of the same rules (which groups are issued when, which are handed out), which costs nothing
but the waits. A step in steady state is the mean over all but the first steps. Weights change in flight, at no cost.

With `--validation` the training loop validates after each step, with and without `grpo.val_overlap`; a step and a
validation have as many rollouts, each of the same time.

    python benchmarks/async_overlap.py [--steps 24] [--engine-s 0.8]
    python benchmarks/async_overlap.py --validation
"""

import argparse
import asyncio
import gc
import heapq
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.algorithms.loop import train
from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.interfaces import EnginePart
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Message, Prompt, SamplingParams
from nemo_rl.weight_manifests import Weights
from tests.fakes.encoder import END, FakeEncoder
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.algorithms.run_setup import HELD_OUT, VOCAB_SIZE, make_config, make_rig
from tests.unit.algorithms.run_setup import prompts as make_prompts

NUM_PROMPTS, NUM_GENERATIONS = 16, 8  # of a step
SIGMA, LONGEST = 1.0, 8.0  # of the log-normal: 1 in 50 would take more than 8 times the median, 5 times the mean
RESPONSE = (*range(2, 34), END)
WARM_UP = 6  # steps until the pipeline is full


@dataclass(frozen=True)
class Setting:
    slots: int  # of the engine
    age: int
    train_s: float
    num_steps: int
    seconds: list[list[float]]  # by index of the prompt, by generation


def draw_seconds(num_groups: int, slots: int, engine_s: float, seed: int = 0) -> list[list[float]]:
    """Return times such that the work of a step, over all slots, takes `engine_s` on average."""
    draws = random.Random(seed)
    raw = [[min(math.exp(draws.gauss(0, SIGMA)), LONGEST) for _ in range(NUM_GENERATIONS)] for _ in range(num_groups)]
    scale = engine_s * slots * num_groups / (NUM_PROMPTS * sum(map(sum, raw)))
    return [[scale * one for one in group] for group in raw]


def synchronous_s(seconds: Sequence[Sequence[float]], slots: int) -> float:
    """Mean makespan of a step's groups in an engine that is empty at first."""
    makespans = []
    for start in range(0, len(seconds) - NUM_PROMPTS + 1, NUM_PROMPTS):
        free = [0.0] * slots
        for one in (x for group in seconds[start : start + NUM_PROMPTS] for x in group):
            heapq.heapreplace(free, free[0] + one)
        makespans.append(max(free))
    return sum(makespans) / len(makespans)


def simulate(setting: Setting) -> float:
    """Seconds a step in steady state with a driver that takes no time, event by event."""
    return steady_s(_Simulation(setting).run())


class _Simulation:
    """Groups are issued under the version of the last step handed out, up to A or A + 1 steps ahead."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.free = [0.0] * setting.slots  # when each slot of the engine is free
        self.issued = 0
        self.version = 0
        self.ends: dict[int, tuple[float, int]] = {}  # of groups not handed out: end, deadline

    def run(self) -> list[float]:
        """When each step's groups were handed out."""
        handed_out, now = [], 0.0
        for version in range(self.setting.num_steps):
            self.version = version
            self._issue(now, self.setting.age + 1)
            now = self._hand_out(now)
            handed_out.append(now)
            self._issue(now, self.setting.age)
            now += self.setting.train_s
        return handed_out

    def _issue(self, now: float, steps_ahead: int) -> None:
        while len(self.ends) < steps_ahead * NUM_PROMPTS:
            end = now
            for seconds in self.setting.seconds[self.issued]:
                done = max(now, heapq.heappop(self.free)) + seconds
                heapq.heappush(self.free, done)
                end = max(end, done)
            self.ends[self.issued] = (end, self.version + self.setting.age)
            self.issued += 1

    def _hand_out(self, now: float) -> float:
        """Take complete groups at the first moment that allows it; return that moment."""
        moments = sorted({now, *(end for end, _ in self.ends.values() if end > now)})
        for moment in moments:
            complete = sorted((d, prompt_index) for prompt_index, (end, d) in self.ends.items() if end <= moment)
            chosen = [prompt_index for _, prompt_index in complete[:NUM_PROMPTS]]
            if len(chosen) == NUM_PROMPTS and self._can_wait(chosen):
                for prompt_index in chosen:
                    del self.ends[prompt_index]
                return moment
        raise AssertionError("a step's groups never end")

    def _can_wait(self, chosen: Sequence[int]) -> bool:
        """Return whether the remaining groups can still be trained within the bound, a step's worth at each version."""
        left = sorted(deadline for prompt_index, (_, deadline) in self.ends.items() if prompt_index not in chosen)
        return all(index < NUM_PROMPTS * (deadline - self.version) for index, deadline in enumerate(left))


class SimulatedEngine:
    """Answers each request after its time, at most `slots` at once, in the order of arrival."""

    is_async = True

    def __init__(self, setting: Setting) -> None:
        self._seconds = setting.seconds
        self._free = [0.0] * setting.slots
        self.weight_version = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        _, _, prompt_index, index, _ = request.request_id.split(":")
        version, now = self.weight_version, asyncio.get_running_loop().time()
        done = max(now, heapq.heappop(self._free)) + self._seconds[int(prompt_index)][int(index)]
        heapq.heappush(self._free, done)
        await asyncio.sleep(done - now)
        versions = (version, self.weight_version)
        yield Completion(request.request_id, RESPONSE, (-1.0,) * len(RESPONSE), "stop", versions)

    async def pause(self, *, keep_cache: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def update_weights(self, manifest: Weights, weight_version: int) -> None: ...
    async def sleep(self, *, discards_weights: bool = False) -> None: ...
    async def wake(self, *parts: EnginePart) -> None: ...
    async def close(self) -> None: ...


async def measure(setting: Setting) -> tuple[float, float]:
    """Seconds a step in steady state, and of the driver's CPU a group."""
    engine = SimulatedEngine(setting)
    prompts = [Prompt(str(i), "game", (Message("user", "q"),)) for i in range(len(setting.seconds))]
    source = AsyncSource(
        PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1),
        RolloutDependencies(
            engine,
            {"game": CheckedEnvironment(FakeEnvironment(), None)},
            FakeEncoder(),
            RolloutLimits(max_turns=1, max_total_length=4096),
        ),
        RolloutOptions(SamplingParams(max_new_tokens=64, stop_token_ids=(END,)), seed=0),
        num_prompts_per_step=NUM_PROMPTS,
        num_generations_per_prompt=NUM_GENERATIONS,
        max_age_steps=setting.age,
        stale_groups="wait",
        max_generation_failures=0,
        failures=RolloutConfig(),
    )
    clock, handed_out, cpu = asyncio.get_running_loop().time, [], time.process_time()
    for version in range(setting.num_steps):
        collected = await source.next_groups(version)
        handed_out.append(clock())
        assert collected.metrics["max_trajectory_age"] <= setting.age
        await asyncio.sleep(setting.train_s)
        source.state_dict()
        async with source.hold():
            engine.weight_version = version + 1
    cpu = time.process_time() - cpu
    await source.close()
    return steady_s(handed_out), cpu / (setting.num_steps * NUM_PROMPTS)


def steady_s(handed_out: Sequence[float]) -> float:
    return (handed_out[-1] - handed_out[WARM_UP]) / (len(handed_out) - 1 - WARM_UP)


def report(num_steps: int, engine_s: float, slots: int, ratios: Sequence[float], ages: Sequence[int]) -> None:
    seconds = draw_seconds((num_steps + max(ages) + 2) * NUM_PROMPTS, slots, engine_s)
    makespan_s = synchronous_s(seconds, slots)
    for ratio in ratios:
        train_s = engine_s / ratio
        for age in ages:
            setting = Setting(slots, age, train_s, num_steps, seconds)
            ideal, (measured, cpu_s) = simulate(setting), asyncio.run(measure(setting))
            bound = max(engine_s, train_s)
            print(
                f"| {slots} | {ratio:g} | {age} | {engine_s + train_s:.3f} | {makespan_s + train_s:.3f} | {bound:.3f} "
                f"| {ideal:.3f} | {measured:.3f} | {measured / ideal:.3f} | {measured / bound:.3f} "
                f"| {1000 * cpu_s:.2f} |",
                flush=True,
            )


async def measure_run(*, overlap: bool, slots: int, engine_s: float, train_s: float, num_steps: int) -> float:
    """Return the seconds a step of a run that validates after each, with an engine and a trainer that sleep."""
    num_rollouts = NUM_PROMPTS * NUM_GENERATIONS
    free = asyncio.Semaphore(slots)

    async def occupy_slot(request: GenerationRequest) -> None:
        async with free:
            await asyncio.sleep(engine_s * slots / num_rollouts)

    grpo = {"num_prompts_per_step": NUM_PROMPTS, "num_generations_per_prompt": NUM_GENERATIONS, "max_num_epochs": 1}
    grpo |= {"max_num_steps": num_steps, "val_period": 1, "val_overlap": overlap}
    config = make_config(grpo=grpo, checkpointing={"enabled": False})
    with tempfile.TemporaryDirectory() as directory:
        rig = make_rig(
            Path(directory),
            config,
            num_prompts=NUM_PROMPTS * num_steps,
            validation=(PromptSet("held_out", make_prompts(num_rollouts, HELD_OUT)),),
            generation=FakeGeneration(vocab_size=VOCAB_SIZE, latency=occupy_slot),
        )
        train_step = rig.policy.train_step

        async def train_in_time(*arguments: Any) -> dict[str, float]:
            await asyncio.sleep(train_s)
            return await train_step(*arguments)

        rig.policy.train_step = train_in_time  # type: ignore[method-assign]
        began = time.perf_counter()
        await train(rig.run)
        seconds = time.perf_counter() - began
    assert len(rig.validations()) == num_steps
    return seconds / num_steps


def report_validation(num_steps: int, engine_s: float, slots: int, ratios: Sequence[float]) -> None:
    print(f"Steps and validations of {NUM_PROMPTS * NUM_GENERATIONS} rollouts, E = V = {engine_s:g} s, {slots} slots\n")
    print("| V/T | E + T + V s | E + max(T, V) s | alone s | beside training s | beside / alone |")
    print("|---|---|---|---|---|---|")
    for ratio in ratios:
        train_s = engine_s / ratio
        alone, beside = (
            asyncio.run(
                measure_run(overlap=overlap, slots=slots, engine_s=engine_s, train_s=train_s, num_steps=num_steps)
            )
            for overlap in (False, True)
        )
        sums = f"{2 * engine_s + train_s:.3f} | {engine_s + max(train_s, engine_s):.3f}"
        print(f"| {ratio:g} | {sums} | {alone:.3f} | {beside:.3f} | {beside / alone:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--engine-s", type=float, default=0.8)
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1, 2])
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--validation", action="store_true", help="validations beside training, nothing else")
    arguments = parser.parse_args()
    if arguments.validation:
        report_validation(arguments.steps, arguments.engine_s, arguments.slots[0], arguments.ratios)
        return
    gc.collect()
    gc.freeze()  # what the imports left is not looked at again
    batch = NUM_PROMPTS * NUM_GENERATIONS
    print(f"Steps of {NUM_PROMPTS} x {NUM_GENERATIONS} = {batch} rollouts, E = {arguments.engine_s:g} s\n")
    print(
        "| slots | E/T | age | E + T s | synchronous s | max(E, T) s | simulated s | measured s "
        "| measured / simulated | measured / max(E, T) | driver CPU ms a group |"
    )
    print("|" + "---|" * 11)
    for slots in arguments.slots:
        report(arguments.steps, arguments.engine_s, slots, arguments.ratios, arguments.ages)


if __name__ == "__main__":
    main()
