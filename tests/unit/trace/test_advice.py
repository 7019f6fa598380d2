"""Advice on six runs with a planted bottleneck: the first line names it, and following it gains what it promises."""

from dataclasses import dataclass, replace

import pytest

from nemo_rl.trace.advice import Advice, advise, fixed_cost
from nemo_rl.trace.bubbles import TAIL, count_bubbles
from nemo_rl.trace.planned_advice import advise_with_plans
from nemo_rl.trace.planner_keys import PlannerKeys
from tests.unit.trace.simulated_run import Simulated, bubbles_of, simulate


@dataclass(frozen=True)
class Planted:
    """A run with a bottleneck, what the advice must say, and the run that follows it."""

    before: Simulated
    cause: str
    change: str
    after: Simulated
    rollouts_after: float = 1.0  # of a step, relative to before


def slow_tail(place: int, index: int) -> float:
    return 8.0 if (place % 4, index) == (0, 0) else 1.0


GRPO = {"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}}
JUDGE = Simulated(score_s=0.5, score_calls=1, train_s=2.0, config=GRPO | {"scorers": {"judge": {"num_replicas": 1}}})
TAILS = Simulated(
    slow_tail, train_s=8.0, config={"grpo": GRPO["grpo"] | {"async_grpo": {"enabled": False}}}, num_steps=16
)
FEW = Simulated(slots=2, train_s=1.0, config=GRPO | {"policy": {"generation": {"vllm_cfg": {"max_num_seqs": 2}}}})
REFITS = Simulated(refit_s=6.0, train_s=1.0, generation_s=lambda place, index: 0.5, config=GRPO)
ENVIRONMENT = Simulated(
    environment_s=0.5,
    environment_calls=1,
    train_s=2.0,
    config=GRPO | {"env": {"game": {"batching": {"enabled": True, "max_batch_size": 1, "max_calls": 1}}}},
)
SMALL_PARTS = Simulated(
    train_s=0.0,
    train_parts=[100, 110] * 32,
    part_s=lambda tokens: 0.1 + tokens * 1e-4,
    config=GRPO | {"policy": {"train_micro_batch_size": 1}},
)
PLANTED = {
    "slow judge": Planted(JUDGE, "scorer judge", "scorers.judge.num_replicas: 1 -> 2", replace(JUDGE, score_calls=2)),
    "age 0 with long tails": Planted(
        TAILS, TAIL, "grpo.async_grpo.enabled: true, with max_trajectory_age_steps: 1", replace(TAILS, age=1)
    ),
    "too few sequences at once": Planted(
        FEW, "generation", "policy.generation.vllm_cfg.max_num_seqs: 2 -> 16", replace(FEW, slots=16)
    ),
    "refit too often": Planted(
        REFITS, "weight_sync", "grpo.num_prompts_per_step: 4 -> 8", replace(REFITS, num_groups=8), 2.0
    ),
    "one slow environment": Planted(
        ENVIRONMENT,
        "environment game",
        "env.game.batching.max_calls: 1 -> 2",
        replace(ENVIRONMENT, environment_calls=2),
    ),
    "tiny micro-batches": Planted(
        SMALL_PARTS,
        "policy_training",
        "policy.train_micro_batch_size: 1 -> 4",
        replace(SMALL_PARTS, train_parts=[420] * 16),
    ),
}


def first_advice(run: Simulated) -> Advice:
    timeline = simulate(run)
    bubbles = count_bubbles(timeline)
    assert bubbles is not None
    return advise(bubbles, timeline, run.config)[0]


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_line_names_the_bottleneck_and_its_key_and_half_of_the_promise_is_kept(name: str) -> None:
    planted = PLANTED[name]
    advice = first_advice(planted.before)
    assert (advice.cause, advice.change) == (planted.cause, planted.change)
    before_s, after_s = bubbles_of(planted.before).step_s, bubbles_of(planted.after).step_s / planted.rollouts_after
    assert before_s - after_s >= advice.gain_s / 2 > 0


@pytest.mark.parametrize("name", PLANTED)
def test_the_planner_promises_what_following_the_advice_keeps(name: str) -> None:
    planted = PLANTED[name]
    timeline = simulate(planted.before)
    bubbles = count_bubbles(timeline)
    assert bubbles is not None
    advice = advise_with_plans(bubbles, timeline, planted.before.config)[0]
    assert (advice.cause, advice.change, advice.is_planned) == (planted.cause, planted.change, True)
    after_s = bubbles_of(planted.after).step_s / planted.rollouts_after
    assert bubbles.step_s - after_s >= advice.gain_s / 2 > 0


@pytest.mark.parametrize(("age", "change"), [(None, "enabled: true"), (1, "max_trajectory_age_steps: 1 -> 2")])
def test_advice_for_distillation_names_the_key_of_its_recipes(age: int | None, change: str) -> None:
    background = {"enabled": age is not None, "max_trajectory_age_steps": age or 1}
    run = replace(TAILS, age=age, train_s=1.0, config={"distillation": {"async_rollouts": background}})
    advice = first_advice(run)
    assert advice.change.startswith(f"distillation.async_rollouts.{change}")
    assert advice.values.keys() <= PlannerKeys(run.config).present.keys()


def test_a_run_without_a_bottleneck_gets_no_advice() -> None:
    run = Simulated(lambda place, index: 0.1, train_s=20.0)
    timeline = simulate(run)
    bubbles = count_bubbles(timeline)
    assert bubbles is not None
    assert advise(bubbles, timeline, GRPO) == []


def test_the_fixed_cost_of_a_micro_batch_is_found_by_least_squares() -> None:
    fixed_s, largest = fixed_cost(simulate(SMALL_PARTS))
    assert fixed_s == pytest.approx(0.1, abs=1e-6)
    assert largest == 110
