import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from nemo_rl.algorithms.validation import (
    ValidationResult,
    Validator,
    average_over_sets,
    greedy_metrics,
    sampled_metrics,
    score_rollouts,
)
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.types import EnvStep, Failure, FailureClass, SamplingParams
from tests.fakes.environments import Conversation, FakeEnvironment, State, never_done
from tests.fakes.generation import FakeGeneration
from tests.unit.algorithms.rollouts import make_trajectory
from tests.unit.experience.rollout_setup import SAMPLING, VOCAB_SIZE, dependencies, prompt


def validator(
    prompt_sets: Mapping[str, Sequence[str]],
    environments: Mapping[str, FakeEnvironment],
    generation: FakeGeneration | None = None,
    *,
    num_generations: int = 1,
    batch_size: int = 100,
    max_samples: int | None = None,
    greedy: bool = False,
    sampling: SamplingParams = SAMPLING,
    correct_reward: float | None = 1.0,
) -> Validator:
    """`prompt_sets` gives each set the tasks of its prompts."""
    sets = tuple(PromptSet(n, tuple(prompt(i, task) for i, task in enumerate(t))) for n, t in prompt_sets.items())
    return Validator(
        prompt_sets=sets,
        dependencies=dependencies(generation or FakeGeneration(vocab_size=VOCAB_SIZE), environments),
        sampling=sampling,
        seed=7,
        num_generations_per_prompt=num_generations,
        batch_size=batch_size,
        max_samples=max_samples,
        greedy=greedy,
        correct_reward=correct_reward,
    )


def validate(validator: Validator) -> ValidationResult:
    return asyncio.run(validator.validate())


def call_sizes(environment: FakeEnvironment) -> list[int]:
    return [len(conversations) for conversations, _ in environment.calls]


def by_number(conversation: Conversation, state: State) -> EnvStep:
    """The prompt's number is its reward."""
    return EnvStep(rewards={"score": float(state["number"])})


# ---- calls


@pytest.mark.parametrize("is_async", [True, False])
def test_each_environment_is_called_once_a_turn_with_all_of_its_rollouts(is_async: bool) -> None:
    environments = {"game": FakeEnvironment(never_done), "math": FakeEnvironment()}
    generation = FakeGeneration(vocab_size=VOCAB_SIZE, is_async=is_async)
    validate(validator({"one": ["game", "math", "game"]}, environments, generation, num_generations=2))
    assert call_sizes(environments["game"])[0] == 4
    assert len(environments["game"].calls) == 4  # the turns of the limits
    assert call_sizes(environments["math"]) == [2]


def test_no_more_prompts_than_the_batch_size_are_generated_at_once() -> None:
    environment = FakeEnvironment()
    result = validate(validator({"one": ["game"] * 5}, {"game": environment}, num_generations=3, batch_size=2))
    assert call_sizes(environment) == [6, 6, 3]
    assert [(t.prompt.prompt_id, t.generation_index) for t in result.trajectories] == [
        (f"p{number}", index) for number in range(5) for index in range(3)
    ]


def test_max_samples_limits_the_prompts_of_each_set() -> None:
    environment = FakeEnvironment(by_number)
    sets = {"one": ["game"] * 5, "two": ["game"] * 2}
    result = validate(validator(sets, {"game": environment}, max_samples=3))
    assert call_sizes(environment) == [3, 2]
    assert result.metrics["one/reward"] == 1.0
    assert result.metrics["two/reward"] == 0.5


def test_the_greedy_pass_asks_once_a_prompt_at_temperature_0() -> None:
    generation = FakeGeneration(vocab_size=VOCAB_SIZE)
    sampling = replace(SAMPLING, temperature=0.7, top_p=0.9, top_k=5)
    with_greedy = validator(
        {"one": ["game"] * 2},
        {"game": FakeEnvironment(by_number)},
        generation,
        num_generations=3,
        greedy=True,
        sampling=sampling,
    )
    result = validate(with_greedy)
    drawn = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in generation.requests]
    assert drawn == [(0.7, 0.9, 5)] * 6 + [(0.0, 1.0, -1)] * 2
    assert (result.metrics["greedy_reward"], result.metrics["greedy_accuracy"]) == (0.5, 0.5)
    assert len(result.trajectories) == 6  # of the sampled pass alone


def test_two_validations_of_the_same_weights_are_equal() -> None:
    one = validator({"one": ["game"] * 3}, {"game": FakeEnvironment()}, num_generations=2)
    assert validate(one).metrics == validate(one).metrics


# ---- failures


def test_failed_rollouts_count_as_wrong(caplog: pytest.LogCaptureFixture) -> None:
    def answer(conversation: Conversation, state: State) -> EnvStep | Failure:
        if state["number"] == 0:
            return Failure(FailureClass.ENVIRONMENT, "broken")
        return by_number(conversation, state)

    result = validate(validator({"one": ["game"] * 3}, {"game": FakeEnvironment(answer)}))
    assert result.metrics["num_failed"] == 1.0
    assert (result.metrics["reward"], result.metrics["reward_without_failed"]) == (1.0, 1.5)
    assert (result.metrics["accuracy"], result.metrics["accuracy_without_failed"]) == (pytest.approx(2 / 3), 1.0)
    assert len(result.trajectories) == 3
    assert caplog.messages[-1] == (
        "validation set one: 1 failed rollouts count as wrong (greedy pass: 0): reward 1.0000, without them 1.5000"
    )


@pytest.mark.parametrize("is_failure", [False, True])
def test_five_right_answers_and_95_timeouts_are_an_accuracy_of_5_percent(is_failure: bool) -> None:
    def answer(conversation: Conversation, state: State) -> EnvStep | Failure:
        if state["number"] < 5:
            return EnvStep(rewards={"score": 1.0})
        if is_failure:
            return Failure(FailureClass.REWARD, "TimeoutError: no answer in 10 s")
        return EnvStep(rewards={"score": 0.0}, response_fault="verifier_timeout")

    sets = {"one": ["game"] * 100}
    metrics = validate(validator(sets, {"game": FakeEnvironment(answer)}, num_generations=2, greedy=True)).metrics
    shares = [metrics[name] for name in ("reward", "accuracy", "pass_2", "greedy_reward", "greedy_accuracy")]
    assert shares == [pytest.approx(0.05)] * 5
    if is_failure:
        assert (metrics["num_failed"], metrics["greedy_num_failed"]) == (190.0, 95.0)
        assert metrics["accuracy_without_failed"] == 1.0
    else:
        assert metrics["num_failed"] == 0.0
        assert metrics["response_faults/verifier_timeout"] == 0.95
        assert "accuracy_without_failed" not in metrics


def test_a_failure_is_no_better_than_the_worst_answer() -> None:
    trajectories = [make_trajectory(reward) for reward in (1.0, -1.0, None, None)]
    assert score_rollouts(trajectories) == [1.0, -1.0, -1.0, -1.0]


def test_a_validation_in_which_all_fails_has_accuracy_0() -> None:
    generation = FakeGeneration(failing_share=1.0)
    result = validate(validator({"one": ["game"] * 2}, {"game": FakeEnvironment()}, generation, greedy=True))
    zeros = dict.fromkeys(("reward", "accuracy", "avg_length", "greedy_reward", "greedy_accuracy"), 0)
    assert result.metrics == {"num_failed": 2, "greedy_num_failed": 2, **zeros}


# ---- metrics


def test_reward_is_the_mean_and_accuracy_the_share_of_correct_rollouts() -> None:
    trajectories = [make_trajectory(1.08, num_generated=2), make_trajectory(1.0, num_generated=5)]
    rest = {"num_failed": 0.0, "avg_length": 3.5}
    assert sampled_metrics(trajectories, 1, 1.0) == {"reward": 1.04, "accuracy": 1.0, **rest}
    assert sampled_metrics(trajectories, 1, 1.05) == {"reward": 1.04, "accuracy": 0.5, **rest}
    assert sampled_metrics(trajectories, 1, None) == {"reward": 1.04, **rest}
    assert greedy_metrics(trajectories, 1.05) == {"greedy_reward": 1.04, "greedy_accuracy": 0.5}


def test_a_reward_summed_from_parts_is_correct_in_spite_of_rounding() -> None:
    assert sampled_metrics([make_trajectory(sum([0.1] * 10))], 1, 1.0)["accuracy"] == 1.0


def test_pass_at_k_is_the_mean_over_prompts_of_their_best_answer() -> None:
    trajectories = [make_trajectory(reward) for reward in (0.0, 1.0, 0.0, 0.0)]
    assert sampled_metrics(trajectories, 2, 1.0)["pass_2"] == 0.5


def test_pass_at_k_counts_failures_as_wrong_answers() -> None:
    trajectories = [make_trajectory(reward) for reward in (None, 1.0, None, None, 0.0, 0.0)]
    assert sampled_metrics(trajectories, 2, 1.0)["pass_2"] == pytest.approx(1 / 3)


def test_response_faults_are_shares_of_all_rollouts_and_of_no_rollout_in_a_set_without_them() -> None:
    faulty = replace(make_trajectory(0.0), response_faults=("verifier_timeout",))
    metrics = sampled_metrics([faulty, make_trajectory(1.0), make_trajectory(1.0), make_trajectory(None)], 1, 1.0)
    assert metrics["response_faults/verifier_timeout"] == 0.25
    of_two = average_over_sets({"one": {"response_faults/verifier_timeout": 0.25}, "two": {}})
    assert of_two["response_faults/verifier_timeout"] == 0.125
    assert of_two["two/response_faults/verifier_timeout"] == 0.0


def test_greedy_accuracy_counts_failures_as_wrong_answers() -> None:
    metrics = greedy_metrics([make_trajectory(None), make_trajectory(1.0)], 1.0)
    assert metrics == {"greedy_reward": 0.5, "greedy_accuracy": 0.5, "greedy_num_failed": 1.0}


def test_one_set_keeps_plain_names() -> None:
    assert average_over_sets({"one": {"accuracy": 0.5}}) == {"accuracy": 0.5}


def test_several_sets_have_their_own_names_and_the_mean_over_those_that_have_the_metric() -> None:
    metrics = average_over_sets({"one": {"accuracy": 0.5, "num_failed": 0.0}, "two": {"num_failed": 4.0}})
    assert metrics == {
        "accuracy": 0.5,
        "num_failed": 2.0,
        "one/accuracy": 0.5,
        "one/num_failed": 0.0,
        "two/num_failed": 4.0,
    }
