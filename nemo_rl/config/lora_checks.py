"""Rules of LoRA that need no model."""

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError

KEY = "policy.dtensor_cfg.lora_cfg"


def check_lora(policy: PolicyConfig) -> None:
    """Raise ConfigError for what adapters cannot be combined with; nothing where they are off."""
    section, tensor_parallel = policy.dtensor_cfg.lora_cfg, policy.dtensor_cfg.tensor_parallel_size
    if not section.enabled:
        return
    if policy.megatron_cfg.enabled:
        problem = "policy.megatron_cfg.enabled is true, which trains all weights; allowed: one of the two"
        raise ConfigError(f"{KEY}.enabled", True, problem)
    if tensor_parallel > 1:
        problem = f"policy.dtensor_cfg.tensor_parallel_size is {tensor_parallel}: adapters are not split; allowed: 1"
        raise ConfigError(f"{KEY}.enabled", True, problem)
    if section.match_all_linear and section.target_modules:
        problem = f"{KEY}.match_all_linear is true; allowed: one of the two"
        raise ConfigError(f"{KEY}.target_modules", section.target_modules, problem)
