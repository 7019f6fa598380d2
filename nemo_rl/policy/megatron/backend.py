"""The entries of the Megatron backend: their sections and checks. Imports neither torch nor Megatron."""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, Section, factory_at
from nemo_rl.config.layout import ExpertLayout
from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.config.policy import BackendConfig, PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.fsdp2.backend import (
    CHECK_ADAPTED_MODULES,
    check_biases_stay,
    check_context_parallel,
    check_divides_widths,
    check_patterns,
)
from nemo_rl.policy.megatron.mixtures import MIXTURE_TYPES, REFUSED_MIXTURES, check_mixture, read_mixture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", *MIXTURE_TYPES)
SUPPORTED_OPTIMIZERS = ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD")
PEFT_KEY = "policy.megatron_cfg.peft"
MATRICES = {  # matrices of Megatron's linear layers, under Hugging Face's names
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
SUPPORTED_ROTARY_EMBEDDINGS = ("default", "linear", "llama3")


class MegatronOptimizerConfig(Section):
    """NeMo-RL's replacement of `policy.optimizer`. Biases and norms are not decayed, as in Megatron-LM."""

    optimizer: Literal["adam", "sgd"] = "adam"  # adam: with decoupled weight decay, as AdamW
    lr: float = Field(default=5e-6, gt=0)  # the learning rate, after the warm-up
    min_lr: float = Field(default=0.0, ge=0)  # learning rate at the end of a schedule
    weight_decay: float = Field(default=0.01, ge=0)  # times the learning rate, of each step
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)  # decay of the gradient's running mean
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)  # decay of the running mean of its square
    adam_eps: float = Field(default=1e-8, gt=0)  # added to the denominator
    sgd_momentum: float = Field(default=0.9, ge=0)  # momentum of optimizer: sgd
    use_distributed_optimizer: bool = False  # as in distributed_data_parallel_config; either sets it


class MegatronSchedulerConfig(Section):
    """The learning rate over training steps: a linear warm-up, then a decay to `optimizer.min_lr`."""

    # how the learning rate falls after the warm-up
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: int | None = Field(default=None, gt=0)  # the step at which the decay ends, warm-up included
    lr_warmup_iters: int = Field(default=0, ge=0)  # steps of the warm-up
    lr_warmup_init: float = Field(default=0.0, ge=0)  # the learning rate at its start


class MegatronDDPConfig(Section):
    """Options of the reduction of gradients over data-parallel ranks."""

    grad_reduce_in_fp32: bool = True  # sum gradients over ranks in float32; false: in the precision
    # overlap the reduction with the backward pass; auto: on several data-parallel ranks of GPUs
    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    # Each data-parallel rank steps a part of the weights and holds that part of float32 weights and optimizer state;
    # auto: on several data-parallel ranks of GPUs.
    use_distributed_optimizer: bool | Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """Options of how data-parallel ranks reduce gradients and step."""

    is_overlapped: bool
    divides_optimizer: bool


class MegatronConfig(BackendConfig):
    """Megatron-core; its ranks are tensor x pipeline x data parallel.

    For the experts of a mixture the ranks of a stage are (expert x expert tensor x expert data parallel) instead.
    """

    TENSOR_PARALLEL_KEY: ClassVar[str] = "tensor_model_parallel_size"
    PIPELINE_PARALLEL_KEY: ClassVar[str | None] = "pipeline_model_parallel_size"
    NEEDS_OWN_PROCESS: ClassVar[bool] = True  # its process groups are those of the whole process
    GATHERS_ON_ALL_RANKS: ClassVar[bool] = True  # each copy of the model by itself
    REPLAYS_ROUTES: ClassVar[bool] = True

    backend: str = Field(default="megatron", exclude=True)
    tensor_model_parallel_size: int = Field(default=1, gt=0)  # ranks that share every layer
    pipeline_model_parallel_size: int = Field(default=1, gt=0)  # stages, each with some of the layers
    # Ranks that each compute a slice of a micro-batch's tokens, and exchange them for heads around attention; the token
    # limits of micro-batches are those of all slices together.
    context_parallel_size: int = Field(default=1, gt=0)
    # Tensor-parallel ranks each hold a part of the tokens between attention and MLPs; without effect on mixtures of
    # experts. false: each holds all.
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, gt=0)  # None: as many as in the others
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, gt=0)  # None: as many as in the others
    pipeline_dtype: Literal["float32", "bfloat16"] | None = None  # dtype between stages; None: the precision
    expert_model_parallel_size: int = Field(default=1, gt=0)  # ranks that divide the experts of a layer among them
    expert_tensor_parallel_size: int = Field(default=1, gt=0)  # ranks that share each expert
    # precision of the routers' scores; None: that of the layers, of sigmoid scores fp32
    moe_router_dtype: Literal["fp32", "fp64"] | None = None

    @property
    def title(self) -> str:
        return "Megatron"

    @property
    def num_tensor_parallel_ranks(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def num_context_parallel_ranks(self) -> int:
        return self.context_parallel_size

    @property
    def splits_residual(self) -> bool:
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def num_pipeline_stages(self) -> int:
        return self.pipeline_model_parallel_size

    def experts_on(self, data: int, *, key: str) -> ExpertLayout:
        parallel, tensor = self.expert_model_parallel_size, self.expert_tensor_parallel_size
        ranks = data * self.context_parallel_size * self.tensor_model_parallel_size
        if ranks % (parallel * tensor):
            sizes = f"with {key}.expert_tensor_parallel_size = {tensor}, " if tensor > 1 else ""
            problem = f"{sizes}{parallel * tensor} ranks hold a layer's experts; that must divide the {ranks} ranks"
            size_key = f"{key}.expert_model_parallel_size"
            raise ConfigError(size_key, parallel, f"{problem} of a stage (data x tensor parallel)")
        return ExpertLayout(parallel=parallel, tensor=tensor, copies=ranks // (parallel * tensor))

    def check_model(self, model: "PreTrainedConfig", *, key: str) -> None:
        check_model(self, model, key=key)


class MegatronLoraConfig(LoraAdapterConfig):
    """LoRA on Megatron; layers may also have Megatron's names, each of which means all of the matrices in it."""

    def in_model_names(self) -> LoraAdapterConfig:
        """Return the section with Hugging Face's names in place of Megatron's."""
        patterns = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        return self.model_copy(update={key: list(to_model_names(own)) for key, own in patterns.items()})


def to_model_names(patterns: Iterable[str]) -> Iterator[str]:
    """Yield Hugging Face's names in place of Megatron's.

    Example: "*.layers.0.*.linear_proj" is "*.layers.0.*.o_proj".
    """
    for pattern in patterns:
        start, dot, last = pattern.rpartition(".")
        yield from (f"{start}{dot}{name}" for name in MATRICES.get(last, (last,)))


class TrainedMegatronConfig(MegatronConfig):
    """Megatron-core for a model that is trained, all weights or adapters alone."""

    ADAPTER_KEY: ClassVar[str] = "peft"

    peft: MegatronLoraConfig = MegatronLoraConfig.with_defaults()
    activation_checkpointing: bool = False  # compute activations again in the backward pass, which saves memory
    optimizer: MegatronOptimizerConfig | None = None  # None: policy.optimizer
    scheduler: MegatronSchedulerConfig | None = None  # None: policy.scheduler
    distributed_data_parallel_config: MegatronDDPConfig = MegatronDDPConfig.with_defaults()

    @property
    def adapter_section(self) -> LoraAdapterConfig | None:
        return self.peft if self.peft.enabled else None

    def check_model(self, model: "PreTrainedConfig", *, key: str) -> None:
        super().check_model(model, key=key)
        if self.peft.enabled:
            CHECK_ADAPTED_MODULES(self.peft.in_model_names(), model, key=PEFT_KEY)

    def reduction_on(self, device_type: str, data_parallel_size: int) -> GradientReduction:
        """Return how the ranks of a layout reduce gradients."""
        ddp = self.distributed_data_parallel_config
        by_default = device_type == "cuda" and data_parallel_size > 1
        is_set_by_optimizer = self.optimizer is not None and self.optimizer.use_distributed_optimizer
        divides = by_default if ddp.use_distributed_optimizer == "auto" else ddp.use_distributed_optimizer
        overlaps = by_default if ddp.overlap_grad_reduce == "auto" else ddp.overlap_grad_reduce
        return GradientReduction(is_overlapped=overlaps, divides_optimizer=divides or is_set_by_optimizer)


def check_training(key: str, section: TrainedMegatronConfig, policy: PolicyConfig) -> None:
    """Raise ConfigError for an optimizer or schedule that Megatron's ranks cannot use, if they train the policy."""
    if policy.parallelism is not section:
        return
    check_biases_stay(policy)
    if section.optimizer is None and policy.optimizer.name not in SUPPORTED_OPTIMIZERS:
        raise ConfigError(
            "policy.optimizer.name",
            policy.optimizer.name,
            "on Megatron an optimizer sees shards of weights, so it must treat each entry by itself; allowed: "
            + ", ".join(SUPPORTED_OPTIMIZERS),
        )
    if section.scheduler is not None and section.optimizer is None and not policy.optimizer.kwargs.get("lr"):
        problem = f"{key}.scheduler starts from it; allowed: above 0"
        raise ConfigError("policy.optimizer.kwargs.lr", policy.optimizer.kwargs.get("lr"), problem)
    _check_scheduler(section, key)
    check_patterns(section.peft, key=f"{key}.peft")


def check_model(section: MegatronConfig, model: "PreTrainedConfig", *, key: str) -> None:
    """Raise ConfigError for a model that Megatron cannot compute; `key` is that of `section`, for errors."""
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError(f"{key}.enabled", True, "megatron-core is not installed (uv sync --extra megatron)")
    _check_architecture(model, key)
    _check_experts(section, model, key)
    _check_tensor_parallel(section.tensor_model_parallel_size, model, f"{key}.tensor_model_parallel_size")
    check_context_parallel(section.context_parallel_size, model, tensor=section.tensor_model_parallel_size, key=key)
    _check_stages(section, model.num_hidden_layers, key)


def _check_scheduler(section: TrainedMegatronConfig, key: str) -> None:
    schedule = section.scheduler
    if schedule is None or schedule.lr_decay_style == "constant":
        return
    if schedule.lr_decay_iters is None or schedule.lr_decay_iters <= schedule.lr_warmup_iters:
        raise ConfigError(
            f"{key}.scheduler.lr_decay_iters",
            schedule.lr_decay_iters,
            f"a {schedule.lr_decay_style} decay ends after the warm-up; allowed: above lr_warmup_iters, "
            f"{schedule.lr_warmup_iters}",
        )


def _check_experts(section: MegatronConfig, model: "PreTrainedConfig", key: str) -> None:
    """Require sizes of expert parallelism that divide the experts and their widths."""
    expert, tensor = section.expert_model_parallel_size, section.expert_tensor_parallel_size
    sizes = {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": tensor}
    mixture = read_mixture(model)
    if mixture is None:
        for name, size in sizes.items():
            if size > 1:
                raise ConfigError(
                    f"{key}.{name}", size, f"a model of type {model.model_type!r} has no experts; allowed: 1"
                )
        return
    check_mixture(mixture, model, key=key)
    if mixture.num_experts % expert:
        problem = f"must divide the model's {mixture.num_experts} experts"
        raise ConfigError(f"{key}.expert_model_parallel_size", expert, problem)
    if mixture.width % tensor:
        problem = f"must divide the width of the model's experts, {mixture.width}"
        raise ConfigError(f"{key}.expert_tensor_parallel_size", tensor, problem)
    if mixture.shared_width is not None and mixture.shared_width % section.tensor_model_parallel_size:
        problem = f"must divide the width of the model's shared expert, {mixture.shared_width}"
        raise ConfigError(f"{key}.tensor_model_parallel_size", section.tensor_model_parallel_size, problem)


def _check_architecture(model: "PreTrainedConfig", key: str) -> None:
    kind = model.model_type
    if kind not in SUPPORTED_MODEL_TYPES:
        reason = f": {REFUSED_MIXTURES[kind]}" if kind in REFUSED_MIXTURES else ""
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        problem = f"no weights are mapped for type {kind!r}{reason}; supported: {supported}"
        raise ConfigError(f"{key}.enabled", True, problem)
    rotary = (getattr(model, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in SUPPORTED_ROTARY_EMBEDDINGS:
        allowed = ", ".join(SUPPORTED_ROTARY_EMBEDDINGS)
        raise ConfigError(f"{key}.enabled", True, f"no rotary embedding of type {rotary!r}; supported: {allowed}")
    unsupported: dict[str, Any] = {
        "mlp_bias": getattr(model, "mlp_bias", False),
        "layer_types": "sliding_attention" in (getattr(model, "layer_types", None) or ()),
        "hidden_act": model.hidden_act != "silu",
    }
    for name, is_set in unsupported.items():
        if is_set:
            problem = f"the model's {name} is {getattr(model, name)!r}, which is not mapped to Megatron"
            raise ConfigError(f"{key}.enabled", True, problem)


def _check_tensor_parallel(size: int, model: "PreTrainedConfig", key: str) -> None:
    check_divides_widths(size, model, key=key)
    rows = -(-model.vocab_size // size)
    if rows * (size - 1) >= model.vocab_size:
        raise ConfigError(key, size, f"leaves the last rank no token of the model's vocab_size {model.vocab_size}")


def _check_stages(section: MegatronConfig, num_layers: int, key: str) -> None:
    """Require the same number of layers in each stage, except in the first and last if configured."""
    size, size_key = section.pipeline_model_parallel_size, f"{key}.pipeline_model_parallel_size"
    ends = {
        "num_layers_in_first_pipeline_stage": section.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": section.num_layers_in_last_pipeline_stage,
    }
    given = {name: number for name, number in ends.items() if number is not None}
    for name, number in given.items():
        if size == 1:
            raise ConfigError(f"{key}.{name}", number, f"there is one stage; {size_key} is 1")
    left, stages = num_layers - sum(given.values()), size - len(given)
    if stages == 0 and left == 0:
        return
    if stages <= 0 or left < stages or left % stages:
        shown = "".join(f", {number} of them in {name}" for name, number in given.items())
        raise ConfigError(
            size_key,
            size,
            f"the model's {num_layers} layers{shown}, must fall into stages of the same number"
            if shown
            else f"must divide the model's {num_layers} layers, or set {key}.num_layers_in_first_pipeline_stage",
        )


MEGATRON: Entry[Any] = Entry(
    TrainedMegatronConfig, make=factory_at("nemo_rl.policy.megatron.start:make_policy_worker"), check=check_training
)
MEGATRON_TEACHER: Entry[Any] = Entry(
    MegatronConfig, make=factory_at("nemo_rl.policy.megatron.start:make_teacher_worker")
)
