"""Groups of rollouts of all kinds, and the sources of the training loop that collect them.

`run_rollouts` sends prompts of agents and of NeMo Gym to these, all others to a scheduler of turns. A source collects
the groups of one step, or as many batches as dynamic sampling needs.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from nemo_rl.config.run import RolloutConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompts import LoadedPrompt, PromptLoader
from nemo_rl.errors import DataError, RolloutError
from nemo_rl.experience.agent_rollouts import run_agent_rollouts
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.oversampling import FirstComplete, collect_first, num_begun
from nemo_rl.experience.records import RolloutWriter, age_metrics, rollout_metrics
from nemo_rl.experience.replay_buffer import extract_buffer_state
from nemo_rl.experience.rollouts import (
    RolloutDependencies,
    RolloutOptions,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from nemo_rl.experience.supervision import FailureBudget, gather_or_cancel
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.interfaces import CollectedGroups, GroupSource
from nemo_rl.types import Message, Prompt, StopReason, TokenizedMessage, Trajectory, TrajectoryGroup


def make_rollout_jobs(prompts: Iterable[LoadedPrompt], num_generations: int) -> list[RolloutJob]:
    """Make `num_generations` jobs per prompt, one prompt after the other."""
    return [
        RolloutJob(one.prompt, one.group_id, index, one.epoch) for one in prompts for index in range(num_generations)
    ]


def group_trajectories(trajectories: Sequence[Trajectory], num_generations: int) -> tuple[TrajectoryGroup, ...]:
    """Group trajectories that are in the order of `make_rollout_jobs`."""
    groups = []
    for start in range(0, len(trajectories), num_generations):
        members = tuple(trajectories[start : start + num_generations])
        groups.append(TrajectoryGroup(members[0].group_id, members[0].prompt, members))
    return tuple(groups)


def flatten_groups(groups: Iterable[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


Scheduler: TypeAlias = Callable[
    [Sequence[RolloutJob], RolloutDependencies, RolloutOptions], Awaitable[tuple[Trajectory, ...]]
]


async def run_training_rollouts(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each sample alone, or all together if the engine does not generate asynchronously; see `run_rollouts`."""
    scheduler = run_async_multi_turn_rollout if dependencies.generation.is_async else run_multi_turn_rollout
    return await run_rollouts(jobs, dependencies, options, scheduler)


async def run_rollouts(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions, scheduler: Scheduler
) -> tuple[Trajectory, ...]:
    """Return trajectories in the order of `jobs`; `scheduler`, one of rollouts.py, runs those that no agent runs.

    Scorers that share the engine's device have their turn after the last rollout; progress is reported then.
    """
    if dependencies.scoring.turn is None:
        return await _dispatch_jobs(jobs, dependencies, options, scheduler)
    unscored = await _dispatch_jobs(jobs, dependencies, replace(options, progress=None), scheduler)
    scored = await dependencies.scoring.score_batch(unscored, stall_timeout_s=dependencies.limits.stall_timeout_s)
    for before, after in zip(unscored, scored, strict=True):
        if before.failure is None:  # else it is in the log already
            dependencies.failure_log.record(after)
        if options.progress is not None:
            options.progress(after)
    return scored


async def _dispatch_jobs(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions, scheduler: Scheduler
) -> tuple[Trajectory, ...]:
    runners = dict.fromkeys(dependencies.agents, run_agent_rollouts)
    runners |= dict.fromkeys(dependencies.gyms, run_nemo_gym_rollouts)
    job_indices: dict[Scheduler, list[int]] = {}
    for job_index, job in enumerate(jobs):
        job_indices.setdefault(runners.get(job.prompt.task_name, scheduler), []).append(job_index)
    if len(job_indices) == 1:
        return await next(iter(job_indices))(jobs, dependencies, options)

    async def run(part: Scheduler) -> tuple[Trajectory, ...]:
        return await part([jobs[job_index] for job_index in job_indices[part]], dependencies, options)

    parts = await gather_or_cancel(run(part) for part in job_indices)
    by_job_index = {
        p: t
        for part, part_trajectories in zip(job_indices, parts, strict=True)
        for p, t in zip(job_indices[part], part_trajectories, strict=True)
    }
    return tuple(by_job_index[job_index] for job_index in range(len(jobs)))


class ReturnGroups(Protocol):
    """A source that can take groups back for a later step (AsyncSource.give_back)."""

    def __call__(self, groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
        """Take the groups back; return those that are too old to be trained on at `next_version`."""
        ...


def drop_all_groups(groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
    """Return all groups, as a synchronous run must: at the next version all would be too old."""
    return groups


class SyncSource:
    """Rollouts of the next `num_prompts_per_step` prompts, made when they are requested.

    With `rollout.oversample` above 1 more prompts are begun, and a step is the first complete groups of
    `min_group_size` survivors; the prompts of the others are put back. With a `writer`, all rollouts of complete groups
    are written down, whatever becomes of them.
    """

    def __init__(
        self,
        loader: PromptLoader,
        dependencies: RolloutDependencies,
        options: RolloutOptions,
        *,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        failures: RolloutConfig,
        min_group_size: int = 1,
        writer: RolloutWriter | None = None,
    ) -> None:
        self._loader = loader
        self._dependencies = dependencies
        self._options = options
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._failures = failures
        self._min_group_size = min_group_size
        self._num_begun = num_begun(num_prompts_per_step, failures.oversample)
        self._writer = writer

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return one group per prompt, in their order; fewer at the end of the dataset.

        Groups hold their failed rollouts too. Raises RolloutError with the first cause when too many fail, and when
        nothing progresses.
        """
        num_put_back = self._loader.num_put_back
        loaded = self._loader.take(self._num_begun)
        if not loaded:
            raise StopAsyncIteration
        if len(loaded) > self._num_prompts:
            return await self._take_first_complete(loaded, num_put_back, weight_version)
        trajectories = await self._run(make_rollout_jobs(loaded, self._num_generations))
        if self._writer is not None:
            await self._writer.write(weight_version + 1, trajectories)  # the step that trains on them
        metrics = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version)
        return CollectedGroups(group_trajectories(trajectories, self._num_generations), metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() | {"consumed_prompts": self._loader.consumed, "epoch": self._loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; what an asynchronous run had in its buffer is collected again first."""
        self._loader.load_state_dict(state)
        self._loader.put_back(extract_buffer_state(state, self._loader).prompt_indices)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    async def _take_first_complete(
        self, loaded: Sequence[LoadedPrompt], num_put_back: int, weight_version: int
    ) -> CollectedGroups:
        options = self._counting_failures(len(loaded) * self._num_generations)

        async def collect(one: LoadedPrompt) -> TrajectoryGroup:
            jobs = make_rollout_jobs([one], self._num_generations)
            trajectories = await run_training_rollouts(jobs, self._dependencies, options)
            return group_trajectories(trajectories, self._num_generations)[0]

        first = await collect_first(
            loaded,
            collect,
            count=self._num_prompts,
            num_required=min(num_put_back, self._num_prompts),
            min_group_size=self._min_group_size,
        )
        self._loader.put_back(one.prompt_index for one in first.deferred)
        trajectories = flatten_groups((*first.taken, *first.failed))
        if self._writer is not None:
            await self._writer.write(weight_version + 1, trajectories)  # the step that trains on those taken
        metrics = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version)
        return CollectedGroups(first.taken, metrics | self._oversampling_metrics(len(loaded), first))

    def _oversampling_metrics(self, num_groups: int, first: FirstComplete) -> dict[str, float]:
        num_cancelled = len(first.deferred) - len(first.discarded)
        return {
            "oversampling/begun_groups": float(num_groups),
            "oversampling/deferred_groups": float(len(first.deferred)),
            "oversampling/discarded_rollouts": float(len(flatten_groups(first.discarded))),
            "oversampling/cancelled_groups": float(num_cancelled),
        }

    async def _run(self, jobs: Sequence[RolloutJob]) -> tuple[Trajectory, ...]:
        return await run_training_rollouts(jobs, self._dependencies, self._counting_failures(len(jobs)))

    def _counting_failures(self, num_rollouts: int) -> RolloutOptions:
        """Return options that end a step of `num_rollouts` when too many of them fail."""
        budget = FailureBudget(num_rollouts=num_rollouts, max_failed_share=self._failures.max_failed_share)
        report = self._options.progress

        def count(trajectory: Trajectory) -> None:
            budget.record(trajectory)
            if report is not None:
                report(trajectory)

        return replace(self._options, progress=count)


# Metrics of a source, other than those of its rollouts: over the batches of a step
SUMMED_PREFIXES = (
    "efficiency/exposed_wait_s/",
    "replay_buffer/dropped_groups",
    "replay_buffer/given_up_rollouts",
    "oversampling/",
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
    batch is given back where `inner` can train on it later, else dropped and counted. `inner` may draw more prompts at
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
        """Return a full step, or what is left of the dataset. Raises RolloutError after `max_gen_batches` batches."""
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


def prompts_per_batch(num_prompts_per_step: int, batch_multiplier: float) -> int:
    """Return how many prompts dynamic sampling draws at once: `grpo.batch_multiplier` times a step's, rounded up."""
    return math.ceil(num_prompts_per_step * batch_multiplier)


def _mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the mean reward of the survivors; a step has some."""
    rewards = [trajectory.reward for group in groups for trajectory in group.survivors]
    return sum(rewards) / len(rewards)


RESPONSE = "answer"  # of a prompt's state: what its row has in `output_key`, or as the last message


@dataclass(frozen=True, slots=True)
class RecordedResponseSource:
    """Satisfies interfaces.GroupSource.

    A response is what the model would have to write, its end included; beyond `max_total_length` it is cut. It has
    log-probs of 0 and no reward.
    """

    loader: PromptLoader
    encoder: ChatEncoder
    num_prompts_per_step: int
    max_total_length: int

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        loaded = self.loader.take(self.num_prompts_per_step)
        if not loaded:
            raise StopAsyncIteration
        groups = tuple(self._group(one) for one in loaded)
        metrics = rollout_metrics([t for group in groups for t in group.trajectories])
        return CollectedGroups(groups, {k: v for k, v in metrics.items() if not k.endswith("reward_mean")})

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"consumed_prompts": self.loader.consumed, "epoch": self.loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def _group(self, loaded: LoadedPrompt) -> TrajectoryGroup:
        prompt = loaded.prompt
        prompt_log = self.encoder.encode_prompt(prompt.messages, prompt.tools)
        response = Message("assistant", get_recorded_response(prompt))
        token_ids = self.encoder.encode_answer(response, prompt.tools)
        max_response_tokens = self.max_total_length - sum(len(message.token_ids) for message in prompt_log)
        cut = token_ids[:max_response_tokens]
        trajectory = Trajectory(
            prompt=prompt,
            group_id=loaded.group_id,
            generation_index=0,
            message_log=(*prompt_log, TokenizedMessage(response, cut, (0.0,) * len(cut))),
            stop_reason=StopReason.DONE if len(cut) == len(token_ids) else StopReason.TRUNCATED,
            num_turns=1,
        )
        return TrajectoryGroup(loaded.group_id, prompt, (trajectory,))


def get_recorded_response(prompt: Prompt) -> str:
    """Return the response of a prompt's row; raise DataError if it has none."""
    response = prompt.env_state.get(RESPONSE)
    if not isinstance(response, str) or not response:
        raise DataError(
            f"prompt {prompt.prompt_id} of {prompt.dataset!r} has no response to learn from (distillation.off_policy): "
            "rows need a last message of the assistant, or text in output_key"
        )
    return response
