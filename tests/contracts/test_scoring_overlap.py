"""Real vLLM samples and a pool of processes scores: at the same time, as a shared device does, after its death too."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.registry import make_environment
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_rollouts
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.launch.rollout_layer import open_scorers
from nemo_rl.types import FailureClass, Message, Prompt, SamplingParams, Trajectory
from tests.contracts.engines import MAX_MODEL_LEN
from tests.contracts.test_reward_model import TOLERANCE, save
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
    """A scorer whose progress is counted."""

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


def actors() -> set[int]:
    """Return the ids of the processes of this process's actors."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            found |= {process.pid} if "_ActorHost" in " ".join(process.cmdline()) else set()
    return found


class KillingScorer:
    """A scorer whose pool, the processes of these ids, is killed when it is first asked."""

    def __init__(self, scorer: Scorer, pool: set[int]) -> None:
        self._scorer = scorer
        self._pool = pool
        self.was_killed = False

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[Any]:
        if not self.was_killed:
            self.was_killed = True
            for pid in self._pool:
                os.kill(pid, signal.SIGKILL)
        return await self._scorer.score(requests)

    async def close(self) -> None:
        await self._scorer.close()


POOL = {"enable_resource_pool": True, "n_gpus_per_node": 2, "nnodes": 1}


def config_of(directory: Path, placement: dict[str, Any]) -> GRPORunConfig:
    """Make a recipe of one reward model; with POOL in two processes."""
    return GRPORunConfig.model_validate(
        {
            "grpo": {},
            "policy": {"model_name": "none", "device": "cpu"},
            "data": {"train": {"dataset_name": "jsonl"}},
            "env": {"chat": {"type": "reward_model", "scorers": ["rm"]}},
            "scorers": {"rm": {"type": "reward_model", "model_name": str(directory), "device": "cpu", "weight": 2.0}},
            "reward_model": {"enable": True, **placement},
        }
    )


def jobs() -> list[RolloutJob]:
    prompts = [Prompt(str(i), "chat", (Message("user", f"question {i}"),)) for i in range(NUM_ROLLOUTS)]
    return [RolloutJob(prompt, prompt.prompt_id, 0) for prompt in prompts]


@asynccontextmanager
async def opened(engine: Any, directory: Path, placement: dict[str, Any]) -> AsyncIterator[RolloutDependencies]:
    """Open the scorer with this placement; without a pool it scores after the last rollout, as on a shared device."""
    config = config_of(directory, placement)
    async with AsyncExitStack() as stack:
        scoring = await open_scorers(config, stack)
        yield RolloutDependencies(
            generation=engine,
            environments={"chat": make_environment("chat", config.env["chat"])},
            encoder=ChatEncoder(byte_tokenizer("chatml")),
            limits=RolloutLimits(max_turns=1, max_total_length=MAX_MODEL_LEN),
            scoring=scoring if placement else replace(scoring, turn=nullcontext),
        )


def with_scorer(dependencies: RolloutDependencies, wrap: Callable[[Scorer], Any]) -> RolloutDependencies:
    (weighted,) = dependencies.scoring.by_task["chat"]
    return replace(dependencies, scoring=Scoring({"chat": (replace(weighted, scorer=wrap(weighted.scorer)),)}))


async def rolled_out(dependencies: RolloutDependencies) -> tuple[Trajectory, ...]:
    options = RolloutOptions(SamplingParams(40), seed=0)
    return await run_rollouts(jobs(), dependencies, options, run_async_multi_turn_rollout)


def rewards_of(trajectories: Sequence[Trajectory]) -> list[float]:
    assert [trajectory.failure for trajectory in trajectories if trajectory.failure] == []
    return [trajectory.rewards["rm"] for trajectory in trajectories]


@pytest.mark.slow  # tests/unit/experience/test_scoring.py has its order with other engines
def test_scoring_begins_while_vllm_still_generates(engines: Any, engine_loop: asyncio.Runner, tmp_path: Path) -> None:
    """Otherwise all responses but the first would wait for a score until their deadline."""
    save(tmp_path)
    progress = Progress()
    waiting: Any = WaitingGeneration(engines("vllm", "tied"), progress)

    async def main() -> tuple[Trajectory, ...]:
        async with opened(waiting, tmp_path, POOL) as dependencies:
            return await rolled_out(with_scorer(dependencies, lambda scorer: CountedScorer(scorer, progress)))

    rewards = rewards_of(engine_loop.run(main()))
    assert len({round(reward, 4) for reward in rewards}) > 1
    assert progress.num_scored == progress.num_generated == len(rewards)


@pytest.mark.slow  # starts engines and a pool three times
def test_pool_scores_as_a_shared_device_does_and_survives_its_death(
    engines: Any, engine_loop: asyncio.Runner, tmp_path: Path
) -> None:
    save(tmp_path)
    engine = engines("vllm", "tied")

    async def main() -> tuple[tuple[Trajectory, ...], ...]:
        async with opened(engine, tmp_path, {}) as dependencies:
            shared = await rolled_out(dependencies)
        before = actors()
        async with opened(engine, tmp_path, POOL) as dependencies:
            pool = actors() - before
            assert len(pool) == 2
            pooled = await rolled_out(dependencies)
            hit = await rolled_out(with_scorer(dependencies, lambda scorer: KillingScorer(scorer, pool)))
            next_call = await rolled_out(dependencies)  # which an idle process's death is noticed by
            return shared, pooled, hit, next_call, await rolled_out(dependencies)

    shared, pooled, *deaths, again = engine_loop.run(main())
    said = [trajectory.message_log[-1].token_ids for trajectory in shared]
    assert [trajectory.message_log[-1].token_ids for trajectory in pooled] == said
    expected = rewards_of(shared)
    assert rewards_of(pooled) == pytest.approx(expected, abs=TOLERANCE)
    assert any(trajectory.failure for trajectory in deaths[0])
    for index, trajectory in [pair for each in deaths for pair in enumerate(each)]:
        if trajectory.failure is None:
            assert trajectory.rewards["rm"] == pytest.approx(expected[index], abs=TOLERANCE)
        else:
            assert trajectory.failure.failure_class is FailureClass.REWARD
            assert trajectory.rewards == {}
    assert rewards_of(again) == pytest.approx(expected, abs=TOLERANCE)
