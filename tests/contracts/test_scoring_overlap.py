"""Real vLLM samples, a reward model in a process of its own scores: the one while the other still works."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.registry import make_environment
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.launch.rollout_layer import open_scorers
from nemo_rl.types import Message, Prompt, SamplingParams, Trajectory
from tests.contracts.engines import MAX_MODEL_LEN
from tests.contracts.test_reward_model import save
from tests.templates import byte_tokenizer

NUM_ROLLOUTS = 16
DEADLINE_S = 200.0


@dataclass
class Progress:
    """What has happened so far."""

    num_generated: int = 0
    num_scored: int = 0
    is_scored: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingGeneration:
    """An engine whose responses but the first are not handed out before the first score is there."""

    def __init__(self, engine: Any, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[Any]:
        async for result in self._engine.generate(requests):
            self._progress.num_generated += 1
            if self._progress.num_generated > 1:
                await asyncio.wait_for(self._progress.is_scored.wait(), DEADLINE_S)
            yield result


class CountedScorer:
    def __init__(self, scorer: Scorer, progress: Progress) -> None:
        self._scorer = scorer
        self._progress = progress

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Any]:
        scores = await self._scorer.score(requests)
        self._progress.num_scored += len(scores)
        self._progress.is_scored.set()
        return scores

    async def close(self) -> None:
        await self._scorer.close()


def config_of(directory: Path) -> GRPORunConfig:
    """Make a pool of two processes for one reward model."""
    return GRPORunConfig.model_validate(
        {
            "grpo": {},
            "policy": {"model_name": "none", "device": "cpu"},
            "data": {"train": {"dataset_name": "jsonl"}},
            "env": {"chat": {"type": "reward_model", "scorers": ["rm"]}},
            "scorers": {"rm": {"type": "reward_model", "model_name": str(directory), "device": "cpu", "weight": 2.0}},
            "reward_model": {"enable": True, "enable_resource_pool": True, "n_gpus_per_node": 2, "nnodes": 1},
        }
    )


def jobs() -> list[RolloutJob]:
    prompts = [Prompt(str(i), "chat", (Message("user", f"question {i}"),)) for i in range(NUM_ROLLOUTS)]
    return [RolloutJob(prompt, prompt.prompt_id, 0) for prompt in prompts]


async def rolled_out(engine: Any, directory: Path, progress: Progress) -> tuple[Trajectory, ...]:
    config = config_of(directory)
    encoder = ChatEncoder(byte_tokenizer("chatml"))
    async with AsyncExitStack() as stack:
        scoring = await open_scorers(config, stack)
        (weighted,) = scoring.by_task["chat"]
        scoring = Scoring({"chat": (WeightedScorer("rm", CountedScorer(weighted.scorer, progress), weighted.weight),)})
        dependencies = RolloutDependencies(
            generation=WaitingGeneration(engine, progress),  # type: ignore[arg-type]
            environments={"chat": make_environment("chat", config.env["chat"])},
            encoder=encoder,
            limits=RolloutLimits(max_turns=1, max_total_length=MAX_MODEL_LEN),
            scoring=scoring,
        )
        return await run_async_multi_turn_rollout(jobs(), dependencies, RolloutOptions(SamplingParams(40), seed=0))


def test_scoring_begins_while_vllm_still_generates(engines: Any, engine_loop: asyncio.Runner, tmp_path: Path) -> None:
    """Otherwise all responses but the first would wait for a score until their deadline."""
    save(tmp_path)
    progress = Progress()
    trajectories = engine_loop.run(rolled_out(engines("vllm", "tied"), tmp_path, progress))
    assert [trajectory.failure for trajectory in trajectories if trajectory.failure] == []
    assert all(set(trajectory.rewards) == {"rm"} for trajectory in trajectories)
    assert len({round(trajectory.reward, 4) for trajectory in trajectories}) > 1
    assert progress.num_scored == progress.num_generated == len(trajectories)
