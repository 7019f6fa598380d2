"""Real vLLM samples, a reward model in a process of its own scores: the one while the other still works."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.registry import make_environment
from nemo_rl.experience.rollouts import (
    RolloutDependencies,
    RolloutJob,
    RolloutLimits,
    RolloutOptions,
    run_async_multi_turn_rollout,
)
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.launch.dependencies import open_scorers
from nemo_rl.types import Message, Prompt, SamplingParams, Trajectory
from tests.contracts.engines import MAX_MODEL_LEN
from tests.contracts.test_reward_model import save
from tests.templates import byte_tokenizer

NUM_ROLLOUTS = 24


@dataclass
class Timeline:
    """When each generation ended, and when each score was asked for and had."""

    generated: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)


class TimedGeneration:
    def __init__(self, engine: Any, timeline: Timeline) -> None:
        self._engine = engine
        self._timeline = timeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[Any]:
        async for result in self._engine.generate(requests):
            self._timeline.generated.append(time.monotonic())
            yield result


class TimedScorer:
    def __init__(self, scorer: Scorer, timeline: Timeline) -> None:
        self._scorer = scorer
        self._timeline = timeline

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Any]:
        self._timeline.asked.append(time.monotonic())
        scores = await self._scorer.score(requests)
        self._timeline.scored.append(time.monotonic())
        return scores

    async def close(self) -> None:
        await self._scorer.close()


def config_of(folder: Path) -> GRPORunConfig:
    """Make a pool of two processes for one reward model."""
    return GRPORunConfig.model_validate(
        {
            "grpo": {},
            "policy": {"model_name": "none", "device": "cpu"},
            "data": {"train": {"dataset_name": "jsonl"}},
            "env": {"chat": {"type": "reward_model", "scorers": ["rm"]}},
            "scorers": {"rm": {"type": "reward_model", "model_name": str(folder), "device": "cpu", "weight": 2.0}},
            "reward_model": {"enable": True, "enable_resource_pool": True, "n_gpus_per_node": 2, "nnodes": 1},
        }
    )


def jobs() -> list[RolloutJob]:
    prompts = [Prompt(str(i), "chat", (Message("user", f"question {i}"),)) for i in range(NUM_ROLLOUTS)]
    return [RolloutJob(prompt, prompt.prompt_id, 0) for prompt in prompts]


async def rolled_out(engine: Any, folder: Path, timeline: Timeline) -> tuple[Trajectory, ...]:
    """Half of the rollouts say much more than the others, so that their ends are far apart."""
    config = config_of(folder)
    encoder = ChatEncoder(byte_tokenizer("chatml"))
    async with AsyncExitStack() as stack:
        scoring = await open_scorers(config, None, stack)
        (weighted,) = scoring.by_task["chat"]
        scoring = Scoring({"chat": (WeightedScorer("rm", TimedScorer(weighted.scorer, timeline), weighted.weight),)})
        dependencies = RolloutDependencies(
            generation=TimedGeneration(engine, timeline),  # type: ignore[arg-type]
            environments={"chat": make_environment("chat", config.env["chat"])},
            encoder=encoder,
            limits=RolloutLimits(max_turns=1, max_total_length=MAX_MODEL_LEN),
            scoring=scoring,
        )
        longer, shorter = RolloutOptions(SamplingParams(60), seed=0), RolloutOptions(SamplingParams(2), seed=0)
        parts = await asyncio.gather(
            run_async_multi_turn_rollout(jobs()[::3], dependencies, longer),
            run_async_multi_turn_rollout(jobs()[1::3], dependencies, shorter),
        )
        return (*parts[0], *parts[1])


def test_scoring_begins_while_vllm_still_generates(engines: Any, engine_loop: asyncio.Runner, tmp_path: Path) -> None:
    save(tmp_path)
    timeline = Timeline()
    trajectories = engine_loop.run(rolled_out(engines("vllm", "tied"), tmp_path, timeline))
    assert [trajectory.failure for trajectory in trajectories if trajectory.failure] == []
    assert all(set(trajectory.rewards) == {"rm"} for trajectory in trajectories)
    assert len({round(trajectory.reward, 4) for trajectory in trajectories}) > 1
    assert len(timeline.scored) == len(timeline.asked) == len(trajectories)
    assert min(timeline.asked) < max(timeline.generated)  # overlap
    assert min(timeline.scored) < max(timeline.scored)
