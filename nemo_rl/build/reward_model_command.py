"""What examples/run_rm.py does with a recipe; torch loads only for a valid configuration."""

import sys

from nemo_rl.build.command_line import Job
from nemo_rl.config.loading import load_reward_model_config, resolved_yaml
from nemo_rl.config.reward_model import RewardModelConfig


def _show(config: RewardModelConfig) -> int:
    sys.stdout.write(resolved_yaml(config))
    return 0


def _train(config: RewardModelConfig, command: str) -> int:
    from nemo_rl.build.reward_model import train_reward_model

    train_reward_model(config)
    return 0


REWARD_MODEL_JOB = Job(load_reward_model_config, _show, _train)
