"""NeMo-RL's import path of its metrics of a batch."""

from nemo_rl.compat.environment_interface import calculate_pass_rate_per_prompt

__all__ = ["calculate_pass_rate_per_prompt"]
