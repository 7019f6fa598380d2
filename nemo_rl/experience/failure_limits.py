"""Failed rollouts: their log, and the limits at which they end a run."""

import logging
from collections import Counter

from nemo_rl.errors import RolloutError
from nemo_rl.tracing import record_counter
from nemo_rl.types import Failure, FailureClass, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)


class FailureLog:
    """Logs failed rollouts: the first of each task and origin as a warning with its traceback, the others at DEBUG."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, FailureClass, str]] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Log the failure of a finished rollout, if it failed."""
        failure, prompt = trajectory.failure, trajectory.prompt
        if failure is None:
            return
        site = prompt.task_name, failure.failure_class, failure.origin
        self._counts[site] += 1
        record_counter("rollouts/failed", self._counts.total())
        if self._counts[site] == 1:
            logger.warning(
                "rollout of prompt %s failed (task %s, %s): %s; further failures of this kind are logged at DEBUG%s",
                prompt.prompt_id,
                prompt.task_name,
                failure.failure_class,
                failure.cause,
                f"\n{failure.traceback.rstrip()}" if failure.traceback else "",
            )
        else:
            logger.debug(
                "rollout of prompt %s failed (task %s, %s; number %d of its kind): %s",
                prompt.prompt_id,
                prompt.task_name,
                failure.failure_class,
                self._counts[site],
                failure.cause,
            )


class FailureBudget:
    """Stops a step as soon as more than `max_failed_share` of its rollouts have failed."""

    def __init__(self, *, num_rollouts: int, max_failed_share: float) -> None:
        self._num_rollouts = num_rollouts
        self._max_failed_share = max_failed_share
        self._first_failure: Failure | None = None
        self._by_class: Counter[str] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Count a finished rollout. Raises RolloutError with the first cause above the limit."""
        if trajectory.failure is None or trajectory.failure.failure_class is FailureClass.TRUNCATED:
            return  # a truncated rollout has no reward because the configuration says so
        self._first_failure = self._first_failure or trajectory.failure
        self._by_class[trajectory.failure.failure_class] += 1
        if self._by_class.total() > self._max_failed_share * self._num_rollouts:
            raise RolloutError(
                f"{self.summary()}, more than rollout.max_failed_share = {self._max_failed_share:g} allows"
            )

    def summary(self) -> str:
        """Describe the failures so far.

        Example: "3 of 4 rollouts failed (environment 2, infra 1); first cause: environment: ValueError: ...".
        """
        by_class = ", ".join(f"{name} {count}" for name, count in sorted(self._by_class.items()))
        counts = f" ({by_class})" if by_class else ""
        first = self._first_failure
        cause = f"; first cause: {first.failure_class}: {first.cause}" if first else ""
        return f"{self._by_class.total()} of {self._num_rollouts} rollouts failed{counts}{cause}"


class ConsecutiveFailureLimit:
    """Stops background collection when more than `max_consecutive` groups in a row have no survivor."""

    def __init__(self, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._num_consecutive = 0
        self._first_failure: Failure | None = None

    def record(self, group: TrajectoryGroup) -> None:
        """Count a finished group. Raises RolloutError with the first cause above the limit."""
        if group.survivors:
            self._num_consecutive, self._first_failure = 0, None
            return
        self._num_consecutive += 1
        failures = (t.failure for t in (*group.trajectories, group.baseline) if t is not None and t.failure is not None)
        self._first_failure = self._first_failure or next(failures, None)
        if self._num_consecutive > self._max_consecutive and self._first_failure is not None:
            raise RolloutError(
                f"all rollouts of {self._num_consecutive} groups in a row failed, more than "
                f"grpo.async_grpo.max_generation_failures = {self._max_consecutive} allows; "
                f"first cause: {self._first_failure.failure_class}: {self._first_failure.cause}"
            )
