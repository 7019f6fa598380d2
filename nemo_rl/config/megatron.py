"""`megatron_cfg`: a model on Megatron-core, under NeMo-RL's names; others are in megatron_keys.py."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.section import Section


class MegatronOptimizerConfig(Section):
    """What NeMo-RL writes in the place of `policy.optimizer`. Biases and norms are not decayed, as Megatron-LM does."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = Field(default=5e-6, gt=0)
    min_lr: float = Field(default=0.0, ge=0)  # where a schedule ends
    weight_decay: float = Field(default=0.01, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    sgd_momentum: float = Field(default=0.9, ge=0)


class MegatronSchedulerConfig(Section):
    """The learning rate over training steps: a linear warm-up, then a decay to `optimizer.min_lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: int | None = Field(default=None, gt=0)  # the step at which the decay ends, warm-up included
    lr_warmup_iters: int = Field(default=0, ge=0)
    lr_warmup_init: float = Field(default=0.0, ge=0)


class MegatronDDPConfig(Section):
    """How gradients are added up over data parallel ranks."""

    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False  # while the backward pass still runs


class MegatronConfig(Section):
    """Megatron-core in the place of FSDP2; its ranks are tensor x pipeline x data parallel."""

    enabled: bool = False
    tensor_model_parallel_size: int = Field(default=1, gt=0)  # ranks that share every layer
    pipeline_model_parallel_size: int = Field(default=1, gt=0)  # stages, each with some of the layers
    data_parallel_size: int | None = Field(default=None, gt=0)  # None: all of the model's GPUs; on a CPU 1
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, gt=0)  # None: as many as in the others
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, gt=0)
    pipeline_dtype: Literal["float32", "bfloat16"] | None = None  # what stages send each other; None: the precision


class TrainedMegatronConfig(MegatronConfig):
    activation_checkpointing: bool = False
    optimizer: MegatronOptimizerConfig | None = None  # None: policy.optimizer
    scheduler: MegatronSchedulerConfig | None = None  # None: policy.scheduler
    distributed_data_parallel_config: MegatronDDPConfig = MegatronDDPConfig()
