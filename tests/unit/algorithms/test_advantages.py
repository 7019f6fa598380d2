from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import clip_advantages
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, LOSSES
from nemo_rl.experience.assembly import assemble_batch
from tests.unit.algorithms.batches import make_batch
from tests.unit.algorithms.rollouts import make_group


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


def test_failed_trajectory_is_left_out_of_baseline() -> None:
    batch, _ = assemble_batch([make_group([1.0, None, 3.0]), make_group([4.0, None, None])], min_group_size=1)
    assert estimate(batch)[:, -1].tolist() == pytest.approx([-0.70711, 0.70711, 0.0], abs=1e-5)


def test_samples_without_gradient_stay_in_the_baseline() -> None:
    batch = make_batch([[0, 1]] * 2, rewards=[1.0, 3.0], sample_mask=[0.0, 1.0])
    assert estimate(batch, normalize_rewards=False)[:, 1].tolist() == [-1.0, 1.0]


@given(
    rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=8),
    constant=st.integers(-8, 8).map(lambda n: n / 2),
    name=st.sampled_from(["grpo", "gdpo", "reinforce_plus_plus"]),
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
