"""The rollouts of a step as each of several policies sees them: its own tokens are sampled, those of others are given.

Consumes the groups of a GroupSource; produces groups that an algorithm trains one policy on. Rewards, baselines and
groups are then those of that policy alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl.types import MessageLog, TokenizedMessage, Trajectory, TrajectoryGroup


def view_groups(groups: Sequence[TrajectoryGroup], policy: str, *, min_group_size: int) -> tuple[TrajectoryGroup, ...]:
    """Return the groups in which a policy gave a response in at least `min_group_size` rollouts.

    A group keeps these rollouts and those that failed. A rollout has the rewards of the policy, and the responses of
    other policies are text that it was given.
    """
    views = (_view_group(group, policy) for group in groups)
    return tuple(view for view in views if len(view.survivors) >= max(min_group_size, 1))


def _view_group(group: TrajectoryGroup, policy: str) -> TrajectoryGroup:
    own = (t for t in group.trajectories if t.failure is not None or policy in t.policy_rewards)
    return replace(group, trajectories=tuple(_view_trajectory(t, policy) for t in own))


def _view_trajectory(trajectory: Trajectory, policy: str) -> Trajectory:
    return replace(
        trajectory,
        message_log=_view_log(trajectory.message_log, policy),
        rewards=trajectory.policy_rewards.get(policy, {}),
        policy_rewards={},
    )


def _view_log(log: MessageLog, policy: str) -> MessageLog:
    return tuple(_as_given(m) if m.is_generated and m.policy != policy else m for m in log)


def _as_given(message: TokenizedMessage) -> TokenizedMessage:
    return replace(message, generation_logprobs=None, weight_spans=())
