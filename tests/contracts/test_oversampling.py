"""Over-sampling on a real engine: what a step does not need is cancelled there, and sampled again by the next step."""

import asyncio
from collections.abc import Sequence
from typing import Any

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.experience.rollout_dependencies import RolloutLimits, RolloutOptions
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.types import CollectedGroups, EnvStep, Message, SamplingParams
from tests.contracts.engines import VOCAB_SIZE
from tests.fakes.encoder import FakeEncoder
from tests.fakes.environments import FakeEnvironment
from tests.unit.experience.rollout_setup import dependencies, prompt

TURNS = 10_000  # of a slow rollout, cut at 500 tokens; those of the others have one turn


class AnyTokenEncoder(FakeEncoder):
    """Decodes tokens beyond the fake alphabet, which the engine samples too."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "a" * len(token_ids)


def test_slow_rollouts_are_cancelled_in_the_engine_and_sampled_by_the_next_step(
    engines: Any, engine_loop: asyncio.Runner
) -> None:
    engine = engines("vllm", "tied")
    is_slow = {"question0": True}

    def answer(conversation: Sequence[Message], state: Any) -> EnvStep:
        question = conversation[0].content
        if is_slow.get(question, False):
            return EnvStep(observation=(Message("user", "more"),), rewards={"turn": 1.0}, done=False, state=state)
        return EnvStep(rewards={"turn": 1.0})

    source = SyncSource(
        PromptLoader([prompt(i) for i in range(5)], shuffle=False, seed=0, max_epochs=1),
        dependencies(
            engine,
            {"game": FakeEnvironment(answer)},
            limits=RolloutLimits(max_turns=TURNS, max_total_length=500),
            encoder=AnyTokenEncoder(),
        ),
        RolloutOptions(SamplingParams(max_new_tokens=2, stop_token_ids=tuple(range(VOCAB_SIZE))), seed=7),
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        failures=RolloutConfig(oversample=1.5),
        min_group_size=2,
    )

    async def main() -> tuple[CollectedGroups, CollectedGroups]:
        first = await source.next_groups(0)
        is_slow["question0"] = False
        return first, await source.next_groups(1)

    first, second = engine_loop.run(main())
    assert [group.prompt.prompt_id for group in first.groups] == ["p1", "p2"]
    assert first.metrics["oversampling/cancelled_groups"] == 1
    assert "p0" in [group.prompt.prompt_id for group in second.groups]
    trajectories = [t for step in (first, second) for group in step.groups for t in group.trajectories]
    assert len(trajectories) == 8
    assert all(t.failure is None and t.reward == 1.0 for t in trajectories)
