"""The whole configuration of `examples/run_sft.py`, which trains on conversations."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.data import DataConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_rl.config.section import Section


class SFTConfig(Section):
    """`sft`: length of training and validation, under NeMo-RL's names."""

    max_num_epochs: int = Field(default=1, gt=0)
    max_num_steps: int = Field(default=1_000_000, gt=0)  # of policy.train_global_batch_size conversations each
    seed: int = 42  # of the order of the conversations

    val_period: int = Field(default=10, ge=0)  # steps; 0: never
    val_at_start: bool = False
    val_at_end: bool = True
    val_batches: int | None = Field(default=8, gt=0)  # of each dataset; None: all
    val_global_batch_size: int = Field(default=32, gt=0)  # conversations of one batch
    val_micro_batch_size: int | None = Field(default=None, gt=0)  # of one forward; None: policy.train_micro_batch_size


class SFTDataConfig(DataConfig):
    """`data`: rows with OpenAI `messages`, or with a question and its answer."""

    max_input_seq_length: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    overlong: Literal["drop", "truncate"] = "drop"  # longer conversations; dropped ones are counted


class SFTRunConfig(Section):
    """The configuration of `examples/run_sft.py`."""

    sft: SFTConfig = SFTConfig()
    policy: PolicyConfig
    data: SFTDataConfig
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens of one conversation."""
        return self.data.max_input_seq_length or self.policy.max_total_sequence_length

    @property
    def val_micro_batch_size(self) -> int:
        return self.sft.val_micro_batch_size or self.policy.train_micro_batch_size
