"""The state of background collection: prompts whose rollouts run, and complete groups that wait for the trainer.

Pure bookkeeping of AsyncSource: no tasks, no clock. A group's deadline is the last version of the trainer that may
train on it: the oldest weights it was, or may be, sampled under, plus the age bound A. A step takes N groups, so those
left after a step at version v can all be trained in time exactly if, for every d, at most N (d - v) of them have a
deadline of d or less. Groups are issued only as far as that can hold (`capacity`) and chosen so that it keeps holding
(`choose`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl.types import TrajectoryGroup


class WaitReason(StrEnum):
    """The reason that no step can be handed out yet."""

    TOO_FEW = "too_few_groups"  # are complete
    LATE = "late_group"  # enough are, but a group that still runs would be trained too late


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    prompt_index: int  # index of its prompt in the training order
    weight_version: int  # the oldest that it was sampled under
    group: TrajectoryGroup


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A prompt that is not trained on."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayBufferState:
    """The buffer's part of a checkpoint; frozen, so that each step can take one."""

    complete: tuple[BufferedGroup, ...] = ()
    in_flight: tuple[int, ...] = ()  # indices of prompts whose rollouts ran: they are issued again
    dropped: tuple[DroppedGroup, ...] = ()

    @property
    def prompt_indices(self) -> tuple[int, ...]:
        """Return the indices of all prompts that were drawn and not trained on."""
        return (*(one.prompt_index for one in self.complete), *self.in_flight)


class ReplayBuffer:
    """Groups from the issue of their prompt until a step takes them."""

    def __init__(self, *, num_groups_per_step: int, max_age_steps: int) -> None:
        self._num_groups = num_groups_per_step
        self._max_age = max_age_steps
        self._running: dict[int, int] = {}  # version at issue, by place
        self._complete: dict[int, BufferedGroup] = {}  # keys: prompt indices

    def __len__(self) -> int:
        """Return the number of groups issued and not taken."""
        return len(self._running) + len(self._complete)

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    @property
    def running(self) -> tuple[int, ...]:
        """Return the indices of the prompts whose rollouts run, in the training order."""
        return tuple(sorted(self._running))

    @property
    def complete(self) -> tuple[BufferedGroup, ...]:
        """Return the complete groups in the training order."""
        return tuple(self._complete[prompt_index] for prompt_index in sorted(self._complete))

    def is_running(self, prompt_index: int) -> bool:
        return prompt_index in self._running

    def capacity(self, *, is_trainer_waiting: bool, num_remaining_steps: int | None = None) -> int:
        """Return how many more groups may be issued: for A steps while the trainer trains, one more while it waits.

        `num_remaining_steps`, if it is known, is how many follow the present one.
        """
        steps_ahead = self._max_age if num_remaining_steps is None else min(self._max_age, num_remaining_steps)
        return max((steps_ahead + is_trainer_waiting) * self._num_groups - len(self), 0)

    def issue(self, prompt_index: int, weight_version: int) -> None:
        """Record that the rollouts of a prompt start; the engine holds `weight_version` or newer weights."""
        self._running[prompt_index] = weight_version

    def finish(self, prompt_index: int, group: TrajectoryGroup) -> None:
        """Store a running group, all of whose rollouts have ended."""
        issue_version = self._running.pop(prompt_index)
        self._complete[prompt_index] = BufferedGroup(prompt_index, oldest_version(group, default=issue_version), group)

    def restore(self, groups: Iterable[BufferedGroup]) -> None:
        """Take complete groups (again): those of a checkpoint, or those of a step that did not need them."""
        self._complete.update((one.prompt_index, one) for one in groups)

    def remove(self, prompt_indices: Iterable[int]) -> None:
        """Forget groups, whatever their state."""
        for prompt_index in prompt_indices:
            self._running.pop(prompt_index, None)
            self._complete.pop(prompt_index, None)

    def choose(self, weight_version: int, count: int) -> tuple[BufferedGroup, ...] | WaitReason:
        """Return the `count` complete groups of the earliest deadlines, in the training order; or why to wait.

        One that still runs is passed over as long as it, and all others left, can be trained in time. Nothing changes:
        who trains on them calls `remove`.
        """
        if len(self._complete) < count:
            return WaitReason.TOO_FEW
        complete = sorted(self._complete.values(), key=lambda one: (self._deadline(one), one.prompt_index))
        chosen, others = complete[:count], complete[count:]
        if not self._may_pass_over_running(chosen, others, weight_version):
            return WaitReason.LATE
        return tuple(sorted(chosen, key=lambda one: one.prompt_index))

    def running_at_age_limit(self, weight_version: int) -> tuple[int, ...]:
        """Return the prompt indices of running groups that this version is the last to train on."""
        return tuple(p for p, issue_version in self._running.items() if issue_version + self._max_age <= weight_version)

    def expired(self, weight_version: int) -> tuple[BufferedGroup, ...]:
        """Return the complete groups above the age bound."""
        return tuple(one for one in self._complete.values() if self._deadline(one) < weight_version)

    def unschedulable(self, weight_version: int) -> Iterator[BufferedGroup]:
        """Yield the complete groups that cannot be trained in time from this version on, N a step, earliest due first.

        None but after a resume with a smaller bound or smaller steps.
        """
        num_kept = 0
        for one in sorted(self._complete.values(), key=lambda one: (self._deadline(one), one.prompt_index)):
            if self._deadline(one) < weight_version + num_kept // self._num_groups:
                yield one
            else:
                num_kept += 1

    def _may_pass_over_running(
        self, chosen: list[BufferedGroup], others: list[BufferedGroup], weight_version: int
    ) -> bool:
        """Return whether no running group is due before those chosen, or all others can still be trained in time."""
        last = max((self._deadline(one) for one in chosen), default=weight_version)
        running = [issue_version + self._max_age for issue_version in self._running.values()]
        if all(deadline >= last for deadline in running):
            return True
        left = sorted([*running, *(self._deadline(one) for one in others)])
        return all(index < self._num_groups * (d - weight_version) for index, d in enumerate(left))

    def _deadline(self, one: BufferedGroup) -> int:
        return one.weight_version + self._max_age


def oldest_version(group: TrajectoryGroup, *, default: int) -> int:
    """Return the oldest weights that a survivor was sampled under; `default` if all have failed."""
    return min((t.weight_versions[0] for t in group.survivors), default=default)
