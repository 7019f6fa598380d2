"""Evaluation of policy-gradient losses, worked batches, and one section for every option."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.registries import LOSSES
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.losses.make import make_loss
from tests.unit.algorithms.batches import make_batch, normalizer_of

PREV = [0.0, -1.0, -1.0, -1.0]
CURRENT = [0.0, -1.69315, -1.0, -0.59453]  # ratios .5, 1, 1.5
GENERATION = [0.0, -0.5, -1.5, -0.8]


def three_tokens(**changes: Any) -> TensorDict:
    """One sequence: a prompt token, then three sampled ones."""
    values: dict[str, Any] = {
        "prev_logprobs": [PREV],
        "generation_logprobs": [GENERATION],
        "advantages": [[0.0, 1.0, -1.0, 2.0]],
        **changes,
    }
    return make_batch([[0, 1, 1, 1]], **values)


def evaluate(
    batch: TensorDict,
    logprobs: Any,
    normalizer: Normalizer | None = None,
    entropy: torch.Tensor | None = None,
    **options: Any,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return loss, gradient of the log-probs [B, T], metrics."""
    current = torch.tensor(logprobs, requires_grad=True)
    loss_fn = make_loss(LOSSES.read(options))
    if not loss_fn.required_scores.entropy:
        entropy = None
    elif entropy is None:
        entropy = entropy_of(current)
    loss, metrics = loss_fn(TokenScores(current, entropy=entropy), batch, normalizer or normalizer_of(batch))
    loss.backward()
    assert current.grad is not None
    return float(loss.detach()), current.grad, {name: float(m.value) for name, m in metrics.items()}


def entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Return -p log p of each token, which stands for the entropy of its distribution."""
    return -logprobs.exp() * logprobs


def random_batch(seed: int = 0) -> tuple[TensorDict, torch.Tensor]:
    """Six samples of four trajectories, up to seven tokens, one of them without a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> torch.Tensor:
        return -torch.rand(6, 7, generator=generator) * 2 - 0.1

    mask = (torch.rand(6, 7, generator=generator) < 0.7).float()
    mask[:, 0] = 0
    mask[:, 3] = 1
    current = logprobs()
    batch = make_batch(
        mask.tolist(),
        trajectory_id=[0, 0, 1, 2, 2, 3],
        sample_mask=[1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        rewards=[1.0, 1.0, 0.0, 0.5, 0.5, -1.0],
        prev_logprobs=current + torch.randn(6, 7, generator=generator) * 0.3,
        reference_logprobs=logprobs(),
        generation_logprobs=current + torch.randn(6, 7, generator=generator) * 0.3,
        advantages=torch.randn(6, 7, generator=generator),
    )
    return batch, current


EVERY_OPTION: dict[str, dict[str, Any]] = {
    "ppo": {},
    "sequence level": {"token_level_loss": False},
    "dual clip": {"ratio_clip_c": 1.2},
    "gspo": {"type": "gspo"},
    "gspo corrected": {
        "type": "gspo",
        "use_importance_sampling_correction": True,
    },
    "cispo": {"type": "cispo"},
    "reinforce": {"type": "reinforce"},
    "on policy": {"force_on_policy_ratio": True},
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.1, "token_level_loss": False},
    "k3 approximated": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
    "kl clamped": {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.1},
    "tis": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.1},
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.7,
    },
    "seq-mask-tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.95,
    },
    "sequence_mask": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "sequence_mask",
        "truncated_importance_sampling_ratio": 1.5,
    },
    "sequence_truncate": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "sequence_truncate",
        "truncated_importance_sampling_ratio": 1.5,
        "truncated_importance_sampling_ratio_min": 0.5,
    },
    "against the engine": {"ratio_against": "generation", "log_ratio_penalty": 0.1},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "entropy bonus": {"entropy_coef": 0.1},
    "k3 pathwise": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_gradient": "pathwise"},
    "k3 with k2's gradient": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_gradient": "k2"},
    "gspo_token": {"type": "gspo_token"},
    "gmpo": {"type": "gmpo"},
    "vespo": {"type": "vespo"},
    "vespo corrected": {"type": "vespo", "use_importance_sampling_correction": True},
    "dppo": {"type": "dppo", "ratio_clip_min": 0.05, "ratio_clip_max": 0.05},
    "dppo by kl, truncated": {"type": "dppo", "divergence": "kl", "ratio_clip_c": 1.2},
    "vapo": {"positive_example_nll_weight": 0.2},
    "sapo": {"type": "sapo"},
    "constant divisor": {"token_level_loss": False, "trajectory_token_divisor": 8.0},
}
every_option = pytest.mark.parametrize("options", EVERY_OPTION.values(), ids=EVERY_OPTION.keys())
