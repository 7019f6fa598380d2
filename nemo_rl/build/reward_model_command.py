"""What examples/run_rm.py does with a recipe; torch loads only for a valid configuration."""

from nemo_rl.build.command_line import Job
from nemo_rl.config.loading import load_reward_model_config
from nemo_rl.config.reward_model import RewardModelRunConfig


def _train(config: RewardModelRunConfig, command: str) -> int:
    from nemo_rl.build.reward_model import train_reward_model

    train_reward_model(config)
    return 0


REWARD_MODEL_JOB = Job(load_reward_model_config, _train)
