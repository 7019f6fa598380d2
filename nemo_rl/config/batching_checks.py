"""Rules of micro-batches that are bounded by tokens."""

from nemo_rl.config.policy import Policy
from nemo_rl.errors import ConfigError

PACKING, DYNAMIC = "policy.sequence_packing", "policy.dynamic_batching"


def check_batching(policy: Policy) -> None:
    """One way of making micro-batches, which holds every sample that there can be."""
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        problem = f"{DYNAMIC}.enabled is true too: samples are packed or padded; allowed: one of the two"
        raise ConfigError(f"{PACKING}.enabled", True, problem)
    for key, section in ((PACKING, policy.sequence_packing), (DYNAMIC, policy.dynamic_batching)):
        if section.enabled and policy.megatron_cfg.enabled:
            problem = "policy.megatron_cfg.enabled is true, which counts samples; allowed: false"
            raise ConfigError(f"{key}.enabled", True, problem)
    longest = policy.max_total_sequence_length
    for key, section in ((PACKING, policy.sequence_packing), (DYNAMIC, policy.dynamic_batching)):
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(section, name)
            if section.enabled and tokens is not None and tokens < longest:
                problem = f"must be at least policy.max_total_sequence_length = {longest}, or null"
                raise ConfigError(f"{key}.{name}", tokens, problem)
