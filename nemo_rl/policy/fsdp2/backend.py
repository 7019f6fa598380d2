"""The entries of the FSDP2 backend: their sections and checks. Imports no torch."""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.layout import ExpertLayout
from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.config.moe import num_experts
from nemo_rl.config.policy import AUTO, BackendConfig, ParallelModelConfig, PolicyConfig
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")  # types with a plan of tensor parallelism
SEQUENCE_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # types with sequence parallelism
EXPERT_MODEL_TYPES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")  # types with expert parallelism
LENGTH_ROPES = ("dynamic", "longrope")  # frequencies of a whole row
COMPILED_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # by default: tests show that their outputs and gradients are equal
DIVIDED_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
KEPT_SHARE = 0.25  # share of a device for whole weights and gradients if keep_unsharded is auto
CHECK_ADAPTED_MODULES = factory_at("nemo_rl.policy.adapted_layers:check_modules")  # builds the model on the meta device


class DTensorConfig(BackendConfig):
    """FSDP2, and tensor parallelism by DTensor; the ranks that share the samples also share the weights."""

    GATHERS_ON_ALL_RANKS: ClassVar[bool] = True
    SPLITS_STATE: ClassVar[bool] = True
    SEES: ClassVar[bool] = True
    SHARES_PREFIXES: ClassVar[bool] = True
    REPLAYS_ROUTES: ClassVar[bool] = True

    backend: str = Field(default="fsdp2", exclude=True)
    enabled: bool = True  # has no effect: backend "auto" is FSDP2 unless megatron_cfg.enabled
    activation_checkpointing: bool = False  # compute activations again in the backward pass, which saves memory
    cpu_offload: bool = False  # keep weights, gradients and optimizer state in host memory
    # Gather weights and reduce gradients once per optimizer step, not once per micro-batch; auto: if whole weights
    # and gradients take at most a quarter of each device's memory.
    keep_unsharded: bool | Literal["auto"] = "auto"
    # Compile decoder layers by torch.compile; auto: on CUDA, without tensor parallelism, for models of type llama,
    # qwen2 and qwen3.
    compile: bool | Literal["auto"] = "auto"
    tensor_parallel_size: int = Field(default=1, gt=0)  # ranks that share every layer; divides the heads
    # Tensor-parallel ranks each hold a part of the tokens between attention and MLPs; false: each holds all.
    sequence_parallel: bool = False
    # Ranks that each compute a slice of a micro-batch's tokens, and exchange them for heads around attention; the token
    # limits of micro-batches are those of all slices together. auto: the limits are those of a rank, which has packs of
    # its own; a sample that exceeds them is shared by as many ranks as the longest sample needs.
    context_parallel_size: Annotated[int, Field(gt=0)] | Literal["auto"] = 1
    # Data- and context-parallel ranks that together hold the experts of each layer and exchange their tokens; 1:
    # experts are sharded and gathered like other weights.
    expert_parallel_size: int = Field(default=1, gt=0)
    _fitted_ranks: int = 1  # with `context_parallel_size: auto`

    @property
    def title(self) -> str:
        return "FSDP2"

    @property
    def num_tensor_parallel_ranks(self) -> int:
        return self.tensor_parallel_size

    @property
    def num_context_parallel_ranks(self) -> int:
        return self._fitted_ranks if self.context_parallel_size == AUTO else self.context_parallel_size

    @property
    def divides_only_long(self) -> bool:
        return self.context_parallel_size == AUTO

    def fit_rows(self, longest: int, limit: int) -> None:
        self._fitted_ranks = 2 ** math.ceil(math.log2(max(longest / limit, 1)))

    @property
    def splits_residual(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_size > 1

    def experts_on(self, data: int, *, key: str) -> ExpertLayout:
        size, context = self.expert_parallel_size, self.num_context_parallel_ranks
        if data * context % size:
            ranks = f"{data * context} data{' and context' if context > 1 else ''} parallel ranks"
            raise ConfigError(f"{key}.expert_parallel_size", size, f"must divide the {ranks}, which exchange tokens")
        return ExpertLayout(parallel=size, copies=data * context // size)

    def check_model(self, model: "PreTrainedConfig", *, key: str) -> None:
        check_tensor_parallel(self.tensor_parallel_size, model, key=key)
        check_context_parallel(self.num_context_parallel_ranks, model, tensor=self.tensor_parallel_size, key=key)
        if self.divides_only_long and num_experts(model) > 0:
            problem = f"the balance of experts (a model of type {model.model_type!r}) counts rows of all ranks alike"
            raise ConfigError(f"{key}.context_parallel_size", AUTO, f"{problem}; allowed: a number")
        check_expert_parallel(self.expert_parallel_size, model, key=key)
        check_sequence_parallel(self.splits_residual, model, key=key)


class TrainedDTensorConfig(DTensorConfig):
    """FSDP2 of a model that is trained, all weights or adapters alone."""

    ADAPTER_KEY: ClassVar[str] = "lora_cfg"
    HOLDS_POLICIES: ClassVar[bool] = True

    lora_cfg: LoraAdapterConfig = LoraAdapterConfig.with_defaults()
    # patterns of the full names of weights that are not trained, e.g. *.gate.weight, the routers of most models
    frozen_parameters: list[str] = Field(default_factory=list)

    @property
    def adapter_section(self) -> LoraAdapterConfig | None:
        return self.lora_cfg if self.lora_cfg.enabled else None

    def check_model(self, model: "PreTrainedConfig", *, key: str) -> None:
        super().check_model(model, key=key)
        if self.lora_cfg.enabled:
            CHECK_ADAPTED_MODULES(self.lora_cfg, model)


def check_tensor_parallel(size: int, model: "PreTrainedConfig", *, key: str = "policy.dtensor_cfg") -> None:
    """Raise ConfigError for a `tensor_parallel_size`, in the section `key`, that the model cannot be split by."""
    if size == 1:
        return
    key = f"{key}.tensor_parallel_size"
    if model.model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(key, size, f"no plan for models of type {model.model_type!r}; supported: {supported}")
    check_divides_widths(size, model, key=key)


def check_context_parallel(
    size: int, model: "PreTrainedConfig", *, tensor: int = 1, key: str = "policy.dtensor_cfg"
) -> None:
    """Raise ConfigError for a `context_parallel_size`, in the section `key`, that the model's attention does not allow.

    Of the heads that `tensor` ranks leave to each, a rank has an equal part. The model itself is probed later.
    """
    if size == 1:
        return
    key, text = f"{key}.context_parallel_size", model.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        problem = f"models of type {text.model_type!r} have layers of {', '.join(others)}, whose rows cannot be cut"
        raise ConfigError(key, size, f"{problem}; allowed: 1")
    if (scaling := _rope_type(text)) in LENGTH_ROPES:
        problem = f"the model's rotary embedding ({scaling}) follows the length of a row, of which a rank has a slice"
        raise ConfigError(key, size, f"{problem}; allowed: 1")
    heads = getattr(text, "num_attention_heads", 0) // tensor
    allowed = [n for n in range(1, heads + 1) if heads % n == 0]
    if size not in allowed:
        shown = f"num_attention_heads {heads}" + (" of a rank" if tensor > 1 else "")
        problem = f"ranks exchange slices for heads, and the model has {shown}"
        raise ConfigError(key, size, f"{problem}; allowed: {', '.join(map(str, allowed))}")


def _rope_type(text: Any) -> str | None:
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # one for each type of layer
    kinds = [one.get("rope_type") for one in (parameters, *nested)]
    return next((kind for kind in kinds if kind in LENGTH_ROPES), kinds[0])


def check_expert_parallel(size: int, model: "PreTrainedConfig", *, key: str = "policy.dtensor_cfg") -> None:
    """Raise ConfigError for an `expert_parallel_size`, in the section `key`, that the model's experts do not allow."""
    if size == 1:
        return
    key, text = f"{key}.expert_parallel_size", model.get_text_config()
    if text.model_type not in EXPERT_MODEL_TYPES:
        supported = ", ".join(EXPERT_MODEL_TYPES)
        raise ConfigError(key, size, f"not for models of type {text.model_type!r}; supported: {supported}; else 1")
    number = num_experts(model)
    if number % size:
        allowed = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        raise ConfigError(key, size, f"must divide the model's {number} experts; allowed: {allowed}")


def check_sequence_parallel(is_on: bool, model: "PreTrainedConfig", *, key: str = "policy.dtensor_cfg") -> None:
    """Raise ConfigError for `sequence_parallel`, in the section `key`, of a model without a plan for it."""
    if is_on and model.model_type not in SEQUENCE_MODEL_TYPES:
        problem = f"no plan for models of type {model.model_type!r}; supported: {', '.join(SEQUENCE_MODEL_TYPES)}"
        raise ConfigError(f"{key}.sequence_parallel", True, f"{problem}; else false")


def check_divides_widths(size: int, model: "PreTrainedConfig", *, key: str) -> None:
    """Raise ConfigError for a number of tensor-parallel ranks that does not divide the model's heads and MLP."""
    widths = {name: getattr(model, name) for name in DIVIDED_WIDTHS}
    allowed = [n for n in range(1, min(widths.values()) + 1) if all(width % n == 0 for width in widths.values())]
    if size not in allowed:
        shown = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigError(key, size, f"must divide the model's {shown}; allowed: {', '.join(map(str, allowed))}")


def check_compile(key: str, section: DTensorConfig, model: ParallelModelConfig) -> None:
    """Raise ConfigError for compiled layers that several ranks compute together, if this section is the model's."""
    if section.compile is True and section.expert_parallel_size > 1 and model.parallelism is section:
        problem = f"{key}.expert_parallel_size is {section.expert_parallel_size}: an exchange of tokens is not compiled"
        raise ConfigError(f"{key}.compile", True, f"{problem}; allowed: false, auto")
    if section.compile is True and section.tensor_parallel_size > 1 and model.parallelism is section:
        problem = (
            f"{key}.tensor_parallel_size is {section.tensor_parallel_size}: torch 2.13 compiles such layers for a "
        )
        raise ConfigError(f"{key}.compile", True, f"{problem}single length only; allowed: false, auto")


def check_training(key: str, section: TrainedDTensorConfig, policy: PolicyConfig) -> None:
    """Raise ConfigError for options that exclude each other."""
    check_compile(key, section, policy)
    check_lora(key, section, policy)


def check_lora(key: str, section: TrainedDTensorConfig, policy: PolicyConfig) -> None:
    """Raise ConfigError for options that adapters cannot be combined with."""
    lora, lora_key = section.lora_cfg, f"{key}.lora_cfg"
    if not lora.enabled:
        return
    if policy.parallelism is not section:
        is_auto = policy.backend == AUTO
        other = f"policy.{policy.backend_key}.enabled is true" if is_auto else f"policy.backend is {policy.backend}"
        problem = f"{other}; allowed: one of the two, or Megatron's own adapters (policy.megatron_cfg.peft)"
        raise ConfigError(f"{lora_key}.enabled", True, problem)
    if section.splits_residual:
        problem = f"{lora_key}.enabled is true: adapters take all tokens of a layer; allowed: false"
        raise ConfigError(f"{key}.sequence_parallel", True, problem)
    check_patterns(lora, key=lora_key)
    check_biases_stay(policy)


def check_biases_stay(policy: PolicyConfig) -> None:
    """Raise ConfigError for adapters whose base model would change: biases of routers are in no adapter."""
    rate = policy.moe.bias_update_rate
    if policy.parallelism.adapter_section is not None and rate:
        problem = "adapters are trained: their files and the reference would lack the moved biases; allowed: 0"
        raise ConfigError("policy.moe.bias_update_rate", rate, problem)


def check_patterns(lora: LoraAdapterConfig, *, key: str) -> None:
    """Raise ConfigError for two ways to name the adapted layers; `key` is that of `lora`."""
    if lora.enabled and lora.match_all_linear and lora.target_modules:
        problem = f"{key}.match_all_linear is true; allowed: one of the two"
        raise ConfigError(f"{key}.target_modules", lora.target_modules, problem)


FSDP2: Entry[Any] = Entry(
    TrainedDTensorConfig, make=factory_at("nemo_rl.policy.fsdp2.worker:make_policy_worker"), check=check_training
)
FSDP2_TEACHER: Entry[Any] = Entry(
    DTensorConfig, make=factory_at("nemo_rl.policy.fsdp2.worker:make_teacher_worker"), check=check_compile
)
