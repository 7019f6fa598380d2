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
CURRENT = PREV + RANDOM.normal(0, 0.5, MASK.shape)
ADVANTAGES = np.array([1.2, -0.7, 0.4, -1.6])[:, None] * np.ones(MASK.shape)
REWARDS = np.array([1.0, 0.0, 0.5, 0.25])
RATIO = np.exp(CURRENT - PREV)
SEQUENCE_RATIO = np.exp(((CURRENT - PREV) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True))

TABLE = next(t for t in tables(DOCS / "losses.md") if t.head == ("peer", "its options", "options here"))
ROWS = [(f"{peer} {CODE.findall(options)[0]}", CODE.findall(here)[0]) for peer, options, here in TABLE.rows]


# ---- the peers' terms and means ----


def clipped(ratio: Array, cap: float = np.inf) -> Array:
    """The surrogate with both bounds at 0.2; `cap` bounds the ratio of tokens with A < 0, or, as `delta`, of all."""
    surrogate = np.maximum(-ADVANTAGES * ratio, -ADVANTAGES * np.clip(ratio, 0.8, 1.2))
    return np.where(ADVANTAGES < 0, np.minimum(surrogate, -ADVANTAGES * cap), surrogate)


def soft_gate(ratio: Array) -> Array:
    tau = np.where(ADVANTAGES > 0, 1.0, 1.05)
    return -ADVANTAGES * 4 / (tau * (1 + np.exp(-tau * (ratio - 1))))


def covariance() -> Array:
    valid = MASK > 0
    centred = (ADVANTAGES - ADVANTAGES[valid].mean()) * (CURRENT - CURRENT[valid].mean())
    return np.where(valid, centred, -np.inf)


def clip_cov() -> Array:
    is_clipped = -ADVANTAGES * np.clip(RATIO, 0.8, 1.2) > -ADVANTAGES * RATIO
    eligible = (covariance() > 0.05) & (covariance() < 5) & ~is_clipped
    assert 0 < eligible.sum() < MASK.sum()
    return np.where(eligible, 0.0, clipped(RATIO))


def kl_cov() -> Array:
    chosen = np.argsort(-covariance().ravel())[: int(0.3 * MASK.sum())]
    pays = np.zeros(MASK.size)
    pays[chosen] = 1
    return -ADVANTAGES * RATIO + 0.5 * pays.reshape(MASK.shape) * np.abs(CURRENT - PREV)


def token_mean(loss: Array) -> float:
    return float((loss * MASK).sum() / MASK.sum())


def mean_of_means(loss: Array) -> float:
    return float(((loss * MASK).sum(1) / MASK.sum(1)).mean())


def sum_over(constant: float) -> Callable[[Array], float]:
    return lambda loss: float((loss * MASK).sum(1).mean() / constant)


def positive_nll() -> float:
    positive = MASK * (REWARDS > 0)[:, None]
    return token_mean(clipped(RATIO)) + 0.1 * float(-(CURRENT * positive).sum() / positive.sum())


PEER_LOSSES: dict[str, float] = {
    "TRL loss_type: grpo": mean_of_means(clipped(RATIO)),
    "TRL loss_type: dapo": token_mean(clipped(RATIO)),
    "TRL loss_type: bnpo": token_mean(clipped(RATIO)),
    "TRL loss_type: dr_grpo, max_completion_length: 8": float((clipped(RATIO) * MASK).sum() / (4 * 8)),
    "TRL loss_type: luspo, importance_sampling_level: sequence": float(
        (clipped(SEQUENCE_RATIO)[:, 0] * np.array(LENGTHS)).mean()
    ),
    "TRL loss_type: grpo, importance_sampling_level: sequence": float(clipped(SEQUENCE_RATIO)[:, 0].mean()),
    "TRL loss_type: cispo, epsilon_high: 1.1": token_mean(-np.minimum(RATIO, 1.1) * ADVANTAGES * CURRENT),
    "TRL loss_type: sapo, sapo_temperature_pos: 1.0, sapo_temperature_neg: 1.05": mean_of_means(soft_gate(RATIO)),
    "TRL loss_type: dapo, delta: 1.3": token_mean(
        -np.minimum(np.minimum(RATIO, 1.3) * ADVANTAGES, np.clip(RATIO, 0.8, 1.2) * ADVANTAGES)
    ),
    "verl loss_agg_mode: token-mean": token_mean(clipped(RATIO, 3.0)),
    "verl loss_agg_mode: seq-mean-token-mean": mean_of_means(clipped(RATIO, 3.0)),
    "verl loss_agg_mode: seq-mean-token-sum": sum_over(1)(clipped(RATIO, 3.0)),
    "verl loss_agg_mode: seq-mean-token-sum-norm, loss_scale_factor: 8": sum_over(8)(clipped(RATIO, 3.0)),
    "verl loss_mode: gspo, loss_agg_mode: seq-mean-token-mean": mean_of_means(clipped(SEQUENCE_RATIO)),
    "verl loss_mode: sapo, tau_pos: 1.0, tau_neg: 1.05": mean_of_means(soft_gate(RATIO)),
    "verl loss_mode: gpg, loss_agg_mode: token-mean": token_mean(-ADVANTAGES * CURRENT),
    "verl loss_mode: clip_cov, clip_cov_ratio: 1.0, clip_cov_lb: 0.05, clip_cov_ub: 5.0": token_mean(clip_cov()),
    "verl loss_mode: kl_cov, kl_cov_ratio: 0.3, ppo_kl_coef: 0.5": token_mean(kl_cov()),
    "NeMo-RL positive_example_nll_weight: 0.1": positive_nll(),
}

GROUPS = np.array([[1.0, 0.0, 0.25, 0.5], [0.0, 0.0, 1.0, 0.0]])
CENTRED = GROUPS - GROUPS.mean(1, keepdims=True)
GROUP_STD = GROUPS.std(1, ddof=1, keepdims=True)
PEER_ADVANTAGES: dict[str, Array] = {
    "TRL scale_rewards: group": CENTRED / (GROUP_STD + 1e-4),
    "TRL scale_rewards: batch": CENTRED / (GROUPS.std(ddof=1) + 1e-4),
    "TRL scale_rewards: none": CENTRED,
    "verl adv_estimator: grpo": CENTRED / (GROUP_STD + 1e-6),
    "verl adv_estimator: grpo, norm_adv_by_std_in_grpo: false": CENTRED,
    "verl adv_estimator: rloo": GROUPS - (GROUPS.sum(1, keepdims=True) - GROUPS) / 3,
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
            advantages=torch.tensor(ADVANTAGES),
        )
        loss = evaluate(batch, CURRENT.astype(np.float32).tolist(), **options)[0]
        assert loss == pytest.approx(PEER_LOSSES[peer], abs=2e-6)
        return
    batch = make_batch([[0, 1]] * 8, rewards=GROUPS.ravel().tolist(), group_id=[0] * 4 + [1] * 4)
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
