"""The whole configurations of supervised runs: of `examples/run_sft.py`, `run_dpo.py` and `run_rm.py`."""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_rl.config.data import DataConfig, DatasetConfig, Overlong
from nemo_rl.config.kinds import Section
from nemo_rl.config.policy import OptimizerConfig, PolicyConfig, SchedulerStageConfig, TokenizerConfig
from nemo_rl.config.shared_sections import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_rl.config.value_types import Seed


class SupervisedConfig(Section):
    """Length of training and validation of `sft` and `dpo`: samples are conversations or pairs."""

    max_num_epochs: int = Field(default=1, gt=0)  # passes over the training data
    max_num_steps: int = Field(default=1_000_000, gt=0)  # steps of policy.train_global_batch_size samples
    seed: Seed = 42  # seeds the order of samples

    val_period: int = Field(default=10, ge=0)  # steps; 0: never
    val_at_start: bool = False  # validate before the first step
    val_at_end: bool = True  # validate after the last step
    val_batches: int | None = Field(default=8, gt=0)  # batches per dataset; None: all
    val_global_batch_size: int = Field(default=32, gt=0)  # samples of one batch
    val_micro_batch_size: int | None = Field(default=None, gt=0)  # per forward; None: policy.train_micro_batch_size


class SFTConfig(SupervisedConfig):
    """`sft`: length of training and validation."""


class SFTDataConfig(DataConfig):
    """`data`: rows with OpenAI `messages`, or with a question and its answer."""

    max_input_seq_length: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    # NeMo-RL's switches of what the template's text lacks: the first and the last token, and whether the tokens that
    # open an answer are its prompt (true) or trained on.
    add_bos: bool = False
    # The end-of-sequence token that the template's text lacks: null: of each answer; true: of the conversation; false:
    # it is not added.
    add_eos: bool | None = None
    # true: the tokens that open an answer are its prompt; false: they are trained on
    add_generation_prompt: bool = True
    # Longer conversations, which are counted: drop, mask (they keep their place in a batch, with no weight in the loss:
    # NeMo-RL), truncate, or refuse the run. Validation datasets are without masked ones.
    overlong: Overlong | Literal["truncate"] = "drop"  # pyright: ignore[reportIncompatibleVariableOverride]


class SupervisedRunConfig(Section):
    """Base of the configurations of supervised runs of a policy."""

    algorithm_key: ClassVar[str]  # the key of the algorithm's section
    needs_reference: ClassVar[bool] = False  # whether the loss reads log-probs of the initial weights
    rows_per_sample: ClassVar[int] = 1  # token sequences of one sample

    policy: PolicyConfig
    data: DataConfig
    checkpointing: CheckpointingConfig = (
        CheckpointingConfig.with_defaults()
    )  # checkpoints: whether, when, where, and which are kept
    logger: LoggerConfig = LoggerConfig.with_defaults()
    cluster: ClusterConfig = ClusterConfig.with_defaults()

    @property
    def algorithm(self) -> SupervisedConfig:
        return getattr(self, self.algorithm_key)

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens of one conversation."""
        return self.data.max_input_seq_length or self.policy.max_total_sequence_length

    @property
    def val_micro_batch_size(self) -> int:
        """Return the token sequences of one forward pass without gradients."""
        samples = self.algorithm.val_micro_batch_size or self.policy.train_micro_batch_size
        return samples * self.rows_per_sample


class SFTRunConfig(SupervisedRunConfig):
    """The configuration of `examples/run_sft.py`."""

    algorithm_key: ClassVar[str] = "sft"

    sft: SFTConfig = SFTConfig.with_defaults()
    data: SFTDataConfig


class DPOConfig(SupervisedConfig):
    """`dpo`: length of training and validation, and the terms of the loss."""

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0)  # beta: how far the policy may leave the reference
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # loss on the margin between the two rewards
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)  # sigmoid: assumed share of swapped preferences
    preference_loss_weight: float = Field(default=1.0, ge=0)  # weight of the preference loss
    sft_loss_weight: float = Field(default=0.0, ge=0)  # weight of the negative log-likelihood of the chosen answers
    preference_average_log_probs: bool = False  # rewards are means over the tokens of an answer, not sums
    sft_average_log_probs: bool = False  # the same of the supervised term


class PreferenceDataConfig(DataConfig):
    """`data`: pairs of answers to one prompt, one preferred to the other."""

    # Pairs with a longer side, which are counted: drop, mask (they keep their place in a batch, with no weight in the
    # loss: NeMo-RL), or refuse the run. Validation datasets are without masked ones.
    overlong: Overlong = "drop"
    max_input_seq_length: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    default: DatasetConfig = DatasetConfig.with_defaults(dataset_name="jsonl")


class DPORunConfig(SupervisedRunConfig):
    """The configuration of `examples/run_dpo.py`."""

    algorithm_key: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True
    rows_per_sample: ClassVar[int] = 2

    dpo: DPOConfig = DPOConfig.with_defaults()
    data: PreferenceDataConfig


class RewardModelTrainingConfig(Section):
    """`rm`: length of training and validation."""

    max_num_epochs: int = Field(default=1, gt=0)  # passes over the training pairs
    max_num_steps: int = Field(default=1000, gt=0)  # optimizer steps
    seed: Seed = 42  # seeds the order of pairs and fresh weights

    val_period: int = Field(default=50, ge=0)  # steps, 0: none; the last one is always followed by a validation
    val_at_start: bool = False  # validate before the first step
    val_batches: int | None = Field(default=None, gt=0)  # batches per dataset; None: all
    val_global_batch_size: int = Field(default=32, gt=0)  # pairs of one batch
    val_micro_batch_size: int | None = Field(default=None, gt=0)  # per forward; None: policy.train_micro_batch_size


class RewardModelPolicyConfig(Section):
    """`policy`: the model in this process, and its optimizer."""

    model_name: str  # a Hugging Face name or a directory; its head is replaced by a fresh one of one label
    tokenizer: TokenizerConfig = TokenizerConfig.with_defaults()  # the tokenizer and its chat template
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is a GPU
    precision: Literal["float32", "bfloat16"] = "float32"  # the computation; weights and optimizer are float32
    train_global_batch_size: int = Field(default=64, gt=0)  # pairs of one optimizer step
    train_micro_batch_size: int = Field(default=16, gt=0)  # pairs of one forward and backward
    max_total_sequence_length: int = Field(default=1024, gt=0)  # tokens; see data.overlong for longer pairs
    max_grad_norm: float | None = Field(default=1.0, gt=0)  # gradients of a larger norm are scaled down to it
    optimizer: OptimizerConfig = OptimizerConfig.with_defaults()  # the optimizer, by dotted path
    # learning-rate schedule, one or a list that ends with milestones; None: constant
    scheduler: SchedulerStageConfig | list[SchedulerStageConfig] | None = None


class RewardModelCheckpointingConfig(Section):
    """`checkpointing`: the one directory that is written."""

    checkpoint_dir: str | None = None  # the Hugging Face directory to write; None: model/ in the run directory
    metric_name: Literal["val:pair_accuracy", "val:loss"] = "val:pair_accuracy"  # whose best weights are kept


class RewardModelRunConfig(Section):
    """The configuration of `examples/run_rm.py`."""

    rm: RewardModelTrainingConfig = RewardModelTrainingConfig.with_defaults()
    policy: RewardModelPolicyConfig
    data: PreferenceDataConfig  # the pairs to train and to validate on
    # where the trained model is written
    checkpointing: RewardModelCheckpointingConfig = RewardModelCheckpointingConfig.with_defaults()
    logger: LoggerConfig = LoggerConfig.with_defaults()

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens of one side of a pair."""
        return self.data.max_input_seq_length or self.policy.max_total_sequence_length
