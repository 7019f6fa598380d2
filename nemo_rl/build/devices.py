"""Which device a run uses, and what runs where."""

import torch

from nemo_rl.config.master import GRPOConfig
from nemo_rl.errors import ConfigError


def resolve_device(config: GRPOConfig) -> str:
    """"cuda" or "cpu"; raises ConfigError where CUDA is asked for and not there."""
    device = config.policy.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("policy.device", "cuda", "this machine has no CUDA device that torch sees; allowed: auto, cpu")
    return device


def placement_plan(config: GRPOConfig) -> str:
    """One line a part of the run: what it is, where it runs, in which precision."""
    device = resolve_device(config)
    generation = config.policy.generation
    engine_process = "in a Ray actor" if generation.in_actor else "in the driver's process"
    engine_precision = generation.vllm_cfg.precision
    engine_precision = config.policy.precision if engine_precision == "auto" else engine_precision
    reference = config.loss_fn.reference_policy_kl_penalty > 0
    lines = [
        "placement:",
        f"  policy: {config.policy.model_name}, FSDP2, 1 rank on {device}, {config.policy.precision}",
        f"  reference policy: {'a frozen copy beside the policy' if reference else 'none (no KL penalty)'}",
        f"  generation: {generation.backend} on {device}, {engine_process}, {engine_precision}",
        f"  environments: {', '.join(sorted(config.env)) or 'none'}",
        "  weight sync: shared memory",
    ]
    return "\n".join(lines)
