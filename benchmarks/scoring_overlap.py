"""Measurement of how well scoring overlaps generation: each rollout is scored as it ends.

A simulated engine (slots, first in, first out, heavy-tailed times) and a simulated reward model that computes one
batch at a time, at a fixed cost a conversation. The bar is max(generate, score) + one batch, times 1.05; "one after the
other" scores the same rollouts after the last one.

    python benchmarks/scoring_overlap.py [--samples 1000] [--slots 64]
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from rollout_schedule import (
    GENERATION_S,
    OPTIONS,
    SimulatedEngine,
    SimulatedEnvironment,
    draw_trace,
    jobs_of,
    make_dependencies,
    simulate,
)

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.scorers.checked_scorer import BatchedScorer
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.types import ScoreRequest

BATCH = 16


class SimulatedRewardModel:
    """One batch at a time, `seconds_each` a conversation."""

    def __init__(self, seconds_each: float) -> None:
        self._seconds_each = seconds_each
        self._device = asyncio.Lock()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        async with self._device:
            await asyncio.sleep(self._seconds_each * len(requests))
        return [1.0] * len(requests)

    async def close(self) -> None: ...


async def measured(num_samples: int, slots: int, seconds_each: float) -> tuple[float, float]:
    """Seconds of all rollouts with their scores, and the mean size of a batch."""
    trace = draw_trace(num_samples, 1, "heavy-tailed")
    trace = replace(trace, environment_s=[[0.0]] * num_samples)
    batching = BatchingConfig(enabled=True, max_batch_size=BATCH, max_wait_ms=20, max_calls=1)
    scorer = BatchedScorer(SimulatedRewardModel(seconds_each), batching, timeout_s=None)
    dependencies = make_dependencies(
        SimulatedEngine(trace, slots), SimulatedEnvironment(1, lambda sample, turn: 0.0), 1
    )
    dependencies = replace(dependencies, scoring=Scoring({"game": (WeightedScorer("rm", scorer, 1.0),)}))
    started = time.perf_counter()
    trajectories = await run_async_multi_turn_rollout(jobs_of(num_samples), dependencies, OPTIONS)
    seconds = time.perf_counter() - started
    assert all("rm" in trajectory.rewards for trajectory in trajectories)
    await scorer.close()
    return seconds, scorer.mean_batch_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=64)
    arguments = parser.parse_args()
    trace = draw_trace(arguments.samples, 1, "heavy-tailed")
    generate_s = simulate(replace(trace, environment_s=[[0.0]] * arguments.samples), arguments.slots)
    print(f"{arguments.samples} rollouts of {GENERATION_S:g} s, {arguments.slots} at once, batches of {BATCH}\n")
    print("| generate s | score s | one after the other s | measured s | measured / (max + one batch) | mean batch |")
    print("|---|---|---|---|---|---|")
    for share in (0.25, 0.5, 1.0, 2.0):
        score_s = share * generate_s
        seconds_each = score_s / arguments.samples
        seconds, mean_batch = asyncio.run(measured(arguments.samples, arguments.slots, seconds_each))
        bound = max(generate_s, score_s) + BATCH * seconds_each
        print(
            f"| {generate_s:.3f} | {score_s:.3f} | {generate_s + score_s:.3f} | {seconds:.3f} "
            f"| {seconds / bound:.3f} | {mean_batch:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
