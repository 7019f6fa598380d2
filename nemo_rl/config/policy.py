"""`policy`: the model, its optimizer and how it is trained, under NeMo-RL's names."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from nemo_rl.config.registries import ENGINES
from nemo_rl.config.section import Section
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.config.collect import ServerConfig
    from nemo_rl.config.layout import Layout

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


class _TokenBudgetConfig(Section):
    enabled: bool = False
    # Tokens of one micro-batch; None: policy.max_total_sequence_length times its samples where samples are counted.
    train_mb_tokens: int | None = Field(default=None, gt=0)
    logprob_mb_tokens: int | None = Field(default=None, gt=0)


class SequencePackingConfig(_TokenBudgetConfig):
    """Samples lie one behind the other in a micro-batch, without padding."""

    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"


class DynamicBatchingConfig(_TokenBudgetConfig):
    """Samples of like length are padded to the longest, as many as the budget holds."""

    sequence_length_round: int = Field(default=64, gt=0)  # the padded length is a multiple of it


class LoraAdapterConfig(Section):
    """W + alpha / dim * B A of every adapted layer (LoRA, arXiv 2106.09685): B and A are trained, W is frozen.

    A name of a layer is its last part (`q_proj`), its whole name, or a pattern of the whole one (`*.layers.0.*`).
    """

    enabled: bool = False
    target_modules: list[str] = Field(default_factory=list)  # names of linear layers; none: all but the output layer
    exclude_modules: list[str] = Field(default_factory=list)  # of those, the ones that are left out
    match_all_linear: bool = False  # says in words what empty target_modules mean
    dim: int = Field(default=8, gt=0)  # the rank of B A
    alpha: int = Field(default=32, gt=0)
    lora_A_init: Literal["xavier", "kaiming"] = "xavier"  # normal or uniform values; B begins with zeros
    save_merged: bool = True  # checkpoints hold the merged model in weights/ too; false: the adapter alone


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


class DTensorConfig(Section):
    """FSDP2, and tensor parallelism by DTensor."""

    enabled: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    tensor_parallel_size: int = Field(default=1, gt=0)  # ranks that share every layer; divides the heads
    # Ranks that share the samples and the weights. None: all of the model's GPUs; on a CPU 1.
    data_parallel_size: int | None = Field(default=None, gt=0)


class ParallelModelConfig(Section):
    """A model on ranks of the backend that is enabled."""

    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()  # before dtensor_cfg

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every layer."""
        if self.megatron_cfg.enabled:
            return self.megatron_cfg.tensor_model_parallel_size
        return self.dtensor_cfg.tensor_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages, each with some of the layers."""
        return self.megatron_cfg.pipeline_model_parallel_size if self.megatron_cfg.enabled else 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model between them; they work on the same samples."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int | None:
        """None: all of the model's GPUs, on a CPU 1."""
        return (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg).data_parallel_size


class ResourcesConfig(Section):
    """GPUs of the engines alone, taken from those of `cluster`."""

    gpus_per_node: int | None = Field(default=None, gt=0)  # None: all of these nodes
    num_nodes: int | None = Field(default=None, gt=0)  # None: they stand on the policy's nodes


class ColocatedConfig(Section):
    enabled: bool = True  # trainer and engine share their devices
    resources: ResourcesConfig = ResourcesConfig()  # where they do not


class SamplingConfig(Section):
    """How responses are sampled, whatever the engine."""

    max_new_tokens: int | None = Field(default=None, gt=0)  # of one response; None: up to max_total_sequence_length
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)
    stop_token_ids: list[int] | None = None  # beside the tokenizer's end-of-sequence token
    stop_strings: list[str] | None = None
    ignore_eos: bool = False  # sample on to the token limit, whatever is sampled; for measurements
    timeout_s: float = Field(default=600.0, gt=0)  # of one request


class GenerationConfig(SamplingConfig):
    """`policy.generation` of a training run: how responses are sampled, and the engine that samples them.

    The base of the sections of all engines (generation/). What the layout, the launch and the weight sync need to know
    of an engine they ask here.
    """

    GPUS_PER_ENGINE_KEY: ClassVar[str] = "policy.generation.backend"  # named in errors about `gpus_per_engine`

    backend: str = "vllm"  # an entry of ENGINES, or a dotted path
    in_actor: bool = False  # in a Ray actor, a process of its own; several replicas always are
    num_replicas: int | None = Field(default=None, gt=0)  # engines; None: as many as their GPUs hold, on a CPU 1
    colocated: ColocatedConfig = ColocatedConfig()

    @property
    def gpus_per_engine(self) -> int:
        """Return the number of GPUs of one engine."""
        return 1

    @property
    def max_model_len(self) -> int | None:
        """Return the context length that the section asks for; None: the policy's."""
        return None

    @property
    def devices(self) -> tuple[Literal["cpu", "cuda"], ...]:
        """Return the devices that the installed engine runs on."""
        return ("cpu", "cuda")

    @property
    def can_sleep(self) -> bool:
        """Return whether the engine may leave its device's memory to the trainer."""
        return False

    @property
    def runs_in_driver(self) -> bool:
        """Return whether the engine runs in the driver's process even where the policy has a cluster."""
        return False

    def dtype(self, policy_precision: str) -> str:
        """Return the precision that the engine computes in."""
        return policy_precision

    @classmethod
    def from_server(cls, server: "ServerConfig", sampling: SamplingConfig) -> "GenerationConfig":
        """Return the section of an engine that `nemo-rl collect` starts for itself; raises ConfigError."""
        return cls(**sampling.model_dump(), backend=server.backend)

    def check_layout(self, layout: "Layout", *, collects_in_background: bool) -> None:
        """Raise ConfigError where the engine cannot run under `layout`."""


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

    generation: Annotated[SerializeAsAny[GenerationConfig], ENGINES] = Field(default_factory=ENGINES.new)


KEY = "policy.dtensor_cfg.lora_cfg"


def check_lora(policy: PolicyConfig) -> None:
    """Raise ConfigError for what adapters cannot be combined with; nothing where they are off."""
    section, tensor_parallel = policy.dtensor_cfg.lora_cfg, policy.dtensor_cfg.tensor_parallel_size
    if not section.enabled:
        return
    if policy.megatron_cfg.enabled:
        problem = "policy.megatron_cfg.enabled is true, which trains all weights; allowed: one of the two"
        raise ConfigError(f"{KEY}.enabled", True, problem)
    if tensor_parallel > 1:
        problem = f"policy.dtensor_cfg.tensor_parallel_size is {tensor_parallel}: adapters are not split; allowed: 1"
        raise ConfigError(f"{KEY}.enabled", True, problem)
    if section.match_all_linear and section.target_modules:
        problem = f"{KEY}.match_all_linear is true; allowed: one of the two"
        raise ConfigError(f"{KEY}.target_modules", section.target_modules, problem)


class EndpointLimitsConfig(Section):
    """What a server is asked to bear."""

    max_concurrency: int = Field(default=64, gt=0)  # requests at once, over all replicas
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)  # 4 characters are one; usage corrects it
    request_timeout_s: float = Field(default=60.0, gt=0)  # of one attempt
    max_retries: int = Field(default=3, ge=0)  # of a request that met 429, 5xx or no answer; never of another 4xx
    retry_backoff_s: float = Field(default=0.5, ge=0)  # before the first; doubles


class ServedModelConfig(Section):
    """A server over HTTP; several URLs are replicas, and the least busy one is asked."""

    base_urls: list[str] = Field(min_length=1)  # roots, with or without /v1
    model: str
    api_key_env: str | None = None  # the environment variable that holds the key
    limits: EndpointLimitsConfig = EndpointLimitsConfig()


class TeacherConfig(ParallelModelConfig):
    """A model that is asked and never trained, on a backend and ranks of its own. NeMo-RL writes a whole policy section
    here."""

    model_name: str  # a Hugging Face name or a folder; with `server` its tokenizer alone is loaded from there
    tokenizer: TokenizerConfig = TokenizerConfig()
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the policy's
    logprob_batch_size: int = Field(default=4, gt=0)  # samples of one forward pass
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    colocated: ColocatedConfig = ColocatedConfig()  # on the policy's devices, in turns; else on GPUs of its own
    server: ServedModelConfig | None = None  # a vLLM server that is asked over HTTP, in place of a model of this run
