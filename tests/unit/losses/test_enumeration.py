"""Expected gradients by enumeration: all responses of three tokens of a toy policy, against claimed objectives.

Groups of G responses are weighted by the probability of sampling them, so the gradient is the expectation itself. It is
compared with the derivative of an objective that is written for the whole distribution, with no sampling in it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nemo_rl import batch as keys
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.config.loss import CrossTokenizerConfig
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, LOSSES
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.interfaces import LossFn
from nemo_rl.loss_types import Normalizer, TokenScores, TopK
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import CrossTokenizerLoss, TopKDivergence
from nemo_rl.losses.likelihood import NegativeLogLikelihood
from nemo_rl.losses.make import make_loss
from nemo_rl.losses.preference import PreferenceLoss
from tests.unit.algorithms.batches import make_batch

RESPONSES = list(itertools.product((0, 1), repeat=3))
PREFIXES = [prefix for length in range(3) for prefix in itertools.product((0, 1), repeat=length)]  # a state each
NODES = torch.tensor([[PREFIXES.index(y[:t]) for t in range(3)] for y in RESPONSES])  # [8, 3]
TOKENS = torch.tensor(RESPONSES)  # [8, 3]


def make_policy(seed: int) -> Tensor:
    """Logits of each prefix: [7, 2]."""
    return torch.randn(7, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.7


POLICY, ENGINE, REFERENCE, TEACHER = (make_policy(seed) for seed in range(4))
REWARDS = torch.tensor([0.0, 0.5, 0.2, 1.0, 0.1, 0.9, 0.0, 0.3], dtype=torch.float64)
RIGHT = (REWARDS > 0.4).double()  # 1 for three of the eight
SUM = {"token_level_loss": False, "trajectory_token_divisor": 1.0}  # the sum over a response's tokens


def logprobs_of(logits: Tensor) -> Tensor:
    """Return the log-prob of each token of each response: [8, 3]."""
    return logits.log_softmax(-1)[NODES, TOKENS]


def probabilities(logits: Tensor) -> Tensor:
    """Return the probability of each response: [8]."""
    return logprobs_of(logits).sum(-1).exp()


def visits(logits: Tensor) -> Tensor:
    """Return the probability of reaching each prefix, without a gradient: [7]."""
    reached = torch.zeros(7, dtype=torch.float64)
    for response, probability in enumerate(probabilities(logits).detach()):
        reached[NODES[response]] += probability
    return reached


def divergences(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) at each prefix: [7]."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def row(values: Tensor) -> Tensor:
    """Put the prompt's token before the sampled ones: [N, 4] of [N, 3]."""
    return torch.nn.functional.pad(values, (1, 0))


def greedy_response(logits: Tensor) -> int:
    """Return the index of the response whose tokens are the likeliest, each given those before."""
    prefix: Any = ()
    while len(prefix) < 3:
        prefix = (*prefix, int(logits[PREFIXES.index(prefix)].argmax()))
    return RESPONSES.index(prefix)


def rows_of(groups: Sequence[Sequence[int]], rewards: Tensor, behavior: Tensor, prev: Tensor) -> TensorDict:
    """Return the batch of these groups of responses, sampled by `behavior`."""
    flat = torch.tensor(groups).flatten()
    return make_batch(
        [[0, 1, 1, 1]] * len(flat),
        rewards=rewards[flat].tolist(),
        group_id=[index for index, group in enumerate(groups) for _ in group],
        components={"a": rewards[flat].tolist()},
        prev_logprobs=row(logprobs_of(prev)[flat]),
        generation_logprobs=row(logprobs_of(behavior)[flat]),
        reference_logprobs=row(logprobs_of(REFERENCE)[flat]),
        teacher_logprobs=row(logprobs_of(TEACHER)[flat]),
        baseline_reward=rewards[greedy_response(behavior)].repeat(len(flat)),
    )


def expected_gradient(
    loss: dict[str, Any],
    estimator: dict[str, Any],
    *,
    rewards: Tensor = REWARDS,
    behavior: Tensor = POLICY,
    prev: Tensor = POLICY,
    group_size: int = 2,
) -> Tensor:
    """Return the gradient of the loss at POLICY, in expectation over groups that `behavior` samples: [7, 2]."""
    section = LOSSES.read(loss)
    estimate = make_advantage_estimator(ADVANTAGE_ESTIMATORS.read(estimator), section)
    groups = list(itertools.product(range(8), repeat=group_size))
    batch = rows_of(groups, rewards, behavior, prev)
    batch[keys.ADVANTAGES] = torch.cat([estimate(rows_of([g], rewards, behavior, prev)) for g in groups])
    weights = probabilities(behavior)[torch.tensor(groups)].prod(-1)  # [8 ** G]
    batch[keys.SAMPLE_MASK] = weights.repeat_interleave(group_size).float()
    logits = POLICY.clone().requires_grad_()
    current = row(logprobs_of(logits)[torch.tensor(groups).flatten()])
    value, _ = make_loss(section)(TokenScores(current), batch, Normalizer(3.0 * group_size, float(group_size)))
    return torch.autograd.grad(value, logits)[0]


def derivative(objective: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the derivative at POLICY: [7, 2]."""
    logits = POLICY.clone().requires_grad_()
    return torch.autograd.grad(objective(logits), logits)[0]


def assert_minimizes(gradient: Tensor, objective: Callable[[Tensor], Tensor]) -> None:
    expected = derivative(objective)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=2e-6)


def expected_reward(logits: Tensor, rewards: Tensor = REWARDS) -> Tensor:
    return (probabilities(logits) * rewards).sum()


# ---- on policy: every loss is the policy gradient ----

LOO = {"use_leave_one_out_baseline": True, "normalize_rewards": False}
ON_POLICY: dict[str, dict[str, Any]] = {
    "ppo": SUM,
    "ppo, on-policy ratio": {**SUM, "force_on_policy_ratio": True},
    "ppo, dual clip": {**SUM, "ratio_clip_c": 3.0},
    "gspo": {"type": "gspo", "trajectory_token_divisor": 1.0},
    "gspo_token": {"type": "gspo_token", "trajectory_token_divisor": 1.0},
    "gmpo": {"type": "gmpo", "trajectory_token_divisor": 1.0},
    "cispo": {"type": "cispo", **SUM},
    "vespo": {"type": "vespo", **SUM},
    "dppo": {"type": "dppo", **SUM},
    "dppo, truncated": {"type": "dppo", "ratio_clip_c": 3.0, **SUM},
    "ppo, against the engine": {"ratio_against": "generation", **SUM},
    "sapo": {"type": "sapo", "trajectory_token_divisor": 1.0},
    "reinforce": {"type": "reinforce", **SUM},
    "clip_cov without eligible tokens": {"type": "clip_cov", "clip_cov_lb": 1e6, "clip_cov_ub": 1e7, **SUM},
    "kl_cov": {"type": "kl_cov", "kl_cov_ratio": 1.0, **SUM},
}


@pytest.mark.parametrize("loss", ON_POLICY.values(), ids=ON_POLICY)
@pytest.mark.parametrize("group_size", [2, 3])
def test_on_policy_every_loss_climbs_the_expected_reward(loss: dict[str, Any], group_size: int) -> None:
    assert_minimizes(expected_gradient(loss, LOO, group_size=group_size), lambda z: -expected_reward(z))


@pytest.mark.parametrize(
    ("divisors", "share"),
    [({"token_level_loss": True}, 3), ({"token_level_loss": False}, 3), ({**SUM, "trajectory_token_divisor": 8.0}, 8)],
)
def test_divisors_scale_the_objective(divisors: dict[str, Any], share: float) -> None:
    assert_minimizes(expected_gradient(divisors, LOO), lambda z: -expected_reward(z) / share)


def test_the_groups_own_mean_shrinks_the_gradient_by_one_over_g() -> None:
    for size in (2, 3):
        gradient = expected_gradient(SUM, {"normalize_rewards": False}, group_size=size)
        assert_minimizes(gradient, lambda z, size=size: -expected_reward(z) * (size - 1) / size)


@pytest.mark.parametrize("size", [2, 3])
def test_the_lead_over_the_second_best_climbs_the_expected_best_of_the_group(size: int) -> None:
    def best(logits: Tensor) -> Tensor:
        groups = torch.tensor(list(itertools.product(range(8), repeat=size)))
        return (probabilities(logits)[groups].prod(-1) * REWARDS[groups].amax(-1)).sum()

    gradient = expected_gradient(SUM, {"name": "grpo_passk", "normalize_rewards": False}, group_size=size)
    assert_minimizes(gradient, lambda z: -best(z) / size)


@pytest.mark.parametrize("size", [1, 2])
def test_the_greedy_responses_reward_is_a_baseline_that_leaves_the_gradient_as_it_is(size: int) -> None:
    assert REWARDS[greedy_response(POLICY)] > 0
    assert_minimizes(expected_gradient(SUM, {"name": "remax"}, group_size=size), lambda z: -expected_reward(z))


def test_weighted_by_equal_lengths_the_baseline_is_the_groups_mean() -> None:
    assert_minimizes(expected_gradient(SUM, {"name": "opo"}), lambda z: -expected_reward(z) / 2)


# ---- off policy ----

WIDE = {"ratio_clip_min": 0.999, "ratio_clip_max": 1e6}
RAW = {"name": "tests.unit.losses.test_enumeration:RawRewards"}


class RawRewards:
    """A = r: for objectives without a baseline."""

    required_keys = frozenset({keys.REWARD})

    def __call__(self, batch: TensorDict) -> Tensor:
        return batch[keys.REWARD][:, None].expand_as(batch[keys.TOKEN_MASK]).contiguous()


def surrogate(term: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return -E over the engine's responses of R times the sum over tokens of `term` of the ratio."""

    def objective(logits: Tensor) -> Tensor:
        ratio = (logprobs_of(logits) - logprobs_of(ENGINE)).exp()
        return -(probabilities(ENGINE) * REWARDS * term(ratio).sum(-1)).sum()

    return objective


OFF_POLICY: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "ppo": ({**SUM, **WIDE}, surrogate(lambda r: r)),
    "ppo clipped": (SUM, surrogate(lambda r: torch.minimum(r, r.clamp(0.8, 1.2)))),
    "sapo": ({"type": "sapo", "trajectory_token_divisor": 1.0}, surrogate(lambda r: 4 * (r - 1).sigmoid())),
    "cispo": (
        {"type": "cispo", **SUM, "ratio_clip_min": 0.4, "ratio_clip_max": 0.3},
        surrogate(lambda r: r.detach().clamp(0.6, 1.3) * r.log()),
    ),
    "reinforce": ({"type": "reinforce", **SUM}, surrogate(lambda r: r.log())),
    "gspo": (
        {"type": "gspo", "trajectory_token_divisor": 1.0, **WIDE},
        surrogate(lambda r: 3 * r.prod(-1, keepdim=True) ** (1 / 3)),
    ),
    "gspo clipped": (
        {"type": "gspo", "trajectory_token_divisor": 1.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.1},
        surrogate(lambda r: 3 * torch.minimum(s := r.prod(-1, keepdim=True) ** (1 / 3), s.clamp(0.9, 1.1))),
    ),
    "kl_cov": (
        {"type": "kl_cov", "kl_cov_ratio": 1.0, "ppo_kl_coef": 0.5, **SUM},
        lambda z: (
            surrogate(lambda r: r)(z)
            + 0.5 * (probabilities(ENGINE) * (logprobs_of(z) - logprobs_of(ENGINE)).abs().sum(-1)).sum()
        ),
    ),
}


def density(w: Tensor) -> Tensor:
    """VESPO's weight of responses with A >= 0."""
    return w.square() * (3 * (1 - w)).exp()


def within(bound: float) -> Callable[[Tensor], Tensor]:
    """Return the surrogate of `dppo` with total variation, whose rewards are 0 or more."""

    def objective(logits: Tensor) -> Tensor:
        moved = logprobs_of(POLICY).exp() - logprobs_of(ENGINE).exp()
        assert 0 < (moved > bound).sum() < 24
        ratio = (logprobs_of(logits) - logprobs_of(ENGINE)).exp()
        return -(probabilities(ENGINE) * REWARDS * (ratio * (moved <= bound)).sum(-1)).sum()

    return objective


OFF_POLICY |= {
    "gspo_token clipped": (
        {"type": "gspo_token", "trajectory_token_divisor": 1.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.1},
        OFF_POLICY["gspo clipped"][1],
    ),
    "gmpo": (
        {"type": "gmpo", "trajectory_token_divisor": 1.0, "ratio_clip_max": 0.2},
        surrogate(lambda r: 3 * r.log().clamp(max=0.2).mean(-1, keepdim=True).exp()),
    ),
    "vespo": (
        {"type": "vespo", **SUM},
        surrogate(lambda r: density(r.detach().prod(-1, keepdim=True)) * r.log()),
    ),
    "dppo": ({"type": "dppo", "ratio_clip_max": 0.1, **SUM}, within(0.1)),
    "dro": (
        {"type": "reinforce", "log_ratio_penalty": 0.2, **SUM},
        lambda z: (
            surrogate(lambda r: r.log())(z)
            + 0.2 * (probabilities(ENGINE) * (logprobs_of(z) - logprobs_of(ENGINE)).square().sum(-1)).sum()
        ),
    ),
}


def without_high_covariance(logits: Tensor) -> Tensor:
    """The surrogate of `clip_cov` with all eligible tokens held back; means are over the 24 tokens."""
    advantages = REWARDS[:, None].expand(8, 3)
    ratio, current = (logprobs_of(logits) - logprobs_of(ENGINE)).exp(), logprobs_of(POLICY)
    covariance = (advantages - advantages.mean()) * (current - current.mean())
    held_back = (covariance > 0.05) & (covariance < 1) & (ratio <= 1.2)
    assert 0 < held_back.sum() < 24
    kept = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * ~held_back
    return -(probabilities(ENGINE)[:, None] * advantages * kept).sum()


OFF_POLICY["clip_cov"] = (
    {"type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0, **SUM},
    without_high_covariance,
)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_off_policy_each_loss_descends_its_surrogate(name: str) -> None:
    loss, objective = OFF_POLICY[name]
    assert_minimizes(expected_gradient(loss, RAW, behavior=ENGINE, prev=ENGINE, group_size=1), objective)


def test_weights_of_whole_sequences_correct_for_the_engine_exactly() -> None:
    loss = {"type": "gspo", "trajectory_token_divisor": 1.0, "use_importance_sampling_correction": True}
    assert_minimizes(expected_gradient(loss, LOO, behavior=ENGINE), lambda z: -expected_reward(z))


@pytest.mark.parametrize("kind", ["sequence_mask", "sequence_truncate"])
def test_products_of_a_sequences_weights_correct_for_the_engine_up_to_their_bound(kind: str) -> None:
    loss = {**SUM, "type": "reinforce", "use_importance_sampling_correction": True}
    loss |= {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 1.2}
    weight = probabilities(POLICY) / probabilities(ENGINE)
    assert (weight > 1.2).any()
    used = weight.clamp(max=1.2) if kind == "sequence_truncate" else weight * (weight <= 1.2)
    assert_minimizes(
        expected_gradient(loss, RAW, behavior=ENGINE, group_size=1),
        lambda z: -(probabilities(ENGINE) * REWARDS * used * logprobs_of(z).sum(-1)).sum(),
    )


@pytest.mark.parametrize("kind", [None, "tis", "icepop"])
def test_weights_of_tokens_correct_the_token_and_truncation_bounds_them(kind: str | None) -> None:
    options: dict[str, Any] = {"type": "reinforce", **SUM, "use_importance_sampling_correction": True}
    if kind is not None:
        options |= {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 1.1}
    weight = (logprobs_of(POLICY) - logprobs_of(ENGINE)).exp()
    assert (weight > 1.1).any()
    used = {None: weight, "tis": weight.clamp(max=1.1), "icepop": weight * (weight <= 1.1)}[kind]

    def objective(logits: Tensor) -> Tensor:
        return -(probabilities(ENGINE) * REWARDS * (used * logprobs_of(logits)).sum(-1)).sum()

    assert_minimizes(expected_gradient(options, RAW, behavior=ENGINE, group_size=1), objective)


# ---- KL to the reference ----


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
@pytest.mark.parametrize("is_on_policy", [True, False])
def test_k1_and_k3_have_the_gradient_of_the_divergence_at_each_visited_prefix(kl_type: str, is_on_policy: bool) -> None:
    behavior = POLICY if is_on_policy else ENGINE
    loss = {**SUM, "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kl_type}
    loss |= {"use_on_policy_kl_approximation": not is_on_policy}
    gradient = expected_gradient(loss, RAW, rewards=REWARDS * 0, behavior=behavior, group_size=1)
    assert_minimizes(gradient, lambda z: 0.3 * (visits(behavior) * divergences(z, REFERENCE)).sum())


def test_k2_has_the_gradient_of_the_mean_square() -> None:
    loss = {**SUM, "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2"}
    gradient = expected_gradient(loss, RAW, rewards=REWARDS * 0, group_size=1)

    def objective(logits: Tensor) -> Tensor:
        lp, ref = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
        return 0.3 * (visits(POLICY) * (lp.exp() * (ref - lp) ** 2 / 2).sum(-1)).sum()

    assert_minimizes(gradient, objective)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_k2s_gradient_is_the_divergences_and_the_own_one_is_the_estimates(kl_type: str) -> None:
    loss = {**SUM, "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kl_type}
    borrowed = expected_gradient({**loss, "reference_policy_kl_gradient": "k2"}, RAW, rewards=REWARDS * 0, group_size=1)
    assert_minimizes(borrowed, lambda z: 0.3 * (visits(POLICY) * divergences(z, REFERENCE)).sum())
    own = expected_gradient(
        {**loss, "reference_policy_kl_gradient": "pathwise"}, RAW, rewards=REWARDS * 0, group_size=1
    )

    def estimates(logits: Tensor) -> Tensor:
        d = logprobs_of(REFERENCE) - logprobs_of(logits)
        k = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[kl_type]
        return 0.3 * (probabilities(POLICY) * k.sum(-1)).sum()

    torch.testing.assert_close(own.double(), derivative(estimates), rtol=0, atol=2e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_divergence() -> None:
    loss = {**SUM, "type": "reinforce", "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"}
    gradient = expected_gradient({**loss, "use_kl_in_reward": True}, LOO)
    assert_minimizes(gradient, lambda z: 0.3 * (visits(POLICY) * divergences(z, REFERENCE)).sum() - expected_reward(z))


# ---- estimators that divide: objectives for right and wrong answers ----


@pytest.mark.parametrize("behavior", [POLICY, ENGINE], ids=["on policy", "off policy"])
def test_normalised_advantages_of_right_and_wrong_answers_climb_a_function_of_their_share(behavior: Tensor) -> None:
    """With k of the other G - 1 right, F'(p) is the mean over k of A(right | k + 1) - A(wrong | k); G = 3 here.

    Off policy the weight of a whole response corrects for its own sampling; p is the share of those who sampled.
    """
    gaps = []
    for right_others in range(3):
        values = []
        for own in (1, 0):
            rewards = [own] + [1] * right_others + [0] * (2 - right_others)
            mean = sum(rewards) / 3
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 2)
            values.append((own - mean) / (std + 1e-6) if std else 0.0)
        gaps.append(values[0] - values[1])

    def slope(p: float) -> float:
        return sum(math.comb(2, k) * p**k * (1 - p) ** (2 - k) * gap for k, gap in enumerate(gaps))

    share = float((probabilities(behavior) * RIGHT).sum())
    corrected = {"type": "gspo", "trajectory_token_divisor": 1.0, "use_importance_sampling_correction": True}
    loss = SUM if behavior is POLICY else corrected
    biased = math.sqrt(3 / 2)  # the whitening's variance divides by N, the group's by N - 1
    for name, factor in {"grpo": 1.0, "gdpo": 1.0, "reinforce_plus_plus": biased}.items():
        gradient = expected_gradient(loss, {"name": name}, rewards=RIGHT, behavior=behavior, group_size=3)
        expected = -slope(share) * factor * derivative(lambda z: expected_reward(z, RIGHT))
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=5e-6)


def test_whitening_without_a_baseline_is_that_of_the_batch() -> None:
    one = expected_gradient(SUM, {"name": "reinforce_plus_plus", "minus_baseline": False}, rewards=RIGHT, group_size=3)
    other = expected_gradient(SUM, {"name": "reinforce_plus_plus"}, rewards=RIGHT, group_size=3)
    torch.testing.assert_close(one, other)


def test_the_teachers_advantages_descend_the_divergence_to_the_teacher() -> None:
    gradient = expected_gradient({"type": "reinforce", **SUM}, {"name": "opd"}, group_size=1)
    assert_minimizes(gradient, lambda z: (visits(POLICY) * divergences(z, TEACHER)).sum())


def test_off_policy_the_teachers_advantages_descend_the_divergence_where_the_engine_leads() -> None:
    correction = {"use_importance_sampling_correction": True}
    tokens = expected_gradient({"type": "reinforce", **SUM, **correction}, {"name": "opd"}, behavior=ENGINE)
    assert_minimizes(tokens, lambda z: (visits(ENGINE) * divergences(z, TEACHER)).sum())
    sequences = {"type": "gspo", "trajectory_token_divisor": 1.0, **correction}
    assert_minimizes(  # each of the three tokens has the mean of the sequence's log-ratios
        expected_gradient(sequences, {"name": "opd"}, behavior=ENGINE),
        lambda z: (probabilities(z) * (logprobs_of(z) - logprobs_of(TEACHER)).sum(-1)).sum() / 3,
    )


# ---- distillation and supervised training ----


def student_gradient(loss: LossFn, behavior: Tensor, **columns: Tensor) -> Tensor:
    """Return the expected gradient over responses of `behavior` of a loss on distributions: [7, 2]."""
    batch = rows_of([[y] for y in range(8)], REWARDS, behavior, POLICY)
    batch[keys.SAMPLE_MASK] = probabilities(behavior).float()
    for name, column in columns.items():  # [8, 3, K] or [8, 3]
        batch[name] = torch.cat([torch.zeros_like(column[:, :1]), column], dim=1)
    logits = POLICY.clone().requires_grad_()
    everything = torch.cat([torch.zeros(8, 1, 2), logits.log_softmax(-1)[NODES]], dim=1)  # [8, 4, 2]
    candidates = None
    if keys.TEACHER_TOPK_IDS in columns:
        candidates = everything.gather(-1, batch[keys.TEACHER_TOPK_IDS].clamp(min=0))
    entropy = -(everything.exp() * everything).sum(-1) if loss.required_scores.entropy else None
    topk = TopK(torch.tensor([0, 1]).expand(8, 4, 2), everything) if loss.required_scores.topk else None
    scores = TokenScores(row(logprobs_of(logits)).float(), candidates, entropy, topk)
    value, _ = loss(scores, batch, Normalizer(1.0, 1.0))
    return torch.autograd.grad(value, logits)[0]


def teachers_tokens(k: int) -> dict[str, Tensor]:
    """The teacher's K most likely tokens at each position, with their log-probs: [8, 3, K]."""
    logprobs, ids = TEACHER.log_softmax(-1)[NODES].topk(k, dim=-1)
    return {keys.TEACHER_TOPK_IDS: ids, keys.TEACHER_TOPK_LOGPROBS: logprobs}


BEHAVIORS = pytest.mark.parametrize("behavior", [POLICY, ENGINE], ids=["on policy", "off policy"])
FORWARD_WEIGHTS = {"forward": 1.0, "reverse": 0.0, "mixed": 0.3}


@BEHAVIORS
@pytest.mark.parametrize("kl_type", FORWARD_WEIGHTS)
@pytest.mark.parametrize("loss_class", [TopKDivergence, CrossTokenizerLoss])
def test_distillation_descends_its_divergence_at_each_visited_prefix(
    loss_class: type[TopKDivergence | CrossTokenizerLoss], kl_type: Any, behavior: Tensor
) -> None:
    config = DistillationLossConfig(kl_type=kl_type, mixed_kl_weight=0.3)
    gradient = student_gradient(loss_class(config), behavior, **teachers_tokens(2))
    w = FORWARD_WEIGHTS[kl_type]

    def objective(logits: Tensor) -> Tensor:
        each = w * divergences(TEACHER, logits) + (1 - w) * divergences(logits, TEACHER)
        return (visits(behavior) * each).sum()

    assert_minimizes(gradient, objective)


@BEHAVIORS
@pytest.mark.parametrize("kl_type", FORWARD_WEIGHTS)
def test_distillation_from_one_token_makes_the_other_cost_a_hundred_nats(kl_type: Any, behavior: Tensor) -> None:
    config = DistillationLossConfig(kl_type=kl_type, mixed_kl_weight=0.3, zero_outside_topk=True)
    gradient = student_gradient(TopKDivergence(config), behavior, **teachers_tokens(1))
    w, best = FORWARD_WEIGHTS[kl_type], TEACHER.argmax(-1, keepdim=True)

    def objective(logits: Tensor) -> Tensor:
        q = logits.softmax(-1)
        chosen = q.gather(-1, best)[:, 0]
        reverse = (q * q.log()).sum(-1) + 100 * (1 - chosen)
        return (visits(behavior) * (-w * chosen.log() + (1 - w) * reverse)).sum()

    expected = derivative(objective)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-6, atol=2e-6)


@BEHAVIORS
@pytest.mark.parametrize("kl_type", FORWARD_WEIGHTS)
def test_spans_of_another_tokenizer_descend_the_divergence_of_their_product(kl_type: Any, behavior: Tensor) -> None:
    """The first two tokens are one span of the teacher's; token 0 has a counterpart, with token 1 it has none."""
    matching = CrossTokenizerConfig(enabled=True, matching="identical", unmatched_weight=0.4)
    config = DistillationLossConfig(kl_type=kl_type, mixed_kl_weight=0.3, cross_tokenizer=matching)
    loss = CrossTokenizerLoss(config, topk=2, student_unmatched=torch.tensor([False, True]))
    lengths = torch.tensor([2, 0, 1]).expand(8, 3)
    matched, unmatched = torch.tensor([0.35, 0.0, 0.6]), torch.tensor([0.15, 0.0, 0.25])  # by position
    ids = torch.where(lengths > 0, 0, -1)[..., None]
    gradient = student_gradient(
        loss,
        behavior,
        **{
            keys.TEACHER_TOPK_IDS: ids,
            keys.TEACHER_TOPK_LOGPROBS: matched.clamp(min=0.1).log().expand(8, 3)[..., None],
            keys.TEACHER_UNMATCHED: unmatched.expand(8, 3)[..., None],
            keys.SPAN_LENGTHS: lengths,
        },
    )
    w = FORWARD_WEIGHTS[kl_type]

    def objective(logits: Tensor) -> Tensor:
        each = logits.softmax(-1)[NODES]  # [8, 3, 2]
        total = torch.zeros(8, dtype=torch.float64)
        for at, later in ((0, logprobs_of(logits)[:, 1].exp()), (2, torch.ones(8))):
            p, rest, q = each[:, at, 0] * later, each[:, at, 1] * later, matched[at].double()
            forward, reverse = q * (q / p).log() - q + p, p * (p / q).log() - p + q
            total = total + w * forward + (1 - w) * reverse + 0.4 * (rest - unmatched[at].double()).abs()
        return (probabilities(behavior).detach() * total).sum()

    assert_minimizes(gradient, objective)


def test_supervised_training_descends_the_cross_entropy_of_its_data() -> None:
    gradient = student_gradient(NegativeLogLikelihood(), ENGINE)
    assert_minimizes(gradient, lambda z: -(probabilities(ENGINE) * logprobs_of(z).sum(-1)).sum())


# ---- preferences: all pairs of two of the eight, each order as often as it is preferred ----

BETA = 0.5
GAINS = torch.tensor([0.15, -0.2, 0.0, 0.22, -0.05, 0.1, -0.15, 0.05], dtype=torch.float64)  # of each response
LEADS = GAINS[:, None] - GAINS  # [8, 8]
PREFERENCES: dict[str, tuple[dict[str, Any], Tensor]] = {  # and how often the first of two is preferred, for margins
    "sigmoid": ({}, LEADS.sigmoid()),  # of LEADS / BETA: Bradley and Terry's model (arXiv 2305.18290, equation 4)
    "smoothed": ({"label_smoothing": 0.1}, (LEADS.sigmoid() - 0.1) / 0.8),  # a tenth of the labels turned around
    "ipo": ({"loss_type": "ipo"}, 0.5 + LEADS),  # regularized by BETA, as in arXiv 2310.12036, equation 17
}


def preference_gradient(section: dict[str, Any], preferred: Tensor, logits: Tensor) -> Tensor:
    """Return the expected gradient if response a is preferred to b as often as `preferred` [8, 8] says: [7, 2]."""
    pairs = torch.tensor(list(itertools.permutations(range(8), 2)))  # [56, 2]
    flat = pairs.flatten()
    batch = make_batch(
        [[0, 1, 1, 1]] * len(flat),
        rewards=[0.0] * len(flat),
        group_id=[index for index in range(len(pairs)) for _ in range(2)],
        reference_logprobs=row(logprobs_of(REFERENCE)[flat]),
    )
    batch[keys.PREFERENCE] = torch.tensor([1.0, -1.0]).repeat(len(pairs))
    weights = probabilities(ENGINE)[pairs].prod(-1) * preferred[pairs[:, 0], pairs[:, 1]]  # [56]
    logits = logits.clone().requires_grad_()
    current = row(logprobs_of(logits)[flat]).float()
    loss = PreferenceLoss(DPOConfig.model_validate({"reference_policy_kl_penalty": BETA, **section}))
    rows = (slice(2 * pair, 2 * pair + 2) for pair in range(len(pairs)))
    values = [loss(TokenScores(current[pair]), batch[pair], Normalizer(6.0, 2.0))[0] for pair in rows]
    return torch.autograd.grad((weights * torch.stack(values)).sum(), logits)[0]


def policy_of(distribution: Tensor) -> Tensor:
    """Return the logits of a policy with these probabilities of the eight responses: [7, 2] of [8]."""
    reached = torch.zeros(7, 2, dtype=torch.float64)
    for response, probability in enumerate(distribution / distribution.sum()):
        reached[NODES[response], TOKENS[response]] += probability
    return reached.log()


@pytest.mark.parametrize(("section", "preferred"), PREFERENCES.values(), ids=PREFERENCES)
def test_a_preference_loss_ends_at_the_reference_tilted_by_what_is_preferred(
    section: dict[str, Any], preferred: Tensor
) -> None:
    optimum = policy_of(probabilities(REFERENCE) * (GAINS / BETA).exp())
    torch.testing.assert_close(
        preference_gradient(section, preferred, optimum).abs().max().item(), 0.0, atol=1e-7, rtol=0
    )
    assert preference_gradient(section, preferred, POLICY).abs().max() > 1e-3
    assert preference_gradient(section, preferred.T, optimum).abs().max() > 1e-3


def test_hinged_preferences_push_margins_below_the_inverse_of_beta_by_how_often_one_is_preferred() -> None:
    def objective(z: Tensor) -> Tensor:
        rewards = (logprobs_of(z) - logprobs_of(REFERENCE)).sum(-1)
        margins = rewards[:, None] - rewards
        assert 0 < (BETA * margins > 1).sum() < 28
        frequency = probabilities(ENGINE)[:, None] * probabilities(ENGINE) * LEADS.sigmoid()
        return -BETA * (frequency * margins)[BETA * margins < 1].sum()

    assert_minimizes(preference_gradient({"loss_type": "hinge"}, LEADS.sigmoid(), POLICY), objective)


def test_every_loss_and_every_estimator_is_enumerated() -> None:
    policy_gradient = {options.get("type", "ppo") for options, _ in OFF_POLICY.values()}
    assert policy_gradient == {options.get("type", "ppo") for options in ON_POLICY.values()}
    assert policy_gradient | {"distillation"} == set(LOSSES.names)
    estimators = {"grpo", "grpo_passk", "opo", "remax", "gdpo", "reinforce_plus_plus", "opd"}
    assert set(ADVANTAGE_ESTIMATORS.names) == estimators
    preference = {section.get("loss_type", "sigmoid") for section, _ in PREFERENCES.values()}
    assert preference | {"hinge"} == set(get_args(DPOConfig.model_fields["loss_type"].annotation))


# ---- positive examples ----


def test_positive_examples_add_the_likelihood_of_right_answers() -> None:
    """With the normaliser of one positive token the term is the sum of their log-probs."""
    batch = rows_of([[y] for y in range(8)], RIGHT, POLICY, POLICY)
    batch[keys.SAMPLE_MASK] = probabilities(POLICY).float()
    logits = POLICY.clone().requires_grad_()
    loss = make_loss(LOSSES.read({"positive_example_nll_weight": 0.2}))
    value, _ = loss(TokenScores(row(logprobs_of(logits))), batch, Normalizer(1.0, 1.0, 1.0))
    assert_minimizes(
        torch.autograd.grad(value, logits)[0],
        lambda z: -0.2 * (probabilities(POLICY) * RIGHT * logprobs_of(z).sum(-1)).sum(),
    )
