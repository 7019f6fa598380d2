"""The whole configuration of `examples/run_rm.py`, which trains a reward model on preferences."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from nemo_rl.config.policy import OptimizerConfig, TokenizerConfig
from nemo_rl.config.run import LoggerConfig
from nemo_rl.config.section import Section
from nemo_rl.errors import ConfigError


class RewardModelTrainingConfig(Section):
    """`rm`: length of training and validation."""

    max_num_epochs: int = Field(default=1, gt=0)
    max_num_steps: int = Field(default=1000, gt=0)  # optimizer steps
    val_period: int = Field(default=50, gt=0)  # steps; the last one is always followed by a validation
    seed: int = 42  # of the order of the pairs and of fresh weights


class RewardModelPolicyConfig(Section):
    """`policy`: the model, in float32 in this process, and its optimizer."""

    model_name: str  # a Hugging Face name or a directory; its head is replaced by a fresh one of one label
    tokenizer: TokenizerConfig = TokenizerConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    train_global_batch_size: int = Field(default=64, gt=0)  # pairs of one optimizer step
    train_micro_batch_size: int = Field(default=16, gt=0)  # pairs of one forward and backward
    max_total_sequence_length: int = Field(default=1024, gt=0)  # tokens; pairs with a longer side are dropped
    max_grad_norm: float = Field(default=1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()


class PreferenceDatasetConfig(Section):
    """Pairs of responses to one prompt, one preferred to the other."""

    dataset_name: Literal["jsonl", "spell_backward"] = "jsonl"  # spell_backward: the quickstart's words
    data_path: str | None = None  # jsonl: a file of rows {prompt or messages, chosen, rejected}
    size: int | None = Field(default=None, gt=0)  # pairs at most


class PreferenceDataConfig(Section):
    train: PreferenceDatasetConfig
    validation: PreferenceDatasetConfig | None = None


class RewardModelCheckpointingConfig(Section):
    checkpoint_dir: str | None = None  # the Hugging Face directory to write; None: model/ in the run directory


class RewardModelRunConfig(Section):
    """The configuration of `examples/run_rm.py`."""

    rm: RewardModelTrainingConfig = RewardModelTrainingConfig()
    policy: RewardModelPolicyConfig
    data: PreferenceDataConfig
    checkpointing: RewardModelCheckpointingConfig = RewardModelCheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()


def check_reward_model(config: RewardModelRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run; files are only looked for."""
    batch, micro_batch = config.policy.train_global_batch_size, config.policy.train_micro_batch_size
    if batch % micro_batch:
        raise ConfigError(
            "policy.train_micro_batch_size", micro_batch, f"must divide policy.train_global_batch_size = {batch}"
        )
    for name, dataset in (("train", config.data.train), ("validation", config.data.validation)):
        if dataset is not None and dataset.dataset_name == "jsonl":
            _check_file(f"data.{name}.data_path", dataset.data_path)


def _check_file(key: str, path: str | None) -> None:
    if path is None:
        raise ConfigError(key, None, "required by dataset_name: jsonl")
    if not Path(path).is_file():
        raise ConfigError(key, path, f"no such file (from {Path.cwd()})")
