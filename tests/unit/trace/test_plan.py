"""Plans against times by hand, against an event simulation of its own, and against runs that were not used to fit."""

import heapq
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemo_rl.cli import run as command_line
from nemo_rl.command_line import ExitCode
from nemo_rl.observability.trace_file import TRACE_FILE, TraceFile
from nemo_rl.trace.plan import Schedule, _train, fit_to_run, plan
from nemo_rl.trace.timeline import Timeline
from nemo_rl.trace.virtual_time import trace_in_virtual_time
from nemo_rl.trace.workload import (
    EngineCurve,
    Limits,
    PlannedRollout,
    PlannedTurn,
    TrainerCurve,
    Workload,
    fit_workload,
)
from nemo_rl.tracing import SpanRecord
from tests.unit.trace.simulated_run import GROUP, GROUPS, Simulated, bubbles_of, simulate

NO_LIMIT = 10**6
SCHEDULE = Schedule(4, 4, None, 1, NO_LIMIT, {})


def workload(*, tokens: int = 100, environment_s: float = 0.5, refit_s: float = 0.25) -> Workload:
    group = [PlannedRollout("game", (PlannedTurn(tokens, environment_s),), {}) for _ in range(4)]
    return Workload([group], EngineCurve(0.01, 0.0), TrainerCurve(1.0, 0.0, 0.0, 0.0), {"weight_sync": refit_s})


def test_a_synchronous_step_is_its_parts() -> None:
    planned = plan(workload(), SCHEDULE)
    assert planned.step_s == pytest.approx(1.0 + 0.5 + 1.0 + 0.25)
    assert planned.tokens_per_s == pytest.approx(1600 / 2.75)
    assert planned.bubbles.waits_s == pytest.approx({"generation": 1.0, "environment game": 0.5, "weight_sync": 0.25})


def test_limits_queue() -> None:
    assert plan(workload(), replace(SCHEDULE, max_num_seqs=4)).step_s == pytest.approx(4.0 + 0.5 + 1.25)
    assert plan(workload(), replace(SCHEDULE, max_num_seqs=4, num_engines=2)).step_s == pytest.approx(2.0 + 0.5 + 1.25)
    calls = {"environment game": 1}
    assert plan(workload(), replace(SCHEDULE, calls=calls)).step_s == pytest.approx(1.0 + 16 * 0.5 + 1.25)


def test_in_the_background_the_slower_of_both_decides() -> None:
    slow_engine = replace(workload(environment_s=0.0, refit_s=0.0), engine=EngineCurve(0.03, 0.0))
    planned = plan(slow_engine, replace(SCHEDULE, age=1, max_num_seqs=16), num_steps=42)
    assert planned.step_s == pytest.approx(3.0, rel=0.05)
    slow_trainer = replace(workload(environment_s=0.0, refit_s=0.0), trainer=TrainerCurve(5.0, 0.0, 0.0, 0.0))
    assert plan(slow_trainer, replace(SCHEDULE, age=1)).step_s == pytest.approx(5.0)


def test_time_that_no_span_tells_is_the_drivers_per_request() -> None:
    work, limits = replace(workload(), driver_s=0.1), Limits(16, NO_LIMIT, 1, {})
    _, timeline = trace_in_virtual_time(_train(work, SCHEDULE, 12))
    assert plan(fit_workload(timeline, limits), SCHEDULE).step_s < 0.95 * plan(work, SCHEDULE).step_s
    fitted, larger = fit_to_run(timeline, limits, SCHEDULE), replace(SCHEDULE, num_prompts=8)
    assert plan(fitted, SCHEDULE).step_s == pytest.approx(plan(work, SCHEDULE).step_s, rel=0.02)
    assert plan(fitted, larger).step_s == pytest.approx(plan(work, larger).step_s, rel=0.05)


def test_larger_micro_batches_cost_fewer_times() -> None:
    costly = replace(workload(), trainer=TrainerCurve(0.0, 0.5, 0.0, 1.0))  # 0.5 s for each of 16
    assert plan(costly, SCHEDULE).bubbles.trainer_busy_s == pytest.approx(8.0)
    assert plan(costly, replace(SCHEDULE, micro_batch_scale=4.0)).bubbles.trainer_busy_s == pytest.approx(2.0)


def first_in_first_out(rollouts: list[PlannedRollout], slots: int) -> float:
    """Return when the last ends: event by event, without any code of the project."""
    free, arrivals, end = [0.0] * slots, [(0.0, i, i, 0) for i in range(len(rollouts))], 0.0
    order = len(arrivals)
    while arrivals:
        at, _, number, turn = heapq.heappop(arrivals)
        own = rollouts[number].turns[turn]
        done = max(at, heapq.heappop(free)) + 0.01 * own.num_tokens
        heapq.heappush(free, done)
        end = max(end, done + own.environment_s)
        if turn + 1 < len(rollouts[number].turns):
            order += 1
            heapq.heappush(arrivals, (done + own.environment_s, order, number, turn + 1))
    return end


@pytest.mark.parametrize("slots", [1, 3, 16, 64])
def test_generation_takes_what_an_event_simulation_says(slots: int) -> None:
    draw = random.Random(slots)
    groups = [
        [
            PlannedRollout(
                "game", tuple(PlannedTurn(draw.randint(1, 200), draw.random()) for _ in range(draw.randint(1, 4))), {}
            )
            for _ in range(8)
        ]
        for _ in range(8)
    ]
    run = Workload(groups, EngineCurve(0.01, 0.0), TrainerCurve(1.0, 0.0, 0.0, 0.0), {})
    planned = plan(run, Schedule(8, 8, None, 1, slots, {}), num_steps=2)
    expected = first_in_first_out([rollout for group in groups for rollout in group], slots)
    assert planned.step_s - 1.0 == pytest.approx(expected, rel=1e-3)


def step_by_step(sizes: list[int], slots: int, curve: EngineCurve) -> float:
    """Return when the last of the requests ends on an engine that either prefills one or samples a token for each."""
    at, waiting, running = 0.0, list(sizes), list[int]()
    while waiting or running:
        if waiting and len(running) < slots:
            running.append(waiting.pop(0))
            at += curve.prefill_s
        else:
            at += curve.token_s + curve.sequence_s * len(running)
            running = [left - 1 for left in running if left > 1]
    return at


@pytest.mark.parametrize("slots", [1, 5, 64])
def test_prefills_and_full_batches_take_what_an_engine_takes_that_goes_step_by_step(slots: int) -> None:
    draw = random.Random(slots)
    groups = [
        [PlannedRollout("game", (PlannedTurn(draw.randint(5, 200), 0.0),), {}) for _ in range(8)] for _ in range(8)
    ]
    curve = EngineCurve(0.01, 0.001, prefill_s=0.05)
    run = Workload(groups, curve, TrainerCurve(1.0, 0.0, 0.0, 0.0), {})
    planned = plan(run, Schedule(8, 8, None, 1, slots, {}), num_steps=2)
    sizes = [turn.num_tokens for group in groups for rollout in group for turn in rollout.turns]
    assert planned.step_s - 1.0 == pytest.approx(step_by_step(sizes, slots, curve), rel=1e-3)


def test_the_driver_begins_rollouts_one_after_another() -> None:
    """16 begin within 0.16 s; the last has its answer 1 s later, and the driver has 0.01 s of work for it."""
    planned = plan(replace(workload(), driver_s=0.02), SCHEDULE)
    assert planned.step_s == pytest.approx(0.16 + 1.0 + 0.01 + 0.5 + 1.0 + 0.25)


def test_training_begins_after_the_rollouts_that_the_driver_began_before() -> None:
    """Each step it begins 16 rollouts in the background, which takes 0.16 s of it."""
    slow_trainer = replace(workload(refit_s=0.0), trainer=TrainerCurve(5.0, 0.0, 0.0, 0.0), driver_s=0.02)
    assert plan(slow_trainer, replace(SCHEDULE, age=1)).step_s == pytest.approx(5.16, rel=0.01)


FITTED = Simulated(token_s=0.5, slots=8, environment_s=0.2, train_s=6.0, refit_s=0.5, num_steps=12)
NOT_FITTED = {
    "synchronous": FITTED,
    "age 0": replace(FITTED, age=0),
    "age 1": replace(FITTED, age=1),
    "age 2": replace(FITTED, age=2),
    "age 4": replace(FITTED, age=4),
    "slow tool": replace(FITTED, environment_calls=1),
    "more sequences at once": replace(FITTED, slots=16),
}


@pytest.mark.parametrize("name", NOT_FITTED)
def test_other_schedules_take_what_the_fitted_one_lets_expect(name: str) -> None:
    run = NOT_FITTED[name]
    fitted = fit_workload(simulate(FITTED), Limits(GROUPS * GROUP, FITTED.slots, 1, {}))
    calls = {} if run.environment_calls is None else {"environment game": run.environment_calls}
    schedule = Schedule(GROUPS, GROUP, run.age, 1, run.slots, calls)
    assert plan(fitted, schedule, num_steps=run.num_steps).step_s == pytest.approx(bubbles_of(run).step_s, rel=0.1)


def test_what_queued_for_a_judge_is_not_taken_for_its_work() -> None:
    """16 scores of 0.5 s by one judge; the fit finds 0.5 s, and two judges take half of the time."""
    slow = Simulated(score_s=0.5, score_calls=1, train_s=2.0)
    fitted = fit_workload(simulate(slow), Limits(GROUPS * GROUP, slow.slots, 1, {"scorer judge": 1}))
    scores = [rollout.scores_s["judge"] for group in fitted.groups for rollout in group]
    assert sum(scores) / len(scores) == pytest.approx(0.5, rel=0.05)
    two = Schedule(GROUPS, GROUP, None, 1, slow.slots, {"scorer judge": 2})
    assert plan(fitted, two).step_s == pytest.approx(bubbles_of(replace(slow, score_calls=2)).step_s, rel=0.1)


def record(name: str, start_s: int, end_s: int, own: int, parent: int, **attributes: int | str) -> SpanRecord:
    return SpanRecord(name, "rollouts", 0, start_s * 10**9, end_s * 10**9, 1, own, parent, attributes)


def turns_of_one_rollout(*waits: SpanRecord) -> tuple[PlannedTurn, ...]:
    """Return what is fitted to a rollout of 40 tokens, from 0 to 18 s, in a step of 20 s; its span has the id 3."""
    step = [record("total_step_time", 0, 20, 1, 0, step=1), record("policy_training", 18, 20, 2, 1, step=1)]
    rollout = record("rollout", 0, 18, 3, 1, env="game", group="0", num_sampled_tokens=40)
    (group,) = fit_workload(Timeline.of_spans([*step, rollout, *waits]), Limits(1, NO_LIMIT, 1, {})).groups
    return group[0].turns


def test_turns_have_the_tokens_that_their_calls_tell() -> None:
    """The second turn waits in a queue for as long as the first takes, and has a third of its tokens."""
    turns = turns_of_one_rollout(
        record("generation", 0, 8, 4, 3, num_sampled_tokens=30),
        record("environment game", 8, 10, 5, 3),
        record("generation", 10, 18, 6, 3, num_sampled_tokens=10),
    )
    assert turns == (PlannedTurn(30, 2.0), PlannedTurn(10, 0.0))


@pytest.mark.parametrize("name", ["agent game", "NeMo Gym's game_agent"])
def test_an_agents_own_time_follows_its_calls(name: str) -> None:
    """It takes 1 s before the first call, 2 s after it, and 3 s after the third, which overlaps the second."""
    turns = turns_of_one_rollout(
        record(name, 0, 16, 4, 3),
        record("generation", 1, 5, 5, 3, num_sampled_tokens=10),
        record("generation", 7, 12, 6, 3, num_sampled_tokens=20),
        record("generation", 8, 13, 7, 3, num_sampled_tokens=10),
        record("environment game", 16, 18, 8, 3),
    )
    assert turns == (PlannedTurn(10, 2.0), PlannedTurn(20, 0.0), PlannedTurn(10, 3.0 + 1.0 + 2.0))


def test_an_agent_that_calls_no_model_is_all_its_own_time() -> None:
    assert turns_of_one_rollout(record("agent game", 0, 18, 4, 3)) == (PlannedTurn(40, 18.0),)


def fit(*spans: SpanRecord, num_rollouts: int = 4, shares_devices: bool = False) -> Workload:
    """Return what is fitted to one step of 40 s, in which the policy computes from 20 to 40 s."""
    step = [record("total_step_time", 0, 40, 1, 0, step=1), record("policy_training", 20, 40, 2, 1, step=1)]
    limits = Limits(num_rollouts, NO_LIMIT, 1, {}, shares_devices=shares_devices)
    return fit_workload(Timeline.of_spans([*step, *spans]), limits)


def rollouts_of(*sizes: int, end_s: int, starts_s: int = 0) -> list[SpanRecord]:
    return [
        record("rollout", starts_s, end_s, 10 + i, 0, group="0", num_sampled_tokens=size)
        for i, size in enumerate(sizes)
    ]


def test_prefills_are_told_from_steps_by_the_phases_of_requests() -> None:
    """Four prefills of 0.5 s and a step of 1 s take 3 s together; then each step takes 1 s."""
    sizes = (3, 5, 7, 9)
    phases = [
        span
        for i, size in enumerate(sizes)
        for span in (
            record("generation", 0, 2 + size, 20 + i, 10 + i, num_sampled_tokens=size),
            record("prefill", 0, 3, 30 + i, 20 + i),
            record("decode", 3, 2 + size, 40 + i, 20 + i),
        )
    ]
    curve = fit(*rollouts_of(*sizes, end_s=11), *phases).engine
    assert (curve.token_s, curve.sequence_s) == pytest.approx((1.0, 0.0), abs=1e-6)
    assert (curve.request_s, curve.prefill_s) == pytest.approx((0.0, 0.5), abs=1e-6)


def micro_batches(*times_s: tuple[int, int], num_tokens: int = 10) -> list[SpanRecord]:
    return [record("micro_batch", *each, 50 + i, 2, num_tokens=num_tokens) for i, each in enumerate(times_s)]


def test_a_micro_batch_beside_the_engine_tells_how_much_it_is_slowed() -> None:
    """Two take 2 s each while the engine does nothing, two 4 s while it samples."""
    spans = [
        *rollouts_of(4, end_s=32, starts_s=24),
        record("generation", 24, 32, 20, 10, num_sampled_tokens=4),
        *micro_batches((20, 22), (22, 24), (24, 28), (28, 32)),
    ]
    curve = fit(*spans).trainer
    assert curve.beside_generation == pytest.approx(2.0, abs=0.05)
    assert curve.micro_batches_per_rollout == 1.0
    assert curve.micro_batch_s + 4 * curve.token_s * curve.micro_batches_per_rollout == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("shares_devices", "factor"), [(True, 2.0), (False, 1.0)])
def test_engine_and_trainer_that_took_turns_are_taken_to_halve_each_other_on_shared_devices(
    shares_devices: bool, factor: float
) -> None:
    spans = [
        *rollouts_of(4, end_s=8),
        record("generation", 0, 8, 20, 10, num_sampled_tokens=4),
        *micro_batches((20, 30)),
    ]
    fitted = fit(*spans, shares_devices=shares_devices)
    assert (fitted.engine.beside_training, fitted.trainer.beside_generation) == (factor, factor)


def test_the_drivers_cpu_time_during_waits_is_that_of_its_requests() -> None:
    collection = record("generation", 0, 20, 3, 1, step=1, driver_cpu_ns=2 * 10**9)
    other = record("weight_sync", 38, 40, 4, 1, step=1, driver_cpu_ns=10**9)
    calls = [record("generation", 0, 8, 20 + i, 10 + i, num_sampled_tokens=4) for i in range(4)]
    assert fit(collection, other, *rollouts_of(4, 4, 4, 4, end_s=8), *calls).driver_s == pytest.approx(0.5)


def write_run(directory: Path, run: Simulated, age: int | None) -> Path:
    directory.mkdir()
    simulate(run, [TraceFile(directory / TRACE_FILE)])
    background = {"enabled": age is not None, "max_trajectory_age_steps": age or 1}
    grpo = {"num_prompts_per_step": GROUPS, "num_generations_per_prompt": GROUP, "async_grpo": background}
    generation = {"vllm_cfg": {"max_num_seqs": run.slots}, "colocated": {"enabled": False}}
    (directory / "config.yaml").write_text(yaml.safe_dump({"grpo": grpo, "policy": {"generation": generation}}))
    return directory


def test_a_plan_is_compared_with_runs_that_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = write_run(tmp_path / "fitted", FITTED, None)
    others = {age: write_run(tmp_path / f"age_{age}", replace(FITTED, age=age), age) for age in (1, 2)}
    words = ["plan", str(fitted), "--json", *(word for run in others.values() for word in ("--against", str(run)))]
    assert command_line(words) is ExitCode.DONE
    _, *found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found] == ["age_1", "age_2"]
    for each, age in zip(found, others, strict=True):
        assert each["values"]["grpo.async_grpo.enabled"] is True
        assert each["measured_s"] == pytest.approx(bubbles_of(replace(FITTED, age=age)).step_s, rel=1e-6)
        assert abs(each["error"]) < 0.1
