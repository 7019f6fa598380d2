"""Rollouts of a step's prompts: jobs, their dispatch to environments, agents and NeMo Gym, and groups."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from nemo_rl.data.prompt_loader import LoadedPrompt
from nemo_rl.experience.agent_rollouts import run_agent_rollouts
from nemo_rl.experience.cancellation import gather_or_cancel
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.types import Trajectory, TrajectoryGroup

Scheduler: TypeAlias = Callable[
    [Sequence[RolloutJob], RolloutDependencies, RolloutOptions], Awaitable[tuple[Trajectory, ...]]
]


def make_rollout_jobs(
    prompts: Iterable[LoadedPrompt], num_generations: int, *, attempt: int = 0, greedy_baseline: bool = False
) -> list[RolloutJob]:
    """Make `num_generations` jobs per prompt, one prompt after the other; with `greedy_baseline` one more of each."""
    return [
        RolloutJob(one.prompt, one.group_id, index, one.epoch, attempt, is_greedy=index == num_generations)
        for one in prompts
        for index in range(num_generations + greedy_baseline)
    ]


def group_trajectories(
    trajectories: Sequence[Trajectory], num_generations: int, *, greedy_baseline: bool = False
) -> tuple[TrajectoryGroup, ...]:
    """Group trajectories that are in the order of `make_rollout_jobs`."""
    groups = []
    for start in range(0, len(trajectories), num_generations + greedy_baseline):
        end = start + num_generations
        members, baseline = tuple(trajectories[start:end]), trajectories[end] if greedy_baseline else None
        groups.append(TrajectoryGroup(members[0].group_id, members[0].prompt, members, baseline))
    return tuple(groups)


def flatten_groups(groups: Iterable[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def flatten_with_failed_baselines(groups: Iterable[TrajectoryGroup]) -> list[Trajectory]:
    """Return the rollouts of groups, and the greedy ones that failed: these are counted and written, too."""
    return [
        trajectory
        for group in groups
        for trajectory in (*group.trajectories, group.baseline)
        if trajectory is not None and (trajectory is not group.baseline or trajectory.failure is not None)
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
