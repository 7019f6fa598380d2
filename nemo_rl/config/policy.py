"""`policy`: the model, its optimizer and how it is trained, under NeMo-RL's names."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SerializeAsAny, ValidationError, model_validator

from nemo_rl.config.kinds import Kind, Section
from nemo_rl.config.layout import ExpertLayout, Layout
from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.config.moe import MoEConfig
from nemo_rl.config.registries import ENGINES, POLICY_BACKENDS, TEACHER_BACKENDS
from nemo_rl.config.server import ServerConfig
from nemo_rl.config.value_types import Delay, Processes, Seconds, TokenId
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PackingAlgorithm = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]

ChunkSize = Annotated[int, Field(gt=0)] | Literal["auto"] | None
CHUNK_TOKENS = 1024
CHUNK_LOGITS = 2**24  # 64 MiB in float32
AUTO = "auto"
BACKEND_SECTIONS = {"megatron": "megatron_cfg", "fsdp2": "dtensor_cfg"}  # "auto" is the first enabled, else the last
OWN_BACKEND_SECTION = "backend_cfg"


def resolve_chunk_size(size: ChunkSize, vocab_size: int) -> int | None:
    """Return the number of tokens whose logits exist at once; None: all.

    More than one chunk is computed again in the backward pass, which with a small vocabulary costs more than its memory
    is worth.
    """
    return max(CHUNK_TOKENS, CHUNK_LOGITS // vocab_size) if size == "auto" else size


# The sections of NeMo-RL's two backends always stand under a model; each is read by its own entry.
FSDP2_POLICY, MEGATRON_POLICY = (
    replace(POLICY_BACKENDS, default=name, is_fixed=True) for name in ("fsdp2", "megatron")
)
FSDP2_TEACHER, MEGATRON_TEACHER = (
    replace(TEACHER_BACKENDS, default=name, is_fixed=True) for name in ("fsdp2", "megatron")
)


class _TokenBudgetConfig(Section):
    enabled: bool = False  # make micro-batches by tokens; false: by samples
    # Tokens of one micro-batch; None: policy.max_total_sequence_length times its samples if samples are counted.
    train_mb_tokens: int | None = Field(default=None, gt=0)
    # tokens per scoring pass; None: computed in the same way from logprob_batch_size
    logprob_mb_tokens: int | None = Field(default=None, gt=0)


class SequencePackingConfig(_TokenBudgetConfig):
    """Samples are concatenated in a micro-batch, without padding."""

    algorithm: PackingAlgorithm = "modified_first_fit_decreasing"  # how samples are assigned to micro-batches
    # Compute a prefix that samples of a micro-batch share once; the budgets then count distinct prefixes.
    share_prefixes: bool = False


class DynamicBatchingConfig(_TokenBudgetConfig):
    """Samples of similar length are padded to the longest, as many as the budget holds."""

    sequence_length_round: int = Field(default=64, gt=0)  # the padded length is a multiple of it


class RouterReplayConfig(Section):
    """Training of a mixture of experts on recorded routes: each token goes to the experts that it went to before, with
    the live weights of the router."""

    enabled: bool = False  # record routes and replay them
    # R3: to the engine's experts. R2: to those of the policy's own log-prob pass, for engines that record none.
    # observe: the engine's are only compared with, and tokens are routed live.
    mode: Literal["R3", "R2", "observe"] = "R3"

    @property
    def records(self) -> bool:
        return self.enabled and self.mode != "R2"

    @property
    def records_own(self) -> bool:
        """Return whether the policy's log-prob pass records them."""
        return self.enabled and self.mode == "R2"

    @property
    def replays(self) -> bool:
        """Return whether tokens go to recorded experts."""
        return self.enabled and self.mode != "observe"


class BackendConfig(Section):
    """Options of a policy backend: how it spreads a model over ranks, and what else it has of its own.

    The base of the sections of all backends (policy/). What the layout, the launch and the placement plan need to know
    of a backend they ask here.
    """

    TENSOR_PARALLEL_KEY: ClassVar[str] = "tensor_parallel_size"
    ADAPTER_KEY: ClassVar[str] = ""  # the key of the section of LoRA; "": the backend has no adapters
    PIPELINE_PARALLEL_KEY: ClassVar[str | None] = None  # None: layers are not divided into stages
    NEEDS_OWN_PROCESS: ClassVar[bool] = False  # even a single rank has a process of its own
    REPLAYS_ROUTES: ClassVar[bool] = False  # routers of experts can replay routes (`policy.router_replay`)
    SEES: ClassVar[bool] = False  # trains models that read images
    HOLDS_POLICIES: ClassVar[bool] = False  # trains several adapters on one base (`policies`)
    SHARES_PREFIXES: ClassVar[bool] = False  # samples of a pack may share prefixes (`sequence_packing.share_prefixes`)
    GATHERS_ON_ALL_RANKS: ClassVar[bool] = False  # every rank can be given all weights (`Policy.run_on_all_ranks`)
    SPLITS_STATE: ClassVar[bool] = False  # data-parallel ranks together hold one copy of weights and gradients

    backend: str = Field(default="", exclude=True)  # the entry that this section belongs to
    enabled: bool = False  # read if the model's `backend` is "auto"
    # Ranks that share the samples. None: all of the model's GPUs; on a CPU 1.
    data_parallel_size: int | None = Field(default=None, gt=0)

    @property
    def title(self) -> str:
        """Return the backend's name in the placement plan."""
        return self.backend

    @property
    def num_tensor_parallel_ranks(self) -> int:
        """Return the number of ranks that share every layer."""
        return 1

    @property
    def num_context_parallel_ranks(self) -> int:
        """Return the number of ranks that share the tokens of each micro-batch."""
        return 1

    @property
    def divides_only_long(self) -> bool:
        """Return whether context-parallel ranks share the rows alone that are too long for one of them."""
        return False

    def fit_rows(self, longest: int, limit: int) -> None:
        """Choose the number of ranks that hold the longest row together, `limit` tokens each, if it is not given."""

    @property
    def num_pipeline_stages(self) -> int:
        """Return the number of stages, each with some of the layers."""
        return 1

    def experts_on(self, data: int, *, key: str) -> ExpertLayout:
        """Return how the ranks of a stage hold experts, with `data` data-parallel ranks.

        Raises ConfigError, under the section's `key`, for sizes that do not divide them.
        """
        return ExpertLayout()

    @property
    def adapter_section(self) -> LoraAdapterConfig | None:
        """Return the section of the adapters that are trained, at `ADAPTER_KEY`; None: all weights are."""
        return None

    @property
    def adapter_dim(self) -> int | None:
        """Return the rank of the adapters that are trained; None: all weights are."""
        return None if self.adapter_section is None else self.adapter_section.dim

    @property
    def splits_residual(self) -> bool:
        """Return whether tensor-parallel ranks each hold a part of the tokens between the layers."""
        return False

    @property
    def adapters(self) -> str | None:
        """Return a description of the adapters that are trained; None: all weights are."""
        return None if self.adapter_dim is None else f"LoRA of dim {self.adapter_dim}"

    def check_model(self, model: "PreTrainedConfig", *, key: str) -> None:
        """Raise ConfigError for a model that this section, whose key is `key`, does not allow; needs no weights."""


BackendConfigT = TypeVar("BackendConfigT", bound=BackendConfig)


class ParallelModelConfig(Section):
    """A model on ranks of a policy backend."""

    BACKENDS: ClassVar[Kind] = POLICY_BACKENDS

    call_timeout_s: Seconds = 3600.0  # deadline of one call of its ranks: scores, a step, a refit, a save

    # An entry of BACKENDS, whatever `enabled` says; "auto": Megatron if megatron_cfg.enabled, else FSDP2; or the
    # dotted path of an entry or a worker class, whose options are those of backend_cfg.
    backend: str = AUTO
    backend_cfg: dict[str, Any] = Field(default_factory=dict)  # options of a backend of one's own, by dotted path
    dtensor_cfg: Annotated[SerializeAsAny[BackendConfig], FSDP2_POLICY] = Field(default_factory=FSDP2_POLICY.new)
    megatron_cfg: Annotated[SerializeAsAny[BackendConfig], MEGATRON_POLICY] = Field(default_factory=MEGATRON_POLICY.new)

    @property
    def backend_key(self) -> str:
        if self.backend != AUTO:
            return BACKEND_SECTIONS.get(self.backend, OWN_BACKEND_SECTION)
        keys = list(BACKEND_SECTIONS.values())
        return next((key for key in keys if getattr(self, key).enabled), keys[-1])

    @property
    def parallelism(self) -> BackendConfig:
        if self.backend_key != OWN_BACKEND_SECTION:
            return getattr(self, self.backend_key)
        return self.BACKENDS.read({**self.backend_cfg, self.BACKENDS.name_key: self.backend})

    def section_of(self, section: type[BackendConfigT]) -> BackendConfigT:
        """Return the section of the chosen backend, for the workers of that backend."""
        chosen = self.parallelism
        assert isinstance(chosen, section)
        return chosen

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of ranks that share every layer."""
        return self.parallelism.num_tensor_parallel_ranks

    @property
    def context_parallel_size(self) -> int:
        """Return the number of ranks that share the tokens of each micro-batch."""
        return self.parallelism.num_context_parallel_ranks

    @property
    def ranks_per_limit(self) -> int:
        """Return the number of ranks that share a row for each of which the limits of micro-batches count tokens."""
        return self.context_parallel_size if self.parallelism.divides_only_long else 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Return the number of stages, each with some of the layers."""
        return self.parallelism.num_pipeline_stages

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that work on the same samples together."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int | None:
        """Return the number of ranks that share the samples; None: all of the model's GPUs, on a CPU 1."""
        return self.parallelism.data_parallel_size


def check_backend(model: ParallelModelConfig, *, key: str) -> None:
    """Raise ConfigError for an unknown backend, and for options of a backend that exclude each other."""
    if model.backend_key == OWN_BACKEND_SECTION:
        model.BACKENDS.entry(model.backend, key=f"{key}.backend")
        if model.BACKENDS.name_key in model.backend_cfg:
            where, problem = f"{key}.{OWN_BACKEND_SECTION}.backend", f"the backend is {key}.backend = {model.backend}"
            raise ConfigError(where, model.backend_cfg["backend"], problem)
        _read_own_section(model, key)
    elif model.backend_cfg:
        problem = f"read only where {key}.backend is a dotted path; it is {model.backend}"
        raise ConfigError(f"{key}.{OWN_BACKEND_SECTION}", model.backend_cfg, problem)
    sections = {name: getattr(model, name) for name in BACKEND_SECTIONS.values()}
    for name, section in (sections | {model.backend_key: model.parallelism}).items():
        check = model.BACKENDS.entry(section.backend, key=f"{key}.backend").check
        if check is not None:
            check(f"{key}.{name}", section, model)


def _read_own_section(model: ParallelModelConfig, key: str) -> None:
    try:
        _ = model.parallelism
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (key, OWN_BACKEND_SECTION, *details["loc"]))
        raise ConfigError(where, details["input"], details["msg"]) from error


class ResourcesConfig(Section):
    """GPUs of the engines alone, taken from those of `cluster`."""

    gpus_per_node: int | None = Field(default=None, gt=0)  # None: all of these nodes
    num_nodes: int | None = Field(default=None, gt=0)  # None: on the policy's nodes


class ColocatedConfig(Section):
    enabled: bool = True  # trainer and engine share their devices
    resources: ResourcesConfig = ResourcesConfig.with_defaults()  # the GPUs of engines that are not colocated


class SamplingConfig(Section):
    """The sampling of responses, for every engine."""

    CAN_GUIDE: ClassVar[bool] = False  # whether the engine honours `SamplingParams.guide`

    max_new_tokens: int | None = Field(default=None, gt=0)  # tokens per response; None: up to max_total_sequence_length
    temperature: float = Field(default=1.0, ge=0, le=2)  # the logits are divided by it; 0: the likeliest token
    # sample from the likeliest tokens that hold this share of the probability; 1: from all
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)  # sample from this many of the likeliest tokens; None: from all
    # top_p, top_k: train on the set that the engine drew each token from; false: on the trainer's own truncation
    return_sampling_mask: bool = True
    stop_token_ids: list[TokenId] | None = None  # stop tokens beside the tokenizer's end-of-sequence token
    stop_strings: list[str] | None = None  # texts that end a response, beside the stop tokens
    ignore_eos: bool = False  # sample on to the token limit, whatever is sampled; for measurements
    timeout_s: Seconds = 600.0  # deadline of a request


class GenerationConfig(SamplingConfig):
    """`policy.generation` of a training run: how responses are sampled, and the engine that samples them.

    The base of the sections of all engines (generation/). What the layout, the launch and the weight sync need to know
    of an engine they ask here.
    """

    GPUS_PER_ENGINE_KEY: ClassVar[str] = "policy.generation.backend"  # named in errors about `gpus_per_engine`

    backend: str = "vllm"  # an entry of ENGINES, or a dotted path
    in_actor: bool = False  # run the engine in a Ray actor, as several replicas always do
    num_replicas: Processes | None = None  # engines; None: as many as their GPUs hold, on a CPU 1
    colocated: ColocatedConfig = ColocatedConfig.with_defaults()  # whether engines and policy share their devices

    @property
    def gpus_per_engine(self) -> int:
        return 1

    @property
    def max_model_len(self) -> int | None:
        """Return the context length that the section sets; None: the policy's."""
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
        """Return whether the engine runs in the driver's process even if the policy has a cluster."""
        return False

    @property
    def holds_adapters(self) -> bool:
        """Return whether the engine can hold versions of an adapter beside the base model (`HoldsAdapters`)."""
        return False

    @property
    def shares_process(self) -> bool:
        """Return whether the engine runs in the process that starts it; `for_layout` may decide that."""
        return self.runs_in_driver

    def dtype(self, policy_precision: str) -> str:
        return policy_precision

    @classmethod
    def from_server(cls, server: ServerConfig, sampling: SamplingConfig) -> "GenerationConfig":
        """Return the section of an engine that `nemo-rl collect` starts for itself; raises ConfigError."""
        return cls(**sampling.model_dump(), backend=server.backend)

    def check_layout(self, layout: Layout, *, collects_in_background: bool) -> None:
        """Raise ConfigError if the engine cannot run under `layout`."""

    def for_layout(self, layout: Layout, *, samples_beside_training: bool) -> "GenerationConfig":
        """Return the section with the keys set that depend on `layout` and were left to it."""
        return self

    def for_model(self, architectures: Sequence[str]) -> "GenerationConfig":
        """Return the section with the keys set that depend on the model's architectures and were left to them."""
        return self


class TokenizerConfig(Section):
    name: str | None = None  # None: policy.model_name
    chat_template: str | None = None  # a Jinja text or a file; None: the tokenizer's own
    # further variables of the chat template, e.g. enable_thinking
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(Section):
    name: str = "torch.optim.AdamW"  # a dotted path
    # keyword arguments of the optimizer
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]})
    # whether weight decay reaches norms and biases, the tensors of one dimension; TRL's and Megatron's does not
    decay_norm_and_bias: bool = True


class SchedulerStageConfig(Section):
    """One scheduler of a sequence, or the steps at which the next one takes over."""

    name: str | None = None  # a dotted path, e.g. torch.optim.lr_scheduler.LinearLR
    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the scheduler
    # training steps at which the next scheduler of the list begins
    milestones: list[Annotated[int, Field(gt=0)]] | None = None


class ModelConfig(Section):
    """The key that every use of `policy` needs: a model."""

    model_name: str  # a Hugging Face name or a directory
    tokenizer: TokenizerConfig = TokenizerConfig.with_defaults()  # the tokenizer and its chat template
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # forward and backward; weights are kept in float32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is a GPU that the engine can use
    max_total_sequence_length: int = Field(default=512, gt=0)  # tokens of prompt and responses together


class SampledModelConfig(ModelConfig):
    """The keys that rollouts also need: the sampling of the model."""

    generation: SamplingConfig = SamplingConfig.with_defaults()

    @property
    def max_response_length(self) -> int:
        """Return the maximum number of tokens of one response."""
        return self.generation.max_new_tokens or self.max_total_sequence_length


class PolicyConfig(ModelConfig, ParallelModelConfig):
    """A model that is trained."""

    # values that replace those of the model's config.json
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    train_global_batch_size: int = Field(default=512, gt=0)  # samples of one optimizer step
    train_micro_batch_size: int = Field(default=4, gt=0)  # samples of one forward and backward
    logprob_batch_size: int | None = Field(default=None, gt=0)  # None: train_micro_batch_size
    # tokens whose logits exist at once; None: all; auto: 1024, or more if logits of more take at most 64 MiB
    logprob_chunk_size: ChunkSize = "auto"
    sequence_packing: SequencePackingConfig = SequencePackingConfig.with_defaults()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig.with_defaults()
    router_replay: RouterReplayConfig = RouterReplayConfig.with_defaults()  # replay of experts' routes in training
    freeze_vision: bool = False  # train projector and decoder of a model that sees, not its vision tower
    max_grad_norm: float | None = Field(default=1.0, gt=0)  # None: not clipped
    # the policy leaves a CUDA device that engines share while they sample; auto: unless both fit by the memory plan
    offload: Literal["auto", "always", "never"] = "auto"
    optimizer: OptimizerConfig = OptimizerConfig.with_defaults()  # the optimizer, by dotted path
    scheduler: SchedulerStageConfig | list[SchedulerStageConfig] | None = None
    moe: MoEConfig = MoEConfig.with_defaults()  # routers of a mixture of experts, and the balance of its load

    @model_validator(mode="after")
    def _fit_rows(self) -> Self:
        longest, packing = self.max_total_sequence_length, self.sequence_packing
        limit = min(packing.train_mb_tokens or longest, packing.logprob_mb_tokens or longest)
        for name in BACKEND_SECTIONS.values():
            getattr(self, name).fit_rows(longest, limit)
        return self


class RolloutPolicyConfig(PolicyConfig, SampledModelConfig):
    """A model that is sampled, and trained on what becomes of it."""

    generation: Annotated[SerializeAsAny[GenerationConfig], ENGINES] = Field(default_factory=ENGINES.new)

    @property
    def engine_dtype(self) -> str:
        return self.generation.dtype(self.precision)


class EndpointLimitsConfig(Section):
    """Limits of the requests to a server."""

    max_concurrency: int = Field(default=64, gt=0)  # requests at once, over all replicas
    requests_per_minute: float | None = Field(default=None, gt=0)  # sent at most; None: no limit
    tokens_per_minute: float | None = Field(default=None, gt=0)  # 4 characters are one; usage corrects it
    request_timeout_s: Seconds = 60.0  # deadline of one attempt
    max_retries: int = Field(default=3, ge=0)  # retries after 429, 5xx or no answer; other 4xx are never retried
    retry_backoff_s: Delay = 0.5  # before the first; doubles


class ServedModelConfig(Section):
    """A server over HTTP; several URLs are replicas, and each request goes to the least busy one."""

    base_urls: list[str] = Field(min_length=1)  # roots, with or without /v1
    model: str  # its name on the server
    api_key_env: str | None = None  # the environment variable that holds the key
    limits: EndpointLimitsConfig = EndpointLimitsConfig.with_defaults()


class TeacherConfig(ParallelModelConfig):
    """A frozen model that scores tokens, on a backend and ranks of its own. NeMo-RL writes a whole policy section
    here."""

    BACKENDS: ClassVar[Kind] = TEACHER_BACKENDS

    dtensor_cfg: Annotated[SerializeAsAny[BackendConfig], FSDP2_TEACHER] = Field(default_factory=FSDP2_TEACHER.new)
    megatron_cfg: Annotated[SerializeAsAny[BackendConfig], MEGATRON_TEACHER] = Field(
        default_factory=MEGATRON_TEACHER.new
    )

    model_name: str  # a Hugging Face name or a directory; with `server` its tokenizer alone is loaded from there
    tokenizer: TokenizerConfig = TokenizerConfig.with_defaults()  # the tokenizer and its chat template
    # values that replace those of the model's config.json
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # precision of the forward pass
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the policy's
    logprob_batch_size: int = Field(default=4, gt=0)  # samples of one forward pass
    # tokens whose logits exist at once; None: all; auto: 1024, or more if logits of more take at most 64 MiB
    logprob_chunk_size: ChunkSize = "auto"
    sequence_packing: SequencePackingConfig = SequencePackingConfig.with_defaults()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig.with_defaults()
    colocated: ColocatedConfig = ColocatedConfig.with_defaults()  # share the policy's devices, in turns
    server: ServedModelConfig | None = None  # a vLLM server that is asked over HTTP, in place of a model of this run
