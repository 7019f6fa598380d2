"""`policy`: the model, its optimizer and how it is trained, under NeMo-RL's names."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.batching import DynamicBatching, SequencePacking
from nemo_rl.config.generation import GenerationSection, Sampling
from nemo_rl.config.lora import LoraCfg
from nemo_rl.config.megatron import TrainedMegatronCfg
from nemo_rl.config.parallel import DTensorCfg, ParallelModel
from nemo_rl.config.section import Section


class Tokenizer(Section):
    name: str | None = None  # None: policy.model_name
    chat_template: str | None = None  # a Jinja text or a file; None: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TrainedDTensorCfg(DTensorCfg):
    lora_cfg: LoraCfg = LoraCfg()


class Optimizer(Section):
    name: str = "torch.optim.AdamW"  # a dotted path
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]})


class SchedulerStage(Section):
    """One scheduler of a sequence, or the steps at which the sequence goes on."""

    name: str | None = None  # a dotted path, e.g. torch.optim.lr_scheduler.LinearLR
    kwargs: dict[str, Any] = Field(default_factory=dict)
    milestones: list[int] | None = None


class Model(Section):
    """What every use of `policy` needs: a model."""

    model_name: str  # a Hugging Face name or a folder
    tokenizer: Tokenizer = Tokenizer()
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of forward and backward; weights are kept in float32
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_total_sequence_length: int = Field(default=512, gt=0)


class SampledModel(Model):
    """What rollouts need of it as well: how it is sampled."""

    generation: Sampling = Sampling()

    @property
    def max_response_length(self) -> int:
        """Tokens that one response may have."""
        return self.generation.max_new_tokens or self.max_total_sequence_length


class Policy(Model, ParallelModel):
    """A model that is trained."""

    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    train_global_batch_size: int = Field(default=512, gt=0)  # samples of one optimizer step
    train_micro_batch_size: int = Field(default=4, gt=0)  # samples of one forward and backward
    logprob_batch_size: int | None = Field(default=None, gt=0)  # None: train_micro_batch_size
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    sequence_packing: SequencePacking = SequencePacking()
    dynamic_batching: DynamicBatching = DynamicBatching()
    max_grad_norm: float | None = Field(default=1.0, gt=0)  # None: not clipped

    dtensor_cfg: TrainedDTensorCfg = TrainedDTensorCfg()
    megatron_cfg: TrainedMegatronCfg = TrainedMegatronCfg()
    optimizer: Optimizer = Optimizer()
    scheduler: SchedulerStage | list[SchedulerStage] | None = None


class RolloutPolicy(Policy, SampledModel):
    """A model that is sampled, and trained on what becomes of it."""

    generation: GenerationSection = GenerationSection()
