"""Deadlines, room and choice in numbers: steps of two groups."""

from nemo_rl.experience.replay_buffer import ReplayBuffer, WaitReason
from nemo_rl.types import StopReason, Trajectory, TrajectoryGroup
from tests.unit.experience.rollout_setup import prompt


def group(version: int) -> TrajectoryGroup:
    """Of one rollout, sampled under this version."""
    one = Trajectory(prompt(0), "g", 0, (), StopReason.DONE, weight_versions=(version, version))
    return TrajectoryGroup("g", prompt(0), (one,))


def buffer(max_age: int, *, running: dict[int, int], complete: dict[int, int]) -> ReplayBuffer:
    """Versions at issue by place."""
    made = ReplayBuffer(num_groups_per_step=2, max_age_steps=max_age)
    for prompt_index, version in (running | complete).items():
        made.issue(prompt_index, version)
    for prompt_index, version in complete.items():
        made.finish(prompt_index, group(version))
    return made


def chosen(made: ReplayBuffer, version: int, count: int = 2):
    choice = made.choose(version, count)
    return choice if isinstance(choice, WaitReason) else [one.prompt_index for one in choice]


def test_room_is_the_age_bound_in_steps_and_one_more_while_the_trainer_waits() -> None:
    made = buffer(2, running={0: 0}, complete={1: 0})
    assert (made.capacity(is_trainer_waiting=False), made.capacity(is_trainer_waiting=True)) == (2, 4)
    assert buffer(0, running={}, complete={}).capacity(is_trainer_waiting=False) == 0
    assert buffer(0, running={0: 0, 1: 0, 2: 0}, complete={}).capacity(is_trainer_waiting=True) == 0


def test_the_oldest_are_chosen_and_come_in_the_order_of_the_prompts() -> None:
    assert chosen(buffer(3, running={}, complete={4: 0, 1: 1, 0: 2, 3: 0}), 2) == [3, 4]


def test_too_few_complete_groups_are_awaited() -> None:
    assert chosen(buffer(3, running={1: 0}, complete={0: 0}), 0) is WaitReason.TOO_FEW


def test_a_running_group_is_passed_over_while_later_steps_have_room_for_it() -> None:
    """Issued at 0 with a bound of 2: versions 0 and 1 may pass over it, version 2 may not."""
    made = buffer(2, running={0: 0}, complete={1: 0, 2: 1})
    assert chosen(made, 1) == [1, 2]
    assert chosen(made, 2) is WaitReason.LATE


def test_as_many_are_passed_over_as_one_step_takes() -> None:
    complete = {5: 0, 6: 1}
    assert chosen(buffer(1, running={0: 0, 1: 0}, complete=complete), 0) == [5, 6]
    assert chosen(buffer(1, running={0: 0, 1: 0, 2: 0}, complete=complete), 0) is WaitReason.LATE


def test_waiting_that_would_change_nothing_is_not_done() -> None:
    """Three complete groups at the bound of a step of two: one is lost whatever is awaited."""
    assert chosen(buffer(0, running={7: 4}, complete={0: 4, 1: 4, 2: 4}), 4) == [0, 1]


def test_complete_groups_are_as_old_as_their_rollouts_say() -> None:
    made = ReplayBuffer(num_groups_per_step=2, max_age_steps=1)
    made.issue(0, 3)
    made.finish(0, group(5))
    made.issue(1, 3)
    made.finish(1, group(2))
    assert [one.weight_version for one in made.complete] == [5, 2]
    assert [one.prompt_index for one in made.expired(4)] == [1]


def test_running_groups_at_the_bound_are_named() -> None:
    made = buffer(2, running={0: 0, 1: 1}, complete={2: 0})
    assert [made.running_at_age_limit(version) for version in (1, 2, 3)] == [(), (0,), (0, 1)]


def test_what_a_smaller_bound_cannot_train_in_time_is_named() -> None:
    made = buffer(1, running={}, complete={0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0})
    assert [one.prompt_index for one in made.unschedulable(1)] == [3, 4]  # versions 1 and 2 take two each, p5 first
