"""Every row of the table of peers in docs/losses.md, against numpy written from the peers' formulas."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensordict import TensorDict

from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, LOSSES
from tests.unit.algorithms.batches import make_batch
from tests.unit.docs.pages import CODE, DOCS, tables
from tests.unit.losses.evaluation import evaluate

Array = np.ndarray
LENGTHS = (5, 2, 4, 3)  # tokens that are trained
RANDOM = np.random.default_rng(7)
MASK = np.array([[0.0] + [1.0] * n + [0.0] * (5 - n) for n in LENGTHS])
PREV = -RANDOM.uniform(0.2, 2.0, MASK.shape)
CURRENT = np.minimum(PREV + RANDOM.normal(0, 0.5, MASK.shape), -0.05)
ADVANTAGES = np.array([1.2, -0.7, 0.4, -1.6])[:, None] * np.ones(MASK.shape)
REWARDS = np.array([1.0, 0.0, 0.5, 0.25])
GENERATION = PREV + RANDOM.normal(0, 0.4, MASK.shape)
REFERENCE = -RANDOM.uniform(0.2, 2.0, MASK.shape)
ENTROPY = RANDOM.uniform(0.1, 2.0, MASK.shape)

TABLE = next(t for t in tables(DOCS / "losses.md") if t.head == ("peer", "its options", "options here"))
ROWS = [(f"{peer} {CODE.findall(options)[0]}", CODE.findall(here)[0]) for peer, options, here in TABLE.rows]


# ---- the peers' terms and means: functions of the current log-probs; CURRENT stands where a peer detaches ----


def ratio(current: Array, base: Array = PREV) -> Array:
    return np.exp(current - base)


def mean_log_ratio(current: Array) -> Array:
    return ((current - PREV) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)


def clipped(r: Array, cap: float = np.inf) -> Array:
    """The surrogate with both bounds at 0.2; `cap` bounds the ratio of tokens with A < 0, or, as `delta`, of all."""
    surrogate = np.maximum(-ADVANTAGES * r, -ADVANTAGES * np.clip(r, 0.8, 1.2))
    return np.where(ADVANTAGES < 0, np.minimum(surrogate, -ADVANTAGES * cap), surrogate)


def soft_gate(r: Array) -> Array:
    tau = np.where(ADVANTAGES > 0, 1.0, 1.05)
    return -ADVANTAGES * 4 / (tau * (1 + np.exp(-tau * (r - 1))))


def covariance() -> Array:
    valid = MASK > 0
    centred = (ADVANTAGES - ADVANTAGES[valid].mean()) * (CURRENT - CURRENT[valid].mean())
    return np.where(valid, centred, -np.inf)


def clip_cov(current: Array) -> Array:
    is_clipped = -ADVANTAGES * np.clip(ratio(CURRENT), 0.8, 1.2) > -ADVANTAGES * ratio(CURRENT)
    eligible = (covariance() > 0.05) & (covariance() < 5) & ~is_clipped
    assert 0 < eligible.sum() < MASK.sum()
    return np.where(eligible, 0.0, clipped(ratio(current)))


def kl_cov(current: Array) -> Array:
    chosen = np.argsort(-covariance().ravel())[: int(0.3 * MASK.sum())]
    pays = np.zeros(MASK.size)
    pays[chosen] = 1
    return -ADVANTAGES * ratio(current) + 0.5 * pays.reshape(MASK.shape) * np.abs(current - PREV)


def vespo(current: Array, token_weights: Array | None = None) -> Array:
    log_w = ((CURRENT - PREV) * MASK).sum(1, keepdims=True)
    if token_weights is not None:
        log_w = log_w + (np.log(token_weights) * MASK).sum(1, keepdims=True)
    k, rate = np.where(ADVANTAGES >= 0, 2.0, 3.0), np.where(ADVANTAGES >= 0, 3.0, 2.0)
    return -np.exp(rate + k * log_w - rate * np.exp(log_w)) * ADVANTAGES * current


def dppo(current: Array, divergence: str) -> Array:
    """Thresholds of 0.05, the ratio at most 1.2."""
    p, q = np.exp(CURRENT), np.exp(PREV)
    if divergence == "tv":
        is_valid = np.where(ADVANTAGES > 0, p - q <= 0.05, p - q >= -0.05)
    else:
        kl = q * (PREV - CURRENT) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_valid = np.where(ADVANTAGES > 0, (kl <= 0.05) | (p <= q), (kl <= 0.05) | (p >= q))
    assert 0 < (is_valid * MASK).sum() < MASK.sum()
    return -ADVANTAGES * np.minimum(ratio(CURRENT), 1.2) * current * is_valid


def prime_rl(current: Array, *, is_symmetric: bool, bound: float) -> Array:
    moved = np.exp(CURRENT) - np.exp(GENERATION)
    is_masked = np.where(ADVANTAGES > 0, moved > bound, moved < -bound)
    if is_symmetric:
        is_masked = np.abs(moved) > bound
    assert 0 < (is_masked * MASK).sum() < MASK.sum()
    return -ADVANTAGES * ratio(current, GENERATION) * ~is_masked + 1e-3 * (current - GENERATION) ** 2


def geo_mean(current: Array) -> float:
    sign, log_ratio = np.sign(ADVANTAGES), current - PREV
    bounded = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -0.2, 0.2))
    means = (bounded * MASK).sum(1) / MASK.sum(1)
    return float((-ADVANTAGES[:, 0] * np.exp(means)).mean())


def near_policy(threshold: float) -> Array:
    distance = ((GENERATION - CURRENT) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    kept = (ADVANTAGES >= 0) | (distance <= threshold)
    assert 0 < (kept * MASK).sum() < MASK.sum()
    return kept


def high_entropy(share: float) -> Array:
    return np.quantile(ENTROPY[MASK > 0], 1 - share) <= ENTROPY


def k3(current: Array) -> Array:
    return np.exp(REFERENCE - current) - (REFERENCE - current) - 1


def token_mean(loss: Array) -> float:
    return float((loss * MASK).sum() / MASK.sum())


def mean_of_means(loss: Array) -> float:
    return float(((loss * MASK).sum(1) / MASK.sum(1)).mean())


def sum_over(constant: float) -> Callable[[Array], float]:
    return lambda loss: float((loss * MASK).sum(1).mean() / constant)


def positive_nll(current: Array) -> float:
    positive = MASK * (REWARDS > 0)[:, None]
    return token_mean(clipped(ratio(current))) + 0.1 * float(-(current * positive).sum() / positive.sum())


TOKEN_WEIGHTS = np.exp((PREV - GENERATION) * MASK)
SEQUENCE_WEIGHTS = TOKEN_WEIGHTS.prod(1, keepdims=True)


def masked(weights: Array, bound: float) -> Array:
    assert 0 < (weights > bound).sum() < weights.size
    return np.where(weights > bound, 0.0, weights)


def dapo(weight: Array) -> Callable[[Array], float]:
    return lambda c: token_mean(weight * clipped(ratio(c)))


PeerLoss = Callable[[Array], float]
PEER_LOSSES: dict[str, PeerLoss] = {
    "TRL loss_type: grpo": lambda c: mean_of_means(clipped(ratio(c))),
    "TRL loss_type: dapo": dapo(MASK),
    "TRL loss_type: bnpo": dapo(MASK),
    "TRL loss_type: dr_grpo, max_completion_length: 8": lambda c: float((clipped(ratio(c)) * MASK).sum() / (4 * 8)),
    "TRL loss_type: luspo, importance_sampling_level: sequence": lambda c: float(
        (clipped(np.exp(mean_log_ratio(c)))[:, 0] * np.array(LENGTHS)).mean()
    ),
    "TRL loss_type: grpo, importance_sampling_level: sequence": lambda c: float(
        clipped(np.exp(mean_log_ratio(c)))[:, 0].mean()
    ),
    "TRL loss_type: cispo, epsilon_high: 1.1": lambda c: token_mean(-np.minimum(ratio(CURRENT), 1.1) * ADVANTAGES * c),
    "TRL loss_type: sapo, sapo_temperature_pos: 1.0, sapo_temperature_neg: 1.05": lambda c: mean_of_means(
        soft_gate(ratio(c))
    ),
    "TRL loss_type: dapo, delta: 1.3": lambda c: token_mean(
        -np.minimum(np.minimum(ratio(c), 1.3) * ADVANTAGES, np.clip(ratio(c), 0.8, 1.2) * ADVANTAGES)
    ),
    "TRL loss_type: vespo": lambda c: token_mean(vespo(c)),
    "TRL loss_type: vespo, vllm_importance_sampling_mode: token_truncate": lambda c: token_mean(
        vespo(c, np.minimum(TOKEN_WEIGHTS, 1.5))
    ),
    "TRL vllm_importance_sampling_mode: sequence_mask": dapo(masked(SEQUENCE_WEIGHTS, 1.5)),
    "TRL vllm_importance_sampling_mode: sequence_truncate": dapo(np.minimum(SEQUENCE_WEIGHTS, 1.5)),
    "TRL vllm_importance_sampling_mode: token_mask": dapo(masked(TOKEN_WEIGHTS, 1.5)),
    "TRL vllm_importance_sampling_mode: token_truncate": dapo(np.minimum(TOKEN_WEIGHTS, 1.5)),
    "TRL off_policy_mask_threshold: 0.1": dapo(near_policy(0.1)),
    "TRL top_entropy_quantile: 0.4": dapo(high_entropy(0.4)),
    "TRL entropy_coef: 0.1": lambda c: token_mean(clipped(ratio(c)) - 0.1 * ENTROPY),
    "TRL beta: 0.1": lambda c: token_mean(clipped(ratio(c)) + 0.1 * k3(c)),
    "verl loss_agg_mode: token-mean": lambda c: token_mean(clipped(ratio(c), 3.0)),
    "verl loss_agg_mode: seq-mean-token-mean": lambda c: mean_of_means(clipped(ratio(c), 3.0)),
    "verl loss_agg_mode: seq-mean-token-sum": lambda c: sum_over(1)(clipped(ratio(c), 3.0)),
    "verl loss_agg_mode: seq-mean-token-sum-norm, loss_scale_factor: 8": lambda c: sum_over(8)(clipped(ratio(c), 3.0)),
    "verl loss_mode: gspo, loss_agg_mode: seq-mean-token-mean": lambda c: mean_of_means(
        clipped(np.exp(mean_log_ratio(CURRENT) + c - CURRENT))
    ),
    "verl loss_mode: geo_mean": geo_mean,
    "verl loss_mode: dppo_tv, clip_ratio: 0.05, clip_ratio_c: 1.2": lambda c: token_mean(dppo(c, "tv")),
    "verl loss_mode: dppo_kl, clip_ratio: 0.05, clip_ratio_c: 1.2": lambda c: token_mean(dppo(c, "kl")),
    "verl loss_mode: dro, dro_beta: 0.4": lambda c: token_mean(-(c * ADVANTAGES - 0.2 * (c - PREV) ** 2)),
    "verl loss_mode: sapo, tau_pos: 1.0, tau_neg: 1.05": lambda c: mean_of_means(soft_gate(ratio(c))),
    "verl loss_mode: gpg, loss_agg_mode: token-mean": lambda c: token_mean(-ADVANTAGES * c),
    "verl loss_mode: clip_cov, clip_cov_ratio: 1.0, clip_cov_lb: 0.05, clip_cov_ub: 5.0": lambda c: token_mean(
        clip_cov(c)
    ),
    "verl loss_mode: kl_cov, kl_cov_ratio: 0.3, ppo_kl_coef: 0.5": lambda c: token_mean(kl_cov(c)),
    "verl rollout_correction.bypass_mode: true": lambda c: token_mean(clipped(ratio(c, GENERATION), 3.0)),
    "verl kl_loss_type: low_var_kl, kl_loss_coef: 0.1": lambda c: token_mean(clipped(ratio(c), 3.0) + 0.1 * k3(c)),
    "verl kl_loss_type: k3+, kl_loss_coef: 0.1": lambda c: token_mean(
        clipped(ratio(c), 3.0) + 0.1 * (k3(CURRENT) + ((c - REFERENCE) ** 2 - (CURRENT - REFERENCE) ** 2) / 2)
    ),
    "SkyRL policy_loss_type: regular, loss_reduction: token_mean": dapo(MASK),
    "SkyRL policy_loss_type: dual_clip, clip_ratio_c: 3.0": lambda c: token_mean(clipped(ratio(c), 3.0)),
    "SkyRL loss_reduction: sequence_mean": lambda c: mean_of_means(clipped(ratio(c))),
    "SkyRL loss_reduction: seq_mean_token_sum_norm, max_seq_len: 8": lambda c: sum_over(8)(clipped(ratio(c))),
    "SkyRL policy_loss_type: gspo, loss_reduction: sequence_mean": lambda c: mean_of_means(
        clipped(np.exp(mean_log_ratio(CURRENT) + c - CURRENT))
    ),
    "SkyRL policy_loss_type: cispo, cispo_eps_clip_low: 0.0, cispo_eps_clip_high: 0.4": lambda c: token_mean(
        -np.clip(ratio(CURRENT), 1.0, 1.4) * ADVANTAGES * c
    ),
    "SkyRL policy_loss_type: sapo, loss_reduction: sequence_mean": lambda c: mean_of_means(soft_gate(ratio(c))),
    "SkyRL policy_loss_type: clip_cov, clip_ratio: 1.0, clip_cov_lb: 0.05, clip_cov_ub: 5.0": lambda c: token_mean(
        clip_cov(c)
    ),
    "SkyRL policy_loss_type: kl_cov, kl_cov_frac: 0.3, ppo_kl_coef: 0.5": lambda c: token_mean(kl_cov(c)),
    "SkyRL tis_ratio_type: token, token_tis_ratio_clip_high: 1.5": dapo(np.minimum(TOKEN_WEIGHTS, 1.5)),
    "SkyRL tis_ratio_type: sequence, sequence_tis_ratio_clip_high: 1.5": dapo(np.minimum(SEQUENCE_WEIGHTS, 1.5)),
    "slime --advantage-estimator grpo": lambda c: mean_of_means(clipped(ratio(c))),
    "slime --calculate-per-token-loss": dapo(MASK),
    "slime --advantage-estimator gspo": lambda c: mean_of_means(clipped(np.exp(mean_log_ratio(c))) * MASK),
    "slime --eps-clip-c 3.0": lambda c: mean_of_means(clipped(ratio(c), 3.0)),
    "slime --use-tis --tis-clip 1.5 --tis-clip-low 0.8": lambda c: mean_of_means(
        np.clip(TOKEN_WEIGHTS, 0.8, 1.5) * clipped(ratio(c))
    ),
    "slime --use-rollout-logprobs": lambda c: mean_of_means(clipped(ratio(c, GENERATION))),
    "slime --use-rollout-logprobs --use-opsm --opsm-delta 0.1": lambda c: mean_of_means(
        near_policy(0.1) * clipped(ratio(c, GENERATION))
    ),
    "slime --use-kl-loss --kl-loss-type low_var_kl --kl-loss-coef 0.1": lambda c: mean_of_means(
        clipped(ratio(c)) + 0.1 * k3(c)
    ),
    "prime-rl loss.type: default": lambda c: token_mean(prime_rl(c, is_symmetric=False, bound=0.2)),
    "prime-rl loss.type: ipo": lambda c: token_mean(prime_rl(c, is_symmetric=True, bound=0.1)),
    "AReaL use_decoupled_loss: true, behav_imp_weight_cap: 1.5": dapo(masked(TOKEN_WEIGHTS, 1.5)),
    "NeMo-RL positive_example_nll_weight: 0.1": positive_nll,
}


def gradient_of(loss: PeerLoss) -> Array:
    """Return the central differences at CURRENT."""
    gradient = np.zeros(MASK.shape)
    for at in np.ndindex(MASK.shape):
        step = np.zeros(MASK.shape)
        step[at] = 1e-6
        gradient[at] = (loss(CURRENT + step) - loss(CURRENT - step)) / 2e-6
    return gradient


GROUPS = np.array([[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 1.0, 0.0]])
CENTRED = GROUPS - GROUPS.mean(1, keepdims=True)
GROUP_STD = GROUPS.std(1, ddof=1, keepdims=True)
GROUP_LENGTHS = np.array([[1, 3, 2, 1], [2, 1, 1, 3]])
SECOND_BEST = np.sort(GROUPS, axis=1)[:, -2:-1]
LEAD = np.where(GROUPS.max(1, keepdims=True) == GROUPS, GROUPS - SECOND_BEST, 0.0)
GREEDY_REWARDS = np.array([[0.25], [1.0]])
WEIGHTED_MEAN = (GROUPS * GROUP_LENGTHS).sum(1, keepdims=True) / GROUP_LENGTHS.sum(1, keepdims=True)
PEER_ADVANTAGES: dict[str, Array] = {
    "TRL scale_rewards: group": CENTRED / (GROUP_STD + 1e-4),
    "TRL scale_rewards: batch": CENTRED / (GROUPS.std(ddof=1) + 1e-4),
    "TRL scale_rewards: none": CENTRED,
    "verl adv_estimator: grpo": CENTRED / (GROUP_STD + 1e-6),
    "verl adv_estimator: grpo, norm_adv_by_std_in_grpo: false": CENTRED,
    "verl adv_estimator: grpo_passk": LEAD / (GROUP_STD + 1e-6),
    "verl adv_estimator: opo": GROUPS - WEIGHTED_MEAN,
    "verl adv_estimator: remax": GROUPS - GREEDY_REWARDS,
    "verl adv_estimator: rloo": GROUPS - (GROUPS.sum(1, keepdims=True) - GROUPS) / 3,
}
PEER_ADVANTAGES |= {
    "SkyRL advantage_estimator: grpo": PEER_ADVANTAGES["verl adv_estimator: grpo"],
    "SkyRL advantage_estimator: grpo, grpo_norm_by_std: false": CENTRED,
    "SkyRL advantage_estimator: rloo": PEER_ADVANTAGES["verl adv_estimator: rloo"],
}


def read_options(text: str) -> tuple[str, dict[str, Any]]:
    section, options = re.fullmatch(r"([\w.]+): (\{.*\})", text).groups()  # type: ignore[union-attr]
    return section, yaml.safe_load(options)


@pytest.mark.parametrize(("peer", "here"), ROWS, ids=[peer for peer, _ in ROWS])
def test_options_of_the_table_compute_what_the_peer_computes(peer: str, here: str) -> None:
    section, options = read_options(here)
    if section == "loss_fn":
        batch = make_batch(
            MASK.tolist(),
            rewards=REWARDS.tolist(),
            prev_logprobs=torch.tensor(PREV),
            generation_logprobs=torch.tensor(GENERATION),
            reference_logprobs=torch.tensor(REFERENCE),
            advantages=torch.tensor(ADVANTAGES),
        )
        entropy = torch.tensor(ENTROPY.astype(np.float32))
        loss, gradient, _ = evaluate(batch, CURRENT.astype(np.float32).tolist(), entropy=entropy, **options)
        assert loss == pytest.approx(PEER_LOSSES[peer](CURRENT), abs=3e-6)
        assert gradient.numpy() == pytest.approx(gradient_of(PEER_LOSSES[peer]), abs=3e-6)
        return
    masks = [[0] + [1] * length + [0] * (3 - length) for length in GROUP_LENGTHS.ravel()]
    greedy = GREEDY_REWARDS.repeat(4, 1).ravel().tolist()
    batch = make_batch(masks, rewards=GROUPS.ravel().tolist(), group_id=[0] * 4 + [1] * 4, baseline_reward=greedy)
    estimator = make_advantage_estimator(ADVANTAGE_ESTIMATORS.read(options), LOSSES.new())
    assert estimator(batch)[:, 1].numpy() == pytest.approx(PEER_ADVANTAGES[peer].ravel(), abs=1e-6)


def two_tokens_of_covariance_one() -> tuple[TensorDict, list[list[float]]]:
    """A = 1, -1 and lp = -1, -3: both covariances are 1; neither ratio is clipped."""
    prev = [[0.0, -1.1, -2.9]]
    batch = make_batch([[0, 1, 1]], advantages=[[0.0, 1.0, -1.0]], prev_logprobs=prev, generation_logprobs=prev)
    return batch, [[0.0, -1.0, -3.0]]


@pytest.mark.parametrize(
    ("bounds", "is_held_back"), [((0.5, 1.5), True), ((1.0, 1.5), False), ((0.5, 1.0), False)], ids=str
)
def test_the_bounds_of_the_covariance_are_exclusive(bounds: tuple[float, float], is_held_back: bool) -> None:
    batch, current = two_tokens_of_covariance_one()
    low, high = bounds
    options = {"type": "clip_cov", "clip_cov_ratio": 1.0, "clip_cov_lb": low, "clip_cov_ub": high}
    _, gradient, _ = evaluate(batch, current, **options)
    kept = [-math.exp(0.1) / 2, math.exp(-0.1) / 2]
    assert gradient[0, 1:].tolist() == pytest.approx([0.0, 0.0] if is_held_back else kept, abs=1e-6)


def test_every_reference_has_its_row() -> None:
    assert {peer for peer, _ in ROWS} == {*PEER_LOSSES, *PEER_ADVANTAGES}


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_takes_the_gradient_from_as_many_eligible_tokens_as_its_ratio_says(seed: int) -> None:
    torch.manual_seed(seed)
    batch = make_batch(MASK.tolist(), prev_logprobs=torch.tensor(CURRENT), advantages=torch.tensor(ADVANTAGES))
    for ratio, number in ((1e-9, 1), (2.5 / MASK.sum(), 2)):
        options = {"type": "clip_cov", "clip_cov_lb": 0.05, "clip_cov_ratio": ratio}
        gradient = evaluate(batch, CURRENT.astype(np.float32).tolist(), **options)[1].numpy()
        lost = (MASK > 0) & (gradient == 0)
        assert lost.sum() == number
        assert (covariance()[lost] > 0.05).all()


def test_kl_cov_pays_only_for_leaving_the_previous_policy() -> None:
    options = {"type": "kl_cov", "kl_cov_ratio": 1.0, "ppo_kl_coef": 2.0}
    batch = make_batch(MASK.tolist(), prev_logprobs=torch.tensor(CURRENT), advantages=torch.tensor(ADVANTAGES))
    assert evaluate(batch, CURRENT.tolist(), **options)[0] == pytest.approx(token_mean(-ADVANTAGES), abs=1e-6)
