"""A run in virtual time over the real source, rollouts and environments: its bubbles are known."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.trace.bubbles import Bubbles, count_bubbles
from nemo_rl.trace.timeline import Timeline
from nemo_rl.trace.virtual_time import trace_in_virtual_time
from nemo_rl.tracing import TraceSink, span
from nemo_rl.types import GenerationRequest
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration, sample
from tests.fakes.scorers import FakeScorer
from tests.unit.experience.async_setup import LIMITS, engine
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, prompt

GROUPS, GROUP = 4, 4  # of a step


@dataclass(frozen=True)
class Simulated:
    """What a run is like, in seconds; `train_parts` are the micro-batches of a step as numbers of tokens."""

    generation_s: Callable[[int, int], float] = lambda place, index: 1.0
    token_s: float = 0.0  # of each sampled token, in place of `generation_s`
    slots: int = 10**6  # of the engine
    environment_s: float = 0.0
    environment_calls: int | None = None  # concurrent ones
    score_s: float = 0.0
    score_calls: int | None = None
    train_s: float = 1.0
    train_parts: Sequence[int] = ()
    part_s: Callable[[int], float] = lambda tokens: 0.0
    refit_s: float = 0.0
    age: int | None = None  # None: synchronous
    num_steps: int = 8
    num_groups: int = GROUPS
    config: Mapping[str, Any] = field(default_factory=dict)


def simulate(run: Simulated, sinks: Sequence[TraceSink] = ()) -> Timeline:
    """Run all steps; return their timeline, and write their spans to `sinks`."""
    return trace_in_virtual_time(_train(run), sinks)[1]


def bubbles_of(run: Simulated) -> Bubbles:
    bubbles = count_bubbles(simulate(run))
    assert bubbles is not None
    return bubbles


async def _train(run: Simulated) -> None:
    generation = _engine_by_tokens(run) if run.token_s else engine(run.generation_s, slots=run.slots)
    source = _source(run, generation)
    for number in range(run.num_steps):
        generation.weight_version = number
        timer = StepTimer(step=number + 1)
        with timer("total_step_time"):
            with timer("generation" if run.age is None else "exposed_generation"):
                await source.next_groups(number)
            with timer("policy_training"):
                await asyncio.sleep(run.train_s)
                for tokens in run.train_parts:
                    with span("micro_batch", "policy", num_tokens=tokens):
                        await asyncio.sleep(run.part_s(tokens))
            with timer("weight_sync"):
                await asyncio.sleep(run.refit_s)
    await source.close()


def _engine_by_tokens(run: Simulated) -> FakeGeneration:
    free = asyncio.Semaphore(run.slots)

    async def latency(request: GenerationRequest) -> None:
        async with free:
            await asyncio.sleep(run.token_s * len(sample(request, VOCAB_SIZE).token_ids))

    return FakeGeneration(vocab_size=VOCAB_SIZE, latency=latency)


def _source(run: Simulated, generation: FakeGeneration) -> SyncSource | AsyncSource:
    batching = BatchingConfig(max_batch_size=1, max_calls=run.environment_calls)
    environment = CheckedEnvironment(FakeEnvironment(before=_sleeper(run.environment_s)), None, batching)
    scoring = Scoring({"game": [WeightedScorer("judge", _scorer(run), 1.0)] if run.score_s else []})
    rollouts = dependencies(generation, {"game": environment}, limits=LIMITS, scoring=scoring)
    prompts = [prompt(i) for i in range(run.num_groups * run.num_steps)]
    loader = PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1)
    sizes = {"num_prompts_per_step": run.num_groups, "num_generations_per_prompt": GROUP, "failures": RolloutConfig()}
    if run.age is None:
        return SyncSource(loader, rollouts, OPTIONS, **sizes)
    return AsyncSource(
        loader,
        rollouts,
        OPTIONS,
        **sizes,
        max_age_steps=run.age,
        stale_groups="wait",
        max_generation_failures=10,
        num_steps=run.num_steps,
    )


def _sleeper(seconds: float) -> Callable[[Any], Any] | None:
    return None if not seconds else lambda _: asyncio.sleep(seconds)


def _scorer(run: Simulated) -> FakeScorer:
    calls = None if run.score_calls is None else asyncio.Semaphore(run.score_calls)

    async def wait(requests: Any) -> None:
        async with calls or nullcontext():
            await asyncio.sleep(run.score_s)

    return FakeScorer(before=wait)
