"""Over-sampling with an early stop: more groups are begun than a step takes, and the first complete ones are taken."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.prompt_loader import LoadedPrompt
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.types import TrajectoryGroup


def num_begun(num_prompts_per_step: int, oversample: float) -> int:
    """Return how many groups are begun for a step: `rollout.oversample` times a step's, rounded up.

    Example: 1.25 x 6 prompts are 8.
    """
    return math.ceil(round(num_prompts_per_step * oversample, 6))


@dataclass(frozen=True, slots=True)
class FirstComplete:
    """Outcome of the groups that were begun for a step."""

    taken: tuple[TrajectoryGroup, ...]  # groups of the step, in the order of the prompts
    failed: tuple[TrajectoryGroup, ...]  # groups with too few survivors: not taken, but their prompts are consumed
    deferred: tuple[LoadedPrompt, ...]  # whose prompts the next step begins with
    discarded: tuple[TrajectoryGroup, ...]  # complete groups of deferred prompts


async def collect_first(
    prompts: Sequence[LoadedPrompt],
    collect: Callable[[LoadedPrompt], Coroutine[Any, Any, TrajectoryGroup]],
    *,
    count: int,
    num_required: int,
    min_group_size: int,
) -> FirstComplete:
    """Begin all groups at once, and return when `count` of them are complete; the others are cancelled.

    A group counts with `min_group_size` survivors. The first `num_required` prompts are awaited whatever time they take
    and taken first: those that an earlier step deferred, so that none is deferred twice. Groups that end at the same
    time are taken in the order of the prompts. If too few groups count, the step is filled up with failed ones.
    The first error of `collect` cancels all others and is raised.
    """
    tasks = [asyncio.ensure_future(collect(one)) for one in prompts]
    complete: dict[int, TrajectoryGroup] = {}  # keys: indices in `prompts`; in the order of completion
    try:
        while len(complete) < len(tasks) and not _suffice(complete, count, num_required, min_group_size):
            await asyncio.wait(
                [task for index, task in enumerate(tasks) if index not in complete], return_when=asyncio.FIRST_COMPLETED
            )
            complete |= {i: task.result() for i, task in enumerate(tasks) if i not in complete and task.done()}
    finally:
        await cancel_all(tasks)
    return _divide(prompts, complete, count, num_required, min_group_size)


def _suffice(complete: dict[int, TrajectoryGroup], count: int, num_required: int, min_group_size: int) -> bool:
    has_required = all(index in complete for index in range(num_required))
    return has_required and sum(len(group.survivors) >= min_group_size for group in complete.values()) >= count


def _divide(
    prompts: Sequence[LoadedPrompt],
    complete: dict[int, TrajectoryGroup],
    count: int,
    num_required: int,
    min_group_size: int,
) -> FirstComplete:
    usable = [index for index, group in complete.items() if len(group.survivors) >= min_group_size]
    failed = [index for index in complete if index not in usable]
    in_order = sorted(usable, key=lambda index: index >= num_required)  # stable: then as they ended
    taken = [*in_order[:count], *failed[: max(count - len(usable), 0)]]
    given_up = [index for index in failed if index not in taken]
    deferred = [index for index in range(len(prompts)) if index not in taken and index not in given_up]
    return FirstComplete(
        tuple(complete[index] for index in sorted(taken)),
        tuple(complete[index] for index in sorted(given_up)),
        tuple(prompts[index] for index in deferred),
        tuple(complete[index] for index in deferred if index in complete),
    )
