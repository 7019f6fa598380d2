"""Trajectories and groups from plain numbers."""

from collections.abc import Mapping, Sequence

from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    Prompt,
    StopReason,
    TokenizedMessage,
    Trajectory,
    TrajectoryGroup,
)

PROMPT = Prompt(prompt_id="p", task_name="math", messages=(Message("user", "?"),))


def make_trajectory(
    rewards: Mapping[str, float] | float | None,
    *,
    group_id: str = "g",
    index: int = 0,
    num_generated: int = 2,
    stop_reason: StopReason = StopReason.DONE,
) -> Trajectory:
    """One turn after a prompt of three tokens; `rewards` None is a failed rollout."""
    prompt = TokenizedMessage(Message("user", "?"), (1, 2, 3))
    answer = TokenizedMessage(Message("assistant", "!"), (7,) * num_generated, (-0.5,) * num_generated)
    failed = rewards is None
    return Trajectory(
        prompt=PROMPT,
        group_id=group_id,
        generation_index=index,
        message_log=(prompt, answer),
        stop_reason=StopReason.FAILED if failed else stop_reason,
        rewards={} if rewards is None else {"score": rewards} if isinstance(rewards, int | float) else rewards,
        failure=Failure(FailureClass.INFRA, f"EngineDead: replica {index}") if failed else None,
    )


def make_group(rewards: Sequence[float | None], group_id: str = "g") -> TrajectoryGroup:
    """One trajectory a reward; None failed."""
    members = tuple(make_trajectory(r, group_id=group_id, index=i) for i, r in enumerate(rewards))
    return TrajectoryGroup(group_id, PROMPT, members)
