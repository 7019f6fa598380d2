"""`policy`: the model, its optimizer and how it is trained, under NeMo-RL's names."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.batching import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.generation import GenerationConfig, SamplingConfig
from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.config.megatron import TrainedMegatronConfig
from nemo_rl.config.parallel import DTensorConfig, ParallelModelConfig
from nemo_rl.config.section import Section


class TokenizerConfig(Section):
    name: str | None = None  # None: policy.model_name
    chat_template: str | None = None  # a Jinja text or a file; None: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TrainedDTensorConfig(DTensorConfig):
    lora_cfg: LoraAdapterConfig = LoraAdapterConfig()


class OptimizerConfig(Section):
    name: str = "torch.optim.AdamW"  # a dotted path
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]})


class SchedulerStageConfig(Section):
    """One scheduler of a sequence, or the steps at which the sequence goes on."""

    name: str | None = None  # a dotted path, e.g. torch.optim.lr_scheduler.LinearLR
    kwargs: dict[str, Any] = Field(default_factory=dict)
    milestones: list[int] | None = None


class ModelConfig(Section):
    """What every use of `policy` needs: a model."""

    model_name: str  # a Hugging Face name or a folder
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of forward and backward; weights are kept in float32
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_total_sequence_length: int = Field(default=512, gt=0)


class SampledModelConfig(ModelConfig):
    """What rollouts need of it as well: how it is sampled."""

    generation: SamplingConfig = SamplingConfig()

    @property
    def max_response_length(self) -> int:
        """Tokens that one response may have."""
        return self.generation.max_new_tokens or self.max_total_sequence_length


class PolicyConfig(ModelConfig, ParallelModelConfig):
    """A model that is trained."""

    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    train_global_batch_size: int = Field(default=512, gt=0)  # samples of one optimizer step
    train_micro_batch_size: int = Field(default=4, gt=0)  # samples of one forward and backward
    logprob_batch_size: int | None = Field(default=None, gt=0)  # None: train_micro_batch_size
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    max_grad_norm: float | None = Field(default=1.0, gt=0)  # None: not clipped

    dtensor_cfg: TrainedDTensorConfig = TrainedDTensorConfig()
    megatron_cfg: TrainedMegatronConfig = TrainedMegatronConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerStageConfig | list[SchedulerStageConfig] | None = None


class RolloutPolicyConfig(PolicyConfig, SampledModelConfig):
    """A model that is sampled, and trained on what becomes of it."""

    generation: GenerationConfig = GenerationConfig()
