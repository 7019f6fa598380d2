"""Validation: rollouts of held-out prompts, with one call of each environment a turn."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.experience.pass_at_k import pass_at_k
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_rollouts
from nemo_rl.experience.rollout_metrics import response_fault_rates
from nemo_rl.experience.rollouts import run_multi_turn_rollout, run_multi_turn_rollout_async_generation
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.types import Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

CORRECT_TOLERANCE = 1e-6  # ten rewards of 0.1 add up to 1 - 1e-16


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Metrics without their prefix, and the rollouts that they were computed from."""

    metrics: dict[str, float]
    trajectories: tuple[Trajectory, ...]  # rollouts of the pass at the validation temperature


@dataclass(frozen=True, slots=True)
class Validator:
    """Measures the policy that the engine holds on every validation set."""

    prompt_sets: tuple[PromptSet, ...]
    dependencies: RolloutDependencies
    sampling: SamplingParams  # includes the validation temperature
    seed: int
    num_generations_per_prompt: int
    batch_size: int  # prompts generated at once
    max_samples: int | None  # prompts of each set; None: all
    greedy: bool  # a second pass at temperature 0, one generation a prompt
    correct_reward: float | None  # lowest reward of a correct rollout; None: accuracy is not measured

    async def validate(self) -> ValidationResult:
        """Run every set. A failed rollout counts as a wrong answer, and is counted (`score_rollouts`).

        Metrics: `reward` (mean), `accuracy` (share of correct rollouts), `avg_length` (generated tokens), `pass_<k>`
        with several generations, `greedy_reward`, `greedy_accuracy`, `num_failed`, and if rollouts failed
        `reward_without_failed`, `accuracy_without_failed` and `greedy_num_failed`; with several sets also `<set>/...`
        each, and the plain names are means over the sets.
        """
        by_set: dict[str, dict[str, float]] = {}
        all_trajectories: list[Trajectory] = []
        for prompt_set in self.prompt_sets:
            prompts = prompt_set.prompts[: self.max_samples]
            sampled = await self._rollouts(prompts, self.num_generations_per_prompt, self.sampling)
            metrics = sampled_metrics(sampled, self.num_generations_per_prompt, self.correct_reward)
            if self.greedy:
                greedy = await self._rollouts(prompts, 1, self.sampling.greedy())
                metrics |= greedy_metrics(greedy, self.correct_reward)
            _log_failed(prompt_set.name, metrics)
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


def score_rollouts(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return one reward per rollout; a failed one counts as wrong: the lowest reward of the others, at most 0.

    Example: rewards 1, -1 and a failure give 1, -1, -1; five of 1 and 95 failures have the mean 0.05.
    """
    rewards = [None if t.failure else t.reward for t in trajectories]
    wrong = min((0.0, *(reward for reward in rewards if reward is not None)))
    return [wrong if reward is None else reward for reward in rewards]


def measure_accuracy(trajectories: Sequence[Trajectory], correct_reward: float | None) -> dict[str, float]:
    """Return `accuracy`, the share of rollouts whose reward is at least `correct_reward`; {} if that is None."""
    if correct_reward is None:
        return {}
    correct = [t.failure is None and t.reward >= correct_reward - CORRECT_TOLERANCE for t in trajectories]
    return {"accuracy": statistics.fmean(correct)}


def sampled_metrics(
    trajectories: Sequence[Trajectory], num_generations: int, correct_reward: float | None
) -> dict[str, float]:
    """Return the metrics of one set's sampled pass; `trajectories` has `num_generations` in a row for each prompt."""
    survivors = [t for t in trajectories if t.failure is None]
    scores = score_rollouts(trajectories)
    metrics = {"num_failed": float(len(trajectories) - len(survivors)), "reward": statistics.fmean(scores)}
    metrics |= measure_accuracy(trajectories, correct_reward) | response_fault_rates(trajectories)
    if num_generations > 1:
        starts = range(0, len(scores), num_generations)
        pass_values = [pass_at_k(scores[start : start + num_generations], num_generations) for start in starts]
        metrics[f"pass_{num_generations}"] = statistics.fmean(pass_values)
    metrics["avg_length"] = statistics.fmean(t.num_generated_tokens for t in survivors) if survivors else 0.0
    if survivors and len(survivors) < len(trajectories):
        without = {"reward": statistics.fmean(t.reward for t in survivors)}
        without |= measure_accuracy(survivors, correct_reward)
        metrics |= {f"{name}_without_failed": value for name, value in without.items()}
    return metrics


def greedy_metrics(trajectories: Sequence[Trajectory], correct_reward: float | None) -> dict[str, float]:
    """Return mean reward and accuracy of the greedy pass, and the number of failed rollouts, if any."""
    num_failed = sum(t.failure is not None for t in trajectories)
    metrics = {"reward": statistics.fmean(score_rollouts(trajectories))}
    metrics |= measure_accuracy(trajectories, correct_reward) | (
        {"num_failed": float(num_failed)} if num_failed else {}
    )
    return {f"greedy_{name}": value for name, value in metrics.items()}


def _log_failed(name: str, metrics: Mapping[str, float]) -> None:
    """Log one line if rollouts of the set failed."""
    num_failed = int(metrics["num_failed"]), int(metrics.get("greedy_num_failed", 0))
    if any(num_failed):
        without = metrics.get("reward_without_failed")
        logger.warning(
            "validation set %s: %d failed rollouts count as wrong (greedy pass: %d): reward %.4f%s",
            name or "(no name)",
            *num_failed,
            metrics["reward"],
            "" if without is None else f", without them {without:.4f}",
        )


def average_over_sets(by_set: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics of a single set; of several, each set's under its name and the means over the sets."""
    if len(by_set) == 1:
        return dict(next(iter(by_set.values())))
    names = sorted({name for metrics in by_set.values() for name in metrics})
    no_faults = {name: 0.0 for name in names if name.startswith("response_faults/")}  # absent from a set without them
    by_set = {name: no_faults | metrics for name, metrics in by_set.items()}
    means = {name: statistics.fmean(m[name] for m in by_set.values() if name in m) for name in names}
    return means | {f"{s}/{name}": value for s, metrics in by_set.items() for name, value in metrics.items()}
