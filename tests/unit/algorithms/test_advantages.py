import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import (
    baseline_and_std,
    batch_metrics,
    clip_advantages,
    divide_by_std,
    is_informative,
    unbiased_std,
)
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, LOSSES
from nemo_rl.errors import ConfigError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.testing import check_estimator
from nemo_rl.types import TrajectoryGroup
from tests.unit.algorithms.batches import make_batch
from tests.unit.algorithms.rollouts import PROMPT, make_group, make_trajectory

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def estimate(batch: TensorDict, loss: LossConfig | None = None, **options: Any) -> torch.Tensor:
    low, high = options.pop("clip_low", None), options.pop("clip_high", None)
    estimator = make_advantage_estimator(ADVANTAGE_ESTIMATORS.read(options), loss or LOSSES.new())
    return clip_advantages(estimator(batch), low, high)


def of_rewards(rewards: list[float], group_id: list[int] | None = None, **options: Any) -> list[float]:
    """Advantages of trajectories of one prompt token and two sampled ones."""
    batch = make_batch([[0, 1, 1]] * len(rewards), rewards=rewards, group_id=group_id)
    advantages = estimate(batch, **options)
    assert advantages.shape == (len(rewards), 3)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages[:, 1], advantages[:, 2])
    return advantages[:, 1].tolist()


def test_two_rewards_normalised_have_the_worked_values() -> None:
    assert of_rewards([1.0, 3.0]) == pytest.approx([-0.70711, 0.70711], abs=1e-5)


def test_leave_one_out_has_the_worked_values() -> None:
    options: dict[str, Any] = {"use_leave_one_out_baseline": True}
    assert of_rewards([1.0, 2.0, 3.0], normalize_rewards=False, **options) == [-1.5, 0.0, 1.5]
    assert of_rewards([1.0, 2.0, 3.0], **options) == pytest.approx([-1.5 / 0.7071, 0.0, 1.5 / 0.7071], rel=1e-4)


def test_leave_one_out_of_two_is_not_normalised() -> None:
    assert of_rewards([1.0, 3.0], use_leave_one_out_baseline=True) == [-2.0, 2.0]


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_one_outlier_among_equal_rewards_does_not_explode(leave_one_out: bool) -> None:
    advantages = of_rewards([0.0] + [0.3] * 7, use_leave_one_out_baseline=leave_one_out)
    assert max(abs(a) for a in advantages) < 3
    assert advantages[0] < 0 < advantages[1]


def test_a_group_of_one_and_a_group_of_equals_have_no_advantage() -> None:
    assert of_rewards([5.0, 0.3, 0.3, 0.3], [0, 1, 1, 1]) == pytest.approx([0.0] * 4, abs=1e-9)


def test_groups_are_told_apart_by_their_id() -> None:
    assert of_rewards([1.0, 10.0, 3.0, 20.0], [5, 2, 5, 2], normalize_rewards=False) == [-1.0, -5.0, 1.0, 5.0]


def test_a_trajectory_of_several_samples_counts_once() -> None:
    batch = make_batch([[0, 1]] * 4, rewards=[0.0, 0.0, 0.0, 3.0], trajectory_id=[0, 0, 0, 1], group_id=[0, 0, 0, 0])
    assert estimate(batch, normalize_rewards=False)[:, 1].tolist() == [-1.5, -1.5, -1.5, 1.5]


def test_chains_of_one_trajectory_with_different_rewards_are_compared_as_trajectories() -> None:
    batch = make_batch([[0, 1]] * 4, rewards=[1.0, 0.0, 0.0, 1.0], trajectory_id=[0, 0, 1, 2])
    assert estimate(batch, normalize_rewards=False)[:, 1].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_gdpo_tells_chains_apart_by_each_of_their_rewards() -> None:
    components: dict[str, Sequence[float]] = {"right": [1.0, 0.0, 0.0, 1.0], "format": [0.0, 1.0, 0.0, 1.0]}
    rewards = [1.0, 1.0, 0.0, 2.0]  # the first two, chains of one trajectory, have one sum
    batch = make_batch([[0, 1]] * 4, rewards=rewards, components=components, trajectory_id=[0, 0, 1, 2])
    apart = make_batch([[0, 1]] * 4, rewards=rewards, components=components)
    weighted = {"name": "gdpo", "reward_weights": {"right": 1.0, "format": 0.5}}
    found = estimate(batch, **weighted)[:, 1]
    assert found.tolist() == estimate(apart, **weighted)[:, 1].tolist()
    assert found[0] != found[1]


def test_only_the_best_rollout_counts_by_its_lead() -> None:
    rewards, groups = [0.25, 1.0, 0.0, 3.0, 3.0], [0, 0, 0, 1, 1]
    raw = of_rewards(rewards, groups, name="grpo_passk", normalize_rewards=False)
    assert raw == [0.0, 0.75, 0.0, 0.0, 0.0]
    assert of_rewards(rewards, groups, name="grpo_passk")[1] == pytest.approx(0.75 / 0.52042, abs=1e-4)


def test_longer_rollouts_weigh_more_in_the_baseline() -> None:
    batch = make_batch([[0, 1, 1, 1], [0, 1, 0, 0]], rewards=[1.0, 0.0])
    assert estimate(batch, name="opo")[:, 1].tolist() == [0.25, -0.75]


def test_failed_trajectory_is_left_out_of_baseline() -> None:
    batch, _ = assemble_batch([make_group([1.0, None, 3.0]), make_group([4.0, None, None])], min_group_size=1)
    assert estimate(batch)[:, -1].tolist() == pytest.approx([-0.70711, 0.70711, 0.0], abs=1e-5)


def test_samples_without_gradient_stay_in_the_baseline() -> None:
    batch = make_batch([[0, 1]] * 2, rewards=[1.0, 3.0], sample_mask=[0.0, 1.0])
    assert estimate(batch, normalize_rewards=False)[:, 1].tolist() == [-1.0, 1.0]


@given(
    rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=8),
    constant=st.integers(-8, 8).map(lambda n: n / 2),
    name=st.sampled_from(["grpo", "grpo_passk", "opo", "gdpo", "reinforce_plus_plus"]),
    leave_one_out=st.booleans(),
)
def test_a_constant_added_to_a_groups_rewards_changes_nothing(
    rewards: list[float], constant: float, name: str, leave_one_out: bool
) -> None:
    other = [0.0, 1.0]
    groups = [0] * len(rewards) + [1] * len(other)
    options: dict[str, Any] = {"name": name, "use_leave_one_out_baseline": leave_one_out}
    before = of_rewards(rewards + other, groups, **options)
    after = of_rewards([r + constant for r in rewards] + other, groups, **options)
    assert after == pytest.approx(before, abs=1e-4)


def test_gdpo_normalises_each_component_and_whitens_their_sum() -> None:
    batch = make_batch([[0, 1]] * 3, components={"right": [0.0, 1.0, 1.0], "format": [0.0, 0.0, 10.0]})
    advantages = estimate(batch, name="gdpo", reward_weights={"format": 0.5})[:, 1]
    right = torch.tensor([-2.0, 1.0, 1.0]) / 3 / (1 / 3) ** 0.5
    form = torch.tensor([-1.0, -1.0, 2.0]) / 3 * 10 / (100 / 3) ** 0.5
    total = right + 0.5 * form
    torch.testing.assert_close(advantages, (total - total.mean()) / total.std(), rtol=1e-4, atol=1e-5)


def test_gdpo_reads_a_list_of_weights_in_the_order_of_the_names() -> None:
    batch = make_batch([[0, 1]] * 3, components={"right": [0.0, 1.0, 1.0], "format": [0.0, 0.0, 10.0]})
    by_name = estimate(batch, name="gdpo", reward_weights={"format": 0.5, "right": 2.0})
    assert estimate(batch, name="gdpo", reward_weights=[0.5, 2.0]).tolist() == by_name.tolist()
    with pytest.raises(ConfigError, match="one weight for each reward: format, right"):
        estimate(batch, name="gdpo", reward_weights=[0.5])


def test_gdpo_centres_what_leave_one_out_leaves_off_centre() -> None:
    """Others' means 3, 2.5, .5; others' deviations, at least half of the group's 2.64575."""
    batch = make_batch([[0, 1]] * 3, components={"right": [0.0, 1.0, 5.0]})
    advantages = estimate(batch, name="gdpo", use_leave_one_out_baseline=True)[:, 1]
    total = torch.tensor([-3 / 8**0.5, -1.5 / 12.5**0.5, 4.5 / (7**0.5 / 2)])
    torch.testing.assert_close(advantages, (total - total.mean()) / total.std(), rtol=1e-4, atol=1e-5)


def test_gdpo_of_equal_rewards_has_no_advantage() -> None:
    batch = make_batch([[0, 1]] * 2, components={"right": [0.3, 0.3], "format": [1.0, 1.0]})
    assert estimate(batch, name="gdpo").tolist() == [[0.0, 0.0]] * 2


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    batch = make_batch([[0, 1, 1, 1], [0, 1, 0, 0]], rewards=[1.0, 3.0])
    advantages = estimate(batch, name="reinforce_plus_plus")
    # Centred rewards -1 (three tokens) and 1 (one token): mean -.5, variance .75.
    assert advantages[0, 1:].tolist() == pytest.approx([-0.5 / 0.75**0.5] * 3)
    assert advantages[1, 1] == pytest.approx(1.5 / 0.75**0.5)


def test_reinforce_plus_plus_without_baseline_keeps_the_difference_between_groups() -> None:
    rewards, groups = [0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]
    assert of_rewards(rewards, groups, name="reinforce_plus_plus") == [0.0] * 4
    kept = of_rewards(rewards, groups, name="reinforce_plus_plus", minus_baseline=False)
    assert kept == pytest.approx([-1.0, -1.0, 1.0, 1.0])


def test_reinforce_plus_plus_ignores_samples_without_gradient() -> None:
    batch = make_batch([[0, 1]] * 3, rewards=[0.0, 2.0, 7.0], group_id=[0, 0, 1], sample_mask=[1.0, 1.0, 0.0])
    assert estimate(batch, name="reinforce_plus_plus")[:2, 1].tolist() == pytest.approx([-1.0, 1.0])


KL_IN_REWARD = LOSSES.read(
    {"reference_policy_kl_penalty": 0.5, "use_kl_in_reward": True, "reference_policy_kl_type": "k1"}
)


@pytest.mark.parametrize("loss", [None, KL_IN_REWARD], ids=["plain", "kl in reward"])
@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names)
def test_contract_of_estimators_holds(name: str, loss: LossConfig | None) -> None:
    check_estimator(name, loss=loss)


def test_kl_in_the_reward_is_subtracted_a_token_at_a_time() -> None:
    batch = make_batch(
        [[0, 1, 1]] * 2,
        rewards=[1.0, 3.0],
        prev_logprobs=[[0.0, -1.0, -1.0]] * 2,
        reference_logprobs=[[0.0, -1.0, -3.0]] * 2,
    )
    advantages = estimate(batch, KL_IN_REWARD, normalize_rewards=False)
    assert advantages[:, 1:].tolist() == [[-1.0, -2.0], [1.0, 0.0]]


def test_kl_in_the_reward_is_whitened_by_reinforce_plus_plus() -> None:
    batch = make_batch(
        [[0, 1], [0, 1]],
        rewards=[1.0, 1.0],
        prev_logprobs=[[0.0, -1.0]] * 2,
        reference_logprobs=[[0.0, -1.0], [0.0, -3.0]],
    )
    assert estimate(batch, KL_IN_REWARD, name="reinforce_plus_plus")[:, 1].tolist() == pytest.approx([1.0, -1.0])


def test_nothing_under_the_mask_reaches_the_whitening() -> None:
    spoilt = [[float("nan"), -1.0]] * 2
    batch = make_batch([[0, 1]] * 2, rewards=[1.0, 2.0], prev_logprobs=spoilt, reference_logprobs=spoilt)
    assert estimate(batch, KL_IN_REWARD, name="reinforce_plus_plus")[:, 1].tolist() == pytest.approx([-1.0, 1.0])


def test_advantages_are_clipped_last() -> None:
    rewards = [0.0] * 7 + [1.0]
    assert max(of_rewards(rewards)) > 2
    assert of_rewards(rewards, clip_low=-0.1, clip_high=2.0) == pytest.approx([-0.1] * 7 + [2.0])


def test_required_keys_follow_the_estimator() -> None:
    def required(name: Any, loss: LossConfig | None = None) -> frozenset[str]:
        section = ADVANTAGE_ESTIMATORS.read({"name": name})
        return make_advantage_estimator(section, loss or LOSSES.new()).required_keys

    ids = {keys.TOKEN_MASK, keys.TRAJECTORY_ID, keys.GROUP_ID}
    assert required("grpo") == ids | {keys.REWARD}
    assert required("gdpo") == ids | {keys.REWARD_COMPONENTS}
    assert required("reinforce_plus_plus") == ids | {keys.REWARD, keys.SAMPLE_MASK}
    assert required("grpo", KL_IN_REWARD) == ids | {keys.REWARD, keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS}


def test_others_that_are_nearly_equal_do_not_explode_with_leave_one_out() -> None:
    """The first of [1, 0 x 14, -1/128]: r less the others' mean is 1.00052, over half of the group's std .25014."""
    advantages = of_rewards([1.0, *[0.0] * 14, -1 / 128], use_leave_one_out_baseline=True)
    assert advantages[0] == pytest.approx(8.0, abs=1e-3)
    assert max(abs(a) for a in advantages) <= 2 * 16**0.5
    shifted = of_rewards([0.0, *[0.3] * 6, 0.3001], use_leave_one_out_baseline=True)
    assert shifted[0] == pytest.approx(-5.657, abs=1e-3)


@pytest.mark.parametrize("num_correct", range(2, 7))
def test_the_bound_changes_nothing_for_right_and_wrong_answers(num_correct: int) -> None:
    rewards = [1.0] * num_correct + [0.0] * (8 - num_correct)
    others = rewards[1:]
    expected = (1.0 - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)
    assert of_rewards(rewards, use_leave_one_out_baseline=True)[0] == pytest.approx(expected, rel=1e-5)


@settings(max_examples=300)
@given(
    rewards=st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.3, 0.3001, 1 - 1e-7]), min_size=2, max_size=20),
    leave_one_out=st.booleans(),
)
def test_any_rewards_between_0_and_1_have_bounded_advantages(rewards: list[float], leave_one_out: bool) -> None:
    size = len(rewards)
    bound = 2 * size**0.5 if leave_one_out else (size - 1) / size**0.5
    advantages = of_rewards(rewards, use_leave_one_out_baseline=leave_one_out)
    assert max(abs(a) for a in advantages) <= bound * (1 + 1e-5)


@settings(max_examples=200)
@given(
    rewards=st.lists(st.floats(0, 1), min_size=4, max_size=12),
    name=st.sampled_from(["gdpo", "reinforce_plus_plus"]),
)
def test_whitened_advantages_are_bounded_by_what_they_are_whitened_over(rewards: list[float], name: str) -> None:
    count = len(rewards) * (2 if name == "reinforce_plus_plus" else 1)  # trajectories, or their tokens
    assert max(abs(a) for a in of_rewards(rewards, name=name)) <= count**0.5 * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 1e-2])
def test_gdpo_does_not_amplify_what_is_left_where_rewards_cancel(scale: float) -> None:
    score = [0.0, 0.1, 0.3, 0.7, 0.2, 0.9]
    batch = make_batch(
        [[0, 1]] * 6, components={"right": score, "wrong": [1 - scale * s for s in score]}, rewards=[1.0] * 6
    )
    advantages = estimate(batch, name="gdpo")[:, 1]
    assert advantages.abs().max() < 1e-3


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_shipped_recipes_keep_advantages_bounded_with_shaped_rewards(recipe: Path) -> None:
    """A lone success, and one of the others a token into the overlong buffer."""
    section = OmegaConf.select(OmegaConf.create(recipe.read_text()), "grpo", default={})
    options = dict(section.get("adv_estimator") or {})
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        options |= {key: section[key]} if key in section else {}
    if options.get("name") == "opd":
        pytest.skip("reads no rewards")
    advantages = of_rewards([1.0, *[0.0] * 14, -1 / 128], **options)
    assert max(abs(a) for a in advantages) <= 2 * 32**0.5


def stats(rewards: list[float], groups: list[int], leave_one_out: bool = False) -> tuple[list[float], list[float]]:
    baseline, std = baseline_and_std(torch.tensor(rewards), torch.tensor(groups), leave_one_out=leave_one_out)
    return baseline.tolist(), std.tolist()


def test_baseline_and_std_leave_one_out() -> None:
    baseline, std = stats([1.0, 2.0, 3.0], [0, 0, 0], leave_one_out=True)
    assert baseline == [2.5, 2.0, 1.5]
    assert std == pytest.approx([0.7071, 1.4142, 0.7071], abs=1e-4)


def test_groups_may_be_interleaved_and_of_different_sizes() -> None:
    baseline, std = stats([1.0, 10.0, 3.0, 20.0, 5.0], [0, 1, 0, 1, 0])
    assert baseline == [3.0, 15.0, 3.0, 15.0, 3.0]
    assert std == pytest.approx([2.0, 50**0.5, 2.0, 50**0.5, 2.0])


def test_a_group_of_one_is_its_own_baseline() -> None:
    for leave_one_out in (False, True):
        assert stats([4.0, 1.0, 2.0], [0, 1, 1], leave_one_out)[0][0] == 4.0
        assert stats([4.0, 1.0, 2.0], [0, 1, 1], leave_one_out)[1][0] == 0.0


def test_leave_one_out_of_two_has_no_std() -> None:
    assert stats([1.0, 3.0], [0, 0], leave_one_out=True) == ([3.0, 1.0], [0.0, 0.0])


def test_rounding_is_no_deviation() -> None:
    _, std = stats([0.1 + 0.2, 0.3, 0.3], [0, 0, 0])
    assert std == [0.0, 0.0, 0.0]
    assert unbiased_std(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)) == 0
    _, std = stats([0.0, 0.3, 0.3, 0.3], [0] * 4, leave_one_out=True)
    assert std[0] == 0.0


def test_small_but_real_deviations_are_kept() -> None:
    _, std = stats([1.0, 1.0001], [0, 0])
    assert std[0] == pytest.approx(1e-4 / 2**0.5, rel=1e-3)


def test_zero_std_leaves_the_numbers_as_they_are() -> None:
    divided = divide_by_std(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.5]))
    assert divided.tolist() == pytest.approx([2.0, 4.0], rel=1e-5)


def test_unbiased_std_of_fewer_than_two_is_zero() -> None:
    assert unbiased_std(torch.tensor([])) == 0
    assert unbiased_std(torch.tensor([3.0])) == 0


@given(
    rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9),
    leave_one_out=st.booleans(),
)
def test_agrees_with_the_definition(rewards: list[float], leave_one_out: bool) -> None:
    baseline, std = stats(rewards, [0] * len(rewards), leave_one_out)
    for i, reward in enumerate(rewards):
        peers = rewards[:i] + rewards[i + 1 :] if leave_one_out else rewards
        assert baseline[i] == pytest.approx(statistics.fmean(peers) if peers else reward)
        expected = statistics.stdev(peers) if len(peers) > 1 else 0.0
        if leave_one_out and expected > 0:
            expected = max(expected, statistics.stdev(rewards) / 2)
        assert std[i] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_each_group_is_as_alone_whatever_the_sizes_of_others(leave_one_out: bool) -> None:
    """Equal rewards, one that differs a little, and a single one, beside the largest group."""
    groups = [[0.25] * 3, [0.0, 0.25, 0.25, 0.25390625], [0.5], [0.75] * 2, [1.0, 0.0, 0.0, 0.5, 0.25, 1.0, 0.0, 1.0]]
    rewards, ids = [r for group in groups for r in group], [i for i, group in enumerate(groups) for _ in group]
    baselines, stds = stats(rewards, ids, leave_one_out)
    for group in groups:
        for i, reward in enumerate(group):
            peers = group[:i] + group[i + 1 :] if leave_one_out else group
            std = statistics.stdev(peers) if len(peers) > 1 else 0.0
            floor = statistics.stdev(group) / 2 if leave_one_out and std > 0 else 0.0
            assert baselines.pop(0) == pytest.approx(statistics.fmean(peers) if peers else reward)
            assert stds.pop(0) == pytest.approx(max(std, floor), abs=1e-12)


def test_the_greedy_rollouts_reward_is_subtracted() -> None:
    batch = make_batch([[0, 1]] * 3, rewards=[1.0, 0.25, 0.5], group_id=[0, 0, 1], baseline_reward=[0.5, 0.5, 1.0])
    assert estimate(batch, name="remax")[:, 1].tolist() == [0.5, -0.25, -0.5]


def test_others_std_is_at_least_half_of_the_groups() -> None:
    """[0, .3 x 6, .3001]: the group's std is .10607, that of the others of the first .0000378."""
    _, std = stats([0.0, *[0.3] * 6, 0.3001], [0] * 8, leave_one_out=True)
    assert std[0] == pytest.approx(0.10607 / 2, abs=1e-5)
    assert std[1] == pytest.approx(0.11340, abs=1e-5)


def names(*groups: TrajectoryGroup) -> list[str]:
    return [group.group_id for group in groups if is_informative(group)]


def test_groups_with_equal_rewards_are_dropped_and_order_is_kept() -> None:
    groups = [make_group([0.0, 1.0], "a"), make_group([1.0, 1.0], "b"), make_group([0.5, 0.4, 0.5], "c")]
    assert names(*groups) == ["a", "c"]


def test_failures_make_no_difference_between_rewards() -> None:
    assert names(make_group([1.0, None, 1.0])) == []
    assert names(make_group([1.0, None])) == []
    assert names(make_group([None, None])) == []


def test_the_total_counts_not_its_parts_and_rounding_is_no_difference() -> None:
    members = (make_trajectory({"a": 0.1, "b": 0.2}), make_trajectory({"a": 0.3}, index=1))
    group = TrajectoryGroup("g", PROMPT, members)
    assert names(group) == []
    assert is_informative(group, by_name=True)


def test_batch_metrics_count_a_trajectory_once_and_valid_tokens_only() -> None:
    batch = make_batch(
        [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]],
        trajectory_id=[0, 0, 1],
        rewards=[2.0, 2.0, -1.0],
        components={"right": [1.0, 1.0, 0.0], "format": [0.5, 0.5, 0.0]},
        advantages=[[9.0, 9.0, 1.0, 1.0], [9.0, 1.0, 9.0, 1.0], [9.0, 9.0, 9.0, -2.0]],
    )
    assert batch_metrics(batch) == pytest.approx(
        {
            "reward": 0.75,
            "filtered_reward": 0.75,
            "shaped_reward": 0.5,
            "mean_prompt_length": 2.5,
            "total_num_tokens": 12.0,
            "advantages/mean": 0.4,
            "advantages/max": 1.0,
            "advantages/min": -2.0,
        }
    )


def test_a_batch_without_advantages_or_without_sampled_tokens_has_metrics() -> None:
    batch = make_batch([[0, 0, 0]])
    assert batch_metrics(batch)["mean_prompt_length"] == 3
    assert batch_metrics(batch)["advantages/max"] == 0
    assert "advantages/mean" not in batch_metrics(batch.exclude("advantages"))


@given(st.lists(st.floats(0, 1, width=16), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_without_a_bound_the_deviation_is_that_of_the_others(rewards: list[float]) -> None:
    """As NeMo-RL computes it, from its formula: the unbiased deviation of the other rewards of the group."""
    _, std = baseline_and_std(
        torch.tensor(rewards), torch.zeros(4, dtype=torch.long), leave_one_out=True, min_std_share=0
    )
    expected = [statistics.stdev([*rewards[:i], *rewards[i + 1 :]]) for i in range(4)]
    assert std.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_bound_of_the_deviation_is_an_option() -> None:
    rewards = [0.0, 0.5, 0.5, 0.51]
    options: dict[str, Any] = {"use_leave_one_out_baseline": True}
    (bounded, *_), (free, *_) = of_rewards(rewards, **options), of_rewards(rewards, **options, min_std_share=0)
    others = statistics.stdev(rewards[1:])
    assert free == pytest.approx((0 - statistics.mean(rewards[1:])) / others, rel=1e-3)
    assert bounded == pytest.approx((0 - statistics.mean(rewards[1:])) / (statistics.stdev(rewards) / 2), rel=1e-3)
