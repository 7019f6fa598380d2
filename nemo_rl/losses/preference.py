"""The loss of DPO: preferences between pairs of answers."""

import torch
from torch.nn import functional

from nemo_rl import batch as keys
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch


class PreferenceLoss:
    """`w_p * mean(preference loss of r_chosen - r_rejected) + w_s * mean(-lp_chosen)` over the pairs of the step.

    The reward r of an answer is the sum of `lp - lp_reference` over its tokens, and lp_chosen that of its log-probs;
    either is the mean over the tokens instead if `preference_average_log_probs` or `sft_average_log_probs` says so.
    beta, w_p and w_s are `reference_policy_kl_penalty`, `preference_loss_weight` and `sft_loss_weight` of `dpo`.
    `loss_type` decides the loss of a margin m, e being `label_smoothing`:

    - sigmoid: -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m) (DPO, arXiv 2305.18290; its conservative form);
    - hinge: max(0, 1 - beta m) (SLiC, arXiv 2305.10425);
    - ipo: (m - 1 / (2 beta))^2 (arXiv 2310.12036), whose authors take means over the tokens.

    Both rows of a pair must be in the same micro-batch, with one group id; reported rewards are without beta.

    Example: beta 0.5, rewards 2 and -1: -log sigmoid(1.5) = 0.2014.
    """

    def __init__(self, section: DPOConfig) -> None:
        self._section = section

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the masks, the pairs and the reference's log-probs."""
        return frozenset({keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.GROUP_ID, keys.PREFERENCE, keys.REFERENCE_LOGPROBS})

    @property
    def required_scores(self) -> RequiredScores:
        """Return that log-probs of the tokens themselves are enough."""
        return RequiredScores()

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        section, mask = self._section, loss_mask(batch)
        num_pairs = max(normalizer.num_valid_trajectories / 2, 1.0)
        num_tokens = mask.sum(-1).clamp(min=1)  # [B]
        rewards = ((scores.logprobs - batch[keys.REFERENCE_LOGPROBS]) * mask).sum(-1)  # [B]
        if section.preference_average_log_probs:
            rewards = rewards / num_tokens
        nll = -(scores.logprobs * mask).sum(-1)  # [B]
        if section.sft_average_log_probs:
            nll = nll / num_tokens
        is_chosen = (batch[keys.PREFERENCE] > 0) * batch[keys.SAMPLE_MASK]  # [B]
        is_rejected = (batch[keys.PREFERENCE] < 0) * batch[keys.SAMPLE_MASK]  # [B]
        pairs, pair_of_row = torch.unique(batch[keys.GROUP_ID], return_inverse=True)
        margins = rewards.new_zeros(len(pairs)).index_add(0, pair_of_row, batch[keys.PREFERENCE] * rewards)
        weights = rewards.new_zeros(len(pairs)).index_add(0, pair_of_row, is_chosen)
        preference_loss = (_preference_losses(margins, section) * weights).sum() / num_pairs
        sft_loss = (nll * is_chosen).sum() / num_pairs
        sums = {
            "preference_loss": preference_loss,
            "sft_loss": sft_loss,
            "accuracy": ((margins > 0) * weights).sum() / num_pairs,
            "rewards_chosen_mean": (rewards * is_chosen).sum() / num_pairs,
            "rewards_rejected_mean": (rewards * is_rejected).sum() / num_pairs,
        }
        metrics = {name: Metric(value.detach()) for name, value in sums.items()}
        metrics["num_valid_samples"] = Metric(weights.sum(), "count")
        return section.preference_loss_weight * preference_loss + section.sft_loss_weight * sft_loss, metrics


def _preference_losses(margins: torch.Tensor, section: DPOConfig) -> torch.Tensor:
    """Return the loss of each margin between the rewards of a pair: [pairs] of [pairs]."""
    beta, smoothing = section.reference_policy_kl_penalty, section.label_smoothing
    if section.loss_type == "hinge":
        return functional.relu(1 - beta * margins)
    if section.loss_type == "ipo":
        return (margins - 1 / (2 * beta)).square()
    return -(1 - smoothing) * functional.logsigmoid(beta * margins) - smoothing * functional.logsigmoid(-beta * margins)
