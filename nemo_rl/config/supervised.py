"""The whole configurations of supervised runs: of `examples/run_sft.py` and of `examples/run_rm.py`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from nemo_rl.config.data import DataConfig
from nemo_rl.config.policy import OptimizerConfig, PolicyConfig, TokenizerConfig
from nemo_rl.config.run import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_rl.config.section import Section
from nemo_rl.errors import ConfigError


class SFTConfig(Section):
    """`sft`: length of training and validation, under NeMo-RL's names."""

    max_num_epochs: int = Field(default=1, gt=0)  # passes over the training data
    max_num_steps: int = Field(default=1_000_000, gt=0)  # of policy.train_global_batch_size conversations each
    seed: int = 42  # of the order of the conversations

    val_period: int = Field(default=10, ge=0)  # steps; 0: never
    val_at_start: bool = False  # validate before the first step
    val_at_end: bool = True  # validate after the last step
    val_batches: int | None = Field(default=8, gt=0)  # of each dataset; None: all
    val_global_batch_size: int = Field(default=32, gt=0)  # conversations of one batch
    val_micro_batch_size: int | None = Field(default=None, gt=0)  # of one forward; None: policy.train_micro_batch_size


class SFTDataConfig(DataConfig):
    """`data`: rows with OpenAI `messages`, or with a question and its answer."""

    max_input_seq_length: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    # NeMo-RL's switches of what the template's text lacks: the first and the last token, and whether the tokens that
    # open an answer are its prompt (true) or trained on.
    add_bos: bool = False
    add_eos: bool = False  # append the last token where the template's text lacks it
    # true: the tokens that open an answer are its prompt; false: they are trained on
    add_generation_prompt: bool = True
    overlong: Literal["drop", "truncate"] = "drop"  # longer conversations; dropped ones are counted


class SFTRunConfig(Section):
    """The configuration of `examples/run_sft.py`."""

    sft: SFTConfig = SFTConfig.with_defaults()
    policy: PolicyConfig
    data: SFTDataConfig
    checkpointing: CheckpointingConfig = (
        CheckpointingConfig.with_defaults()
    )  # checkpoints: whether, when, where, and which are kept
    logger: LoggerConfig = LoggerConfig.with_defaults()
    cluster: ClusterConfig = ClusterConfig.with_defaults()

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens of one conversation."""
        return self.data.max_input_seq_length or self.policy.max_total_sequence_length

    @property
    def val_micro_batch_size(self) -> int:
        return self.sft.val_micro_batch_size or self.policy.train_micro_batch_size


class RewardModelTrainingConfig(Section):
    """`rm`: length of training and validation."""

    max_num_epochs: int = Field(default=1, gt=0)  # passes over the training pairs
    max_num_steps: int = Field(default=1000, gt=0)  # optimizer steps
    val_period: int = Field(default=50, gt=0)  # steps; the last one is always followed by a validation
    seed: int = 42  # of the order of the pairs and of fresh weights


class RewardModelPolicyConfig(Section):
    """`policy`: the model, in float32 in this process, and its optimizer."""

    model_name: str  # a Hugging Face name or a directory; its head is replaced by a fresh one of one label
    tokenizer: TokenizerConfig = TokenizerConfig.with_defaults()  # the tokenizer and its chat template
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is a GPU
    train_global_batch_size: int = Field(default=64, gt=0)  # pairs of one optimizer step
    train_micro_batch_size: int = Field(default=16, gt=0)  # pairs of one forward and backward
    max_total_sequence_length: int = Field(default=1024, gt=0)  # tokens; pairs with a longer side are dropped
    max_grad_norm: float = Field(default=1.0, gt=0)  # gradients of a larger norm are scaled down to it
    optimizer: OptimizerConfig = OptimizerConfig.with_defaults()  # the optimizer, by dotted path


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

    rm: RewardModelTrainingConfig = RewardModelTrainingConfig.with_defaults()
    policy: RewardModelPolicyConfig
    data: PreferenceDataConfig  # the pairs to train and to validate on
    # where the trained model is written
    checkpointing: RewardModelCheckpointingConfig = RewardModelCheckpointingConfig.with_defaults()
    logger: LoggerConfig = LoggerConfig.with_defaults()


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
