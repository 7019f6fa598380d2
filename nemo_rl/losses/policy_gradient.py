"""The clipped policy-gradient loss and its relatives. What each key does, with the recipes: docs/losses.md."""

from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.config.algorithm_checks import check_loss_fn
from nemo_rl.config.loss import LossConfig
from nemo_rl.interfaces import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.losses.terms import MAX_EXP_INPUT, TokenTerms, loss_metrics, sampling_weights, weighted_kl
from nemo_rl.types import TrainingBatch


class PolicyGradientLoss:
    """Sum over tokens of `weight * policy term + reference_policy_kl_penalty * KL`, each token over the step's counts.

    With r = exp(lp - lp_prev), the policy term of a token is max(-A r, -A clip(r, 1 - ratio_clip_min,
    1 + ratio_clip_max)), or what the configuration puts in its place. A token counts 1 / number of valid tokens of the
    optimizer step, or, without `token_level_loss`, 1 / (tokens of its trajectory * number of valid trajectories), so
    any split into micro-batches or ranks adds up to the same loss and gradient.

    Raises ConfigError for options that exclude each other.
    """

    def __init__(self, config: LossConfig) -> None:
        check_loss_fn(config)
        self.config = config

    @property
    def uses_prev_logprobs(self) -> bool:
        """Whether a batch of more than one optimizer step needs `prev_logprobs`; without the key lp_prev is lp."""
        config = self.config
        return not config.force_on_policy_ratio and (
            not config.disable_ppo_ratio or config.use_importance_sampling_correction
        )

    @property
    def required_keys(self) -> frozenset[str]:
        config = self.config
        required = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.GENERATION_LOGPROBS, keys.ADVANTAGES}
        if not config.token_level_loss:
            required.add(keys.TRAJECTORY_TOKENS)
        if config.reference_policy_kl_penalty > 0:
            required.add(keys.REFERENCE_LOGPROBS)
        if config.positive_example_nll_weight > 0:
            required.add(keys.REWARD)
        return frozenset(required)

    @property
    def required_scores(self) -> RequiredScores:
        return RequiredScores()

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        config = self.config
        tokens = _read(scores.logprobs, batch)
        num_tokens = max(normalizer.num_valid_tokens, 1.0)
        token_weights = tokens.mask / num_tokens  # [B, T]
        if not config.token_level_loss:
            per_trajectory = batch[keys.TRAJECTORY_TOKENS].clamp(min=1) * max(normalizer.num_valid_trajectories, 1.0)
            token_weights = tokens.mask / per_trajectory[:, None]

        token_loss, ratio, clipped_ratio = _policy_term(tokens, config)
        with torch.no_grad():
            weights, outside = sampling_weights(tokens.prev, tokens.generation, tokens.mask, config)
        if config.use_importance_sampling_correction:
            token_loss = weights * token_loss
        if config.positive_example_nll_weight > 0:
            positive = (batch[keys.REWARD] > 0)[:, None]
            token_loss = token_loss - config.positive_example_nll_weight * positive * tokens.current
        kl = None
        if config.reference_policy_kl_penalty > 0:
            reference = torch.where(tokens.mask > 0, batch[keys.REFERENCE_LOGPROBS], 0.0)
            kl = weighted_kl(tokens.current, reference, tokens.generation, config)
            if not config.use_kl_in_reward:
                token_loss = token_loss + config.reference_policy_kl_penalty * kl
        loss = (token_loss * token_weights).sum()

        terms = TokenTerms(
            current=tokens.current.detach(),
            prev=tokens.prev,
            generation=tokens.generation,
            mask=tokens.mask,
            ratio=ratio.detach(),
            clipped_ratio=clipped_ratio.detach(),
            sampling_weights=weights,
            out_of_bounds=outside,
            kl=None if kl is None else (kl.detach() * token_weights).sum(),
        )
        return loss, loss_metrics(terms, num_tokens, batch[keys.SAMPLE_MASK])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the loss reads, [B, T] float32 each; 0 where the mask is 0, so that padding can hold anything."""

    mask: torch.Tensor
    current: torch.Tensor  # the only one with a gradient
    prev: torch.Tensor
    generation: torch.Tensor
    advantages: torch.Tensor


def _read(logprobs: torch.Tensor, batch: TrainingBatch) -> _Tokens:
    mask = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None]
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)  # entry 0 carries no loss
    valid = mask > 0
    current = torch.where(valid, logprobs.float(), 0.0)
    prev = batch.get(keys.PREV_LOGPROBS, None)
    return _Tokens(
        mask=mask,
        current=current,
        prev=current.detach() if prev is None else torch.where(valid, prev, 0.0),
        generation=torch.where(valid, batch[keys.GENERATION_LOGPROBS], 0.0),
        advantages=torch.where(valid, batch[keys.ADVANTAGES], 0.0),
    )


def _policy_term(tokens: _Tokens, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each token before weights [B, T], the ratio and the clipped ratio ([B, T], or [B, 1] for GSPO)."""
    advantages = tokens.advantages
    ratio = _ratio(tokens, config)
    clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    if config.disable_ppo_ratio:
        return -advantages * tokens.current, ratio, clipped
    if config.use_cispo:
        return -advantages * clipped.detach() * tokens.current, ratio, clipped
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if config.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.ratio_clip_c), loss)
    return loss, ratio, clipped


def _ratio(tokens: _Tokens, config: LossConfig) -> torch.Tensor:
    prev = tokens.current.detach() if config.force_on_policy_ratio else tokens.prev
    log_ratio = tokens.current - prev
    if config.sequence_level_importance_ratios:
        log_ratio = log_ratio.sum(-1, keepdim=True) / (tokens.mask > 0).sum(-1, keepdim=True).clamp(min=1)
    # An overflow would make the gradient 0 * inf even where the ratio is clipped.
    return torch.exp(log_ratio.clamp(-MAX_EXP_INPUT, MAX_EXP_INPUT))
