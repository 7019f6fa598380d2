"""What runs where."""

from nemo_rl.config.env import AgentSection
from nemo_rl.config.master import GRPOConfig
from nemo_rl.policy.fsdp2 import resolve_device


def placement_plan(config: GRPOConfig) -> str:
    """One line a part of the run: what it is, where it runs, in which precision."""
    device = resolve_device(config.policy.device).type
    generation = config.policy.generation
    engine_process = "in a Ray actor" if generation.in_actor else "started by the driver"
    engine_precision = generation.vllm_cfg.precision
    engine_precision = config.policy.precision if engine_precision == "auto" else engine_precision
    reference = config.loss_fn.reference_policy_kl_penalty > 0
    agents = sorted(name for name, section in config.env.items() if isinstance(section, AgentSection))
    lines = [
        "# placement",
        f"#   policy: {config.policy.model_name}, FSDP2, 1 rank on {device}, {config.policy.precision}",
        f"#   reference policy: {'a frozen copy beside the policy' if reference else 'none (no KL penalty)'}",
        f"#   generation: {generation.backend} on {device}, {engine_process}, {engine_precision}",
        f"#   environments: {', '.join(sorted(config.env.keys() - set(agents))) or 'none'}",
        *([f"#   agents: {', '.join(agents)}; gateway on {config.gateway.host}"] if agents else []),
        "#   weight sync: shared memory",
    ]
    return "\n".join(lines)
