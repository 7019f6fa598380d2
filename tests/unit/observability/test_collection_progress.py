import io
import logging

import pytest
from rich.console import Console

from nemo_rl.observability.progress import (
    CollectionProgress,
    LiveCollectionProgress,
    make_collection_progress,
)
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, Trajectory

PROMPT = Prompt("p", "task", ())


def rollout(reward: float | None) -> Trajectory:
    if reward is None:
        return Trajectory(PROMPT, "g", 0, (), StopReason.FAILED, failure=Failure(FailureClass.INFRA, "made to fail"))
    return Trajectory(PROMPT, "g", 0, (), StopReason.DONE, rewards={"r": reward})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rate(progress: CollectionProgress) -> float:
    return float(progress.line().split(" | ")[1].removesuffix("/s"))


def test_rate_time_left_mean_reward_and_failures_are_those_of_this_start() -> None:
    clock = Clock()
    progress = CollectionProgress(total=100, num_finished=40, clock=clock)
    clock.now = 50.0  # an engine has started
    progress.start()
    clock.now = 60.0
    for reward in (1.0, 0.0, None, 1.0, 1.0, 0.0):
        progress.rollout(rollout(reward))
    assert (progress.num_finished, progress.num_new, progress.num_failures) == (45, 5, 1)
    assert progress.line() == "45% | 0.5/s | ETA 1:50 | reward 0.600 | 1 failed attempts"
    assert progress.seconds == 10.0


def test_the_rate_forgets_what_lies_far_back() -> None:
    clock = Clock()
    progress = CollectionProgress(total=10_000, num_finished=0, clock=clock)
    for second in range(1, 31):  # 10 a second
        clock.now = float(second)
        for _ in range(10):
            progress.rollout(rollout(1.0))
    assert rate(progress) == pytest.approx(10, abs=0.5)
    for second in range(31, 92):  # 1 a second
        clock.now = float(second)
        progress.rollout(rollout(1.0))
        progress.line()
    assert rate(progress) == pytest.approx(1, abs=0.1)


def test_where_there_is_no_terminal_a_line_says_so_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = CollectionProgress(total=4, num_finished=0, clock=clock)
    with caplog.at_level(logging.INFO):
        for now in (1.0, 9.0, 10.0, 11.0):
            clock.now = now
            progress.rollout(rollout(1.0))
    assert caplog.messages == ["3/4 rollouts, 75% | 0.3/s | ETA 0:03 | reward 1.000"]


def test_nothing_is_divided_by_zero() -> None:
    progress = CollectionProgress(total=0, num_finished=0, clock=Clock())
    assert progress.line() == "0% | 0/s | ETA unknown"
    assert progress.mean_reward is None


def test_a_terminal_shows_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    progress = make_collection_progress(console, wanted=True, total=4, num_finished=1)
    assert isinstance(progress, LiveCollectionProgress)
    progress.start()
    progress.rollout(rollout(1.0))
    progress.close()
    assert "2/4" in screen.getvalue()
    assert "reward 1.000" in screen.getvalue()
    assert not isinstance(
        make_collection_progress(Console(file=io.StringIO()), wanted=True, total=4, num_finished=1),
        LiveCollectionProgress,
    )
