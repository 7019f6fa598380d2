"""The source of dynamic sampling: it collects until enough groups are informative."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.prompt_screen import SCREENED
from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_dispatch import flatten_groups
from nemo_rl.experience.rollout_metrics import age_metrics, rollout_metrics
from nemo_rl.experience.sync_source import ReturnGroups, drop_all_groups
from nemo_rl.interfaces import GroupSource
from nemo_rl.types import CollectedGroups, TrajectoryGroup

# Metrics of a source, other than those of its rollouts: over the batches of a step
SUMMED_PREFIXES = (
    "efficiency/exposed_wait_s/",
    "replay_buffer/dropped_groups",
    "replay_buffer/given_up_rollouts",
    "oversampling/",
    *SCREENED,
)
LATEST_VALUE_PREFIXES = ("efficiency/", "replay_buffer/")


@dataclass(slots=True)
class _StepAccumulator:
    """The groups that dynamic sampling has gathered for one step."""

    kept: list[TrajectoryGroup] = field(default_factory=list)
    seen: list[TrajectoryGroup] = field(default_factory=list)
    num_batches: int = 0
    background: dict[str, float] = field(default_factory=dict)  # metrics of the source, not of its rollouts

    def add(self, collected: CollectedGroups, is_kept: Callable[[TrajectoryGroup], bool]) -> None:
        self.num_batches += 1
        self.seen += collected.groups
        self.kept += (group for group in collected.groups if is_kept(group))
        for name, value in collected.metrics.items():
            if name.startswith(SUMMED_PREFIXES):
                self.background[name] = self.background.get(name, 0.0) + value
            elif name.startswith(LATEST_VALUE_PREFIXES):
                self.background[name] = value


class FilteredSource:
    """Dynamic sampling (DAPO, arXiv 2503.14476): only groups that teach something, whatever it takes to find them.

    Batches of `inner` are drawn until `num_prompts_per_step` groups have `min_group_size` survivors and are
    informative: their raw rewards differ. After `max_gen_batches` batches it gives up. What is left over in the last
    batch is given back if `inner` can train on it later, else dropped and counted. `inner` may draw more prompts at
    once than a step has: `prompts_per_batch`.
    """

    def __init__(
        self,
        inner: GroupSource,
        *,
        return_groups: ReturnGroups | None = None,
        is_informative: Callable[[TrajectoryGroup], bool],
        num_prompts_per_step: int,
        max_gen_batches: int,
        min_group_size: int,
    ) -> None:
        self._inner = inner
        self._return_groups = return_groups or drop_all_groups
        self._is_informative = is_informative
        self._num_prompts = num_prompts_per_step
        self._max_gen_batches = max_gen_batches
        self._min_group_size = min_group_size

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return a full step, or the rest of the dataset. Raises RolloutError after `max_gen_batches` batches."""
        accumulator = _StepAccumulator()
        try:
            await self._fill_step(accumulator, weight_version)
        except BaseException:
            self._return_groups(accumulator.kept, next_version=weight_version)
            raise
        kept, surplus = accumulator.kept[: self._num_prompts], accumulator.kept[self._num_prompts :]
        lost = self._return_groups(surplus, next_version=weight_version + 1)
        metrics = self._metrics(accumulator, kept, lost) | age_metrics(flatten_groups(kept), weight_version)
        return CollectedGroups(tuple(kept), metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        return self._inner.hold(until_idle=until_idle)

    async def close(self) -> None:
        await self._inner.close()

    async def _fill_step(self, accumulator: _StepAccumulator, weight_version: int) -> None:
        while len(accumulator.kept) < self._num_prompts:
            if accumulator.num_batches == self._max_gen_batches:
                raise RolloutError(self._too_few_message(accumulator))
            try:
                accumulator.add(await self._inner.next_groups(weight_version), self._is_kept)
            except StopAsyncIteration:
                if not accumulator.kept:
                    raise
                return

    def _is_kept(self, group: TrajectoryGroup) -> bool:
        return len(group.survivors) >= self._min_group_size and self._is_informative(group)

    def _metrics(
        self, accumulator: _StepAccumulator, kept: Sequence[TrajectoryGroup], lost: Sequence[TrajectoryGroup]
    ) -> dict[str, float]:
        """Return metrics of all rollouts and of the filter: `reward` is before it, `filtered_reward` after it."""
        return rollout_metrics(flatten_groups(accumulator.seen)) | {
            **accumulator.background,
            "dynamic_sampling_num_gen_batches": float(accumulator.num_batches),
            "dynamic_sampling_num_discarded_valid_samples": float(len(flatten_groups(lost))),
            "reward": _mean_reward(accumulator.seen),
            "filtered_reward": _mean_reward(kept),
        }

    def _too_few_message(self, accumulator: _StepAccumulator) -> str:
        return (
            f"{len(accumulator.kept)} of a step's {self._num_prompts} groups have rewards that differ, after "
            f"{accumulator.num_batches} batches (grpo.dynamic_sampling_max_gen_batches) of "
            f"{len(accumulator.seen)} prompts: "
            "the task is too easy or too hard for the policy, or grpo.num_generations_per_prompt is too small"
        )


def _mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the mean reward of the survivors; a step has some."""
    rewards = [trajectory.reward for group in groups for trajectory in group.survivors]
    return sum(rewards) / len(rewards)
