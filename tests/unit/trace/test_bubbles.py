"""The bubble table against runs whose bubbles are known by hand, to one percentage point of a step."""

import pytest

from nemo_rl.trace import intervals
from nemo_rl.trace.bubbles import TAIL, Bubbles, find_tail
from tests.unit.trace.simulated_run import Simulated, bubbles_of, simulate


def check(bubbles: Bubbles, step_s: float, busy_s: float, engine_s: float, **waits_s: float) -> None:
    point = 0.01 * step_s
    assert bubbles.step_s == pytest.approx(step_s, abs=point)
    assert bubbles.trainer_busy_s == pytest.approx(busy_s, abs=point)
    assert bubbles.engine_busy_s == pytest.approx(engine_s, abs=point)
    found = {cause: seconds for cause, seconds in bubbles.waits_s.items() if seconds > point}
    assert found == pytest.approx({cause.replace("_", " "): s for cause, s in waits_s.items()}, abs=point)
    assert bubbles.unaccounted_s <= 0.02 * step_s


def test_a_synchronous_step_is_its_parts_one_after_another() -> None:
    run = Simulated(lambda place, index: 2.0, environment_s=1.0, train_s=4.0)
    check(bubbles_of(run), 7.0, 4.0, 2.0, generation=2.0, environment_game=1.0)


def test_the_slowest_rollout_decides_and_its_last_part_alone_is_the_tail() -> None:
    """15 rollouts of a step take 1 s, one takes 5: from 1 s on a sixteenth is left."""
    run = Simulated(lambda place, index: 5.0 if (place % 4, index) == (0, 0) else 1.0, train_s=4.0)
    check(bubbles_of(run), 9.0, 4.0, 5.0, generation=1.0, **{TAIL: 4.0})


def test_calls_that_queue_for_an_environment_count_as_the_environment() -> None:
    """16 calls of 0.5 s, two at a time: 4 s after the generation of 1 s."""
    run = Simulated(environment_s=0.5, environment_calls=2, train_s=5.0)
    check(bubbles_of(run), 10.0, 5.0, 1.0, generation=1.0, environment_game=4.0)


def test_scores_are_named_by_their_scorer() -> None:
    run = Simulated(score_s=0.25, score_calls=1, train_s=5.0)
    check(bubbles_of(run), 10.0, 5.0, 1.0, generation=1.0, scorer_judge=4.0)


def test_in_the_background_only_what_training_does_not_hide_is_a_wait() -> None:
    """An engine that takes 3 s for the rollouts of a step, beside training of 2 s: each step waits 1 s."""
    run = Simulated(lambda place, index: 3.0, slots=16, train_s=2.0, age=1, num_steps=12)
    bubbles = bubbles_of(run)
    assert bubbles.trainer_busy_share == pytest.approx(2 / 3)
    assert bubbles.waits_s == pytest.approx({"generation": 1.0})
    assert bubbles.engine_busy_s == pytest.approx((10 * 3 + 1) / 11)  # it has nothing to do in the last training


def test_phases_that_are_no_work_of_the_trainer_are_waits_by_their_name() -> None:
    bubbles = bubbles_of(Simulated(refit_s=2.0, train_s=1.0))
    assert bubbles.waits_s == pytest.approx({"weight_sync": 2.0, "generation": 1.0})


def test_each_step_begins_at_the_end_of_the_one_before() -> None:
    steps = simulate(Simulated(num_steps=3)).steps
    assert [step.number for step in steps] == [1, 2, 3]
    assert [step.start_ns for step in steps[1:]] == [step.end_ns for step in steps[:-1]]
    assert all(step.covered_share == pytest.approx(1.0) for step in steps)


def test_the_tail_begins_when_a_quarter_is_left() -> None:
    assert find_tail([(0, end) for end in range(1, 9)]) == 6
    assert find_tail([(0, 5)]) == 5
    assert find_tail([]) == 0


def test_intervals_by_hand() -> None:
    assert intervals.union([(2, 5), (0, 3), (7, 8), (8, 8)]) == [(0, 5), (7, 8)]
    assert intervals.gaps([(0, 5), (7, 8)], 1, 10) == [(5, 7), (8, 10)]
    assert intervals.clip([(0, 5), (7, 8)], 4, 7) == [(4, 5)]
