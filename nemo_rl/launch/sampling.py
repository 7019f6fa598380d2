"""Limits and sampling parameters of all rollouts of a run."""

from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.experience.rollout_dependencies import RolloutLimits
from nemo_rl.types import SamplingParams


def make_limits(config: RolloutRunConfig, *, max_retries: int | None = None) -> RolloutLimits:
    """Return the limits of all rollouts of a run; `max_retries` replaces `rollout.max_retries`."""
    return RolloutLimits(
        max_turns=config.max_rollout_turns,
        max_total_length=config.policy.max_total_sequence_length,
        generation_timeout_s=config.generation_timeout_s,
        max_retries=config.rollout.max_retries if max_retries is None else max_retries,
        retry_backoff_s=config.rollout.retry_backoff_s,
        stall_timeout_s=config.rollout.stall_timeout_s,
    )


def make_sampling(config: RolloutRunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling of training: the tokenizer's stop tokens first, then the configured ones."""
    generation = config.policy.generation
    stops = dict.fromkeys((*stop_token_ids, *(generation.stop_token_ids or ())))
    return SamplingParams(
        max_new_tokens=config.policy.max_response_length,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or -1,
        stop_token_ids=() if generation.ignore_eos else tuple(stops),
        stop_strings=tuple(generation.stop_strings or ()),
        return_sampling_mask=generation.return_sampling_mask,
    )
