"""From prompts to the rollouts of their groups, and back to groups."""

from collections.abc import Iterable, Sequence

from nemo_rl.data.loader import LoadedPrompt
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.types import Trajectory, TrajectoryGroup


def jobs_of(prompts: Iterable[LoadedPrompt], num_generations: int) -> list[RolloutJob]:
    """`num_generations` rollouts a prompt, one prompt after the other."""
    return [
        RolloutJob(one.prompt, one.group_id, index, one.epoch) for one in prompts for index in range(num_generations)
    ]


def grouped(trajectories: Sequence[Trajectory], num_generations: int) -> tuple[TrajectoryGroup, ...]:
    """The groups of trajectories that lie in the order of `jobs_of`."""
    groups = []
    for start in range(0, len(trajectories), num_generations):
        members = tuple(trajectories[start : start + num_generations])
        groups.append(TrajectoryGroup(members[0].group_id, members[0].prompt, members))
    return tuple(groups)


def trajectories_of(groups: Iterable[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]
