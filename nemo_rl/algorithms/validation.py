"""Validation: rollouts of held-out prompts, with one call of each environment a turn."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemo_rl.data.datasets import PromptSet
from nemo_rl.experience.records import pass_at_k
from nemo_rl.experience.rollouts import (
    RolloutDependencies,
    RolloutJob,
    RolloutOptions,
    run_multi_turn_rollout,
    run_multi_turn_rollout_async_generation,
)
from nemo_rl.experience.sources import run_rollouts
from nemo_rl.types import Prompt, SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Metrics without their prefix, and the rollouts that they were computed from."""

    metrics: dict[str, float]
    trajectories: tuple[Trajectory, ...]  # of the pass at the validation temperature


@dataclass(frozen=True, slots=True)
class Validator:
    """Measures the policy that the engine holds on every validation set."""

    prompt_sets: tuple[PromptSet, ...]
    dependencies: RolloutDependencies
    sampling: SamplingParams  # at the validation temperature
    seed: int
    num_generations_per_prompt: int
    batch_size: int  # prompts generated at once
    max_samples: int | None  # prompts of each set; None: all
    greedy: bool  # a second pass at temperature 0, one generation a prompt

    async def validate(self) -> ValidationResult:
        """Run every set. Failed rollouts have no reward: they are excluded from the means and counted.

        Metrics: `accuracy` (mean reward), `avg_length` (generated tokens), `pass_<k>` with several generations,
        `greedy_accuracy`, `num_failed`; with several sets also `<set>/...` each, and the plain names are means over
        the sets.
        """
        by_set: dict[str, dict[str, float]] = {}
        all_trajectories: list[Trajectory] = []
        for prompt_set in self.prompt_sets:
            prompts = prompt_set.prompts[: self.max_samples]
            sampled = await self._rollouts(prompts, self.num_generations_per_prompt, self.sampling)
            metrics = sampled_metrics(sampled, self.num_generations_per_prompt)
            if self.greedy:
                greedy_sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1)
                metrics |= greedy_metrics(await self._rollouts(prompts, 1, greedy_sampling))
            by_set[prompt_set.name] = metrics
            all_trajectories += sampled
        return ValidationResult(average_over_sets(by_set), tuple(all_trajectories))

    async def _rollouts(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams
    ) -> list[Trajectory]:
        is_async = self.dependencies.generation.is_async
        scheduler = run_multi_turn_rollout_async_generation if is_async else run_multi_turn_rollout
        trajectories: list[Trajectory] = []
        for start in range(0, len(prompts), self.batch_size):
            jobs = [
                RolloutJob(prompt=prompt, group_id=prompt.prompt_id, generation_index=index, epoch=0)
                for prompt in prompts[start : start + self.batch_size]
                for index in range(num_generations)
            ]
            options = RolloutOptions(sampling, self.seed, trains=False)
            trajectories += await run_rollouts(jobs, self.dependencies, options, scheduler)
        return trajectories


def sampled_metrics(trajectories: Sequence[Trajectory], num_generations: int) -> dict[str, float]:
    """Return the metrics of one set's sampled pass; `trajectories` has `num_generations` in a row for each prompt."""
    survivors = [t for t in trajectories if t.failure is None]
    metrics = {"num_failed": float(len(trajectories) - len(survivors))}
    if not survivors:
        return metrics
    metrics["accuracy"] = statistics.fmean(t.reward for t in survivors)
    metrics["avg_length"] = statistics.fmean(t.num_generated_tokens for t in survivors)
    if num_generations > 1:
        metrics[f"pass_{num_generations}"] = mean_pass_at_k(trajectories, num_generations)
    return metrics


def mean_pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Return pass@k averaged over the prompts; a prompt with failures is judged by its survivors."""
    values = []
    for start in range(0, len(trajectories), k):
        scores = [t.reward for t in trajectories[start : start + k] if t.failure is None]
        if scores:
            values.append(pass_at_k(scores, min(k, len(scores))))
    return statistics.fmean(values)


def greedy_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reward of the greedy pass, where a rollout survived."""
    survivors = [t for t in trajectories if t.failure is None]
    return {"greedy_accuracy": statistics.fmean(t.reward for t in survivors)} if survivors else {}


def average_over_sets(by_set: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a single set; of several, each set's under its name and the means over the sets."""
    if len(by_set) == 1:
        return dict(next(iter(by_set.values())))
    names = sorted({name for metrics in by_set.values() for name in metrics})
    means = {name: statistics.fmean(m[name] for m in by_set.values() if name in m) for name in names}
    return means | {f"{s}/{name}": value for s, metrics in by_set.items() for name, value in metrics.items()}
