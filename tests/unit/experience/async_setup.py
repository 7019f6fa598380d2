"""An AsyncSource over fakes in virtual time; each test names what matters to it."""

import asyncio
from collections.abc import Callable
from typing import Literal

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.data.prompt_screen import PromptScreen
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollout_dependencies import RolloutLimits
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.interfaces import GroupSource
from nemo_rl.types import CollectedGroups, GenerationRequest
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, prompt

STALL_S = 1000.0
LIMITS = RolloutLimits(
    max_turns=1,
    max_total_length=80,
    generation_timeout_s=1e12,
    max_retries=0,
    retry_backoff_s=0.0,
    stall_timeout_s=STALL_S,
)
Seconds = Callable[[int, int], float]  # of the prompt's place and the generation's index


def engine(seconds: Seconds = lambda place, index: 1.0, *, is_async: bool = True, slots: int = 10**6):
    """A FakeGeneration that takes these seconds a request, at most `slots` requests at once."""
    free = asyncio.Semaphore(slots)

    async def latency(request: GenerationRequest) -> None:
        _, _, place, index, _ = request.request_id.split(":")
        async with free:
            await asyncio.sleep(seconds(int(place), int(index)))

    return FakeGeneration(vocab_size=VOCAB_SIZE, is_async=is_async, latency=latency)


def async_source(
    generation: FakeGeneration | None = None,
    environment: FakeEnvironment | None = None,
    *,
    num_prompts: int = 12,
    epochs: int = 1,
    batch: int = 2,
    group: int = 2,
    age: int = 1,
    stale_groups: Literal["wait", "drop", "trim"] = "wait",
    min_group_size: int = 1,
    max_generation_failures: int = 10,
    failures: RolloutConfig | None = None,
    writer: RolloutWriter | None = None,
    num_steps: int | None = None,
    screen: PromptScreen | None = None,
) -> AsyncSource:
    prompts = [prompt(i) for i in range(num_prompts)]
    return AsyncSource(
        PromptLoader(prompts, shuffle=False, seed=0, max_epochs=epochs, screen=screen),
        dependencies(generation or engine(), {"game": environment or FakeEnvironment()}, limits=LIMITS),
        OPTIONS,
        num_prompts_per_step=batch,
        num_generations_per_prompt=group,
        max_age_steps=age,
        stale_groups=stale_groups,
        min_group_size=min_group_size,
        max_generation_failures=max_generation_failures,
        failures=failures or RolloutConfig(),
        writer=writer,
        num_steps=num_steps,
    )


async def step(source: GroupSource, generation: FakeGeneration, weight_version: int) -> CollectedGroups:
    """As the loop: the engine holds the version that the groups are asked for."""
    generation.weight_version = weight_version
    return await source.next_groups(weight_version)


def names(collected: CollectedGroups) -> list[str]:
    """Prompt ids."""
    return [group.prompt.prompt_id for group in collected.groups]


def places_asked(generation: FakeGeneration) -> list[int]:
    """Places of the prompts whose rollouts have started, in order."""
    return list(dict.fromkeys(int(request.request_id.split(":")[2]) for request in generation.requests))
