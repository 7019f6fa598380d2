"""LoRA by peft: the adapters in a model, merging them into its weights, and the directory they are saved in.

`adapter/` is peft's own format (adapter_config.json, adapter_model.safetensors), which PeftModel.from_pretrained loads.
peft is imported only when a model gets adapters, since that takes seconds.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.fsdp2.backend import LORA_KEY, LoraAdapterConfig
from nemo_rl.policy.fsdp2.experts import find_experts
from nemo_rl.policy.fsdp2.sharding import BASE_LAYER
from nemo_rl.policy.fsdp2.shards import gather_full_tensor, own_part
from nemo_rl.token_columns import ROUTED_EXPERTS

DIRECTORY = "adapter"  # subdirectory of a checkpoint
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
_PREFIX = "base_model.model."  # begins the names in peft's files


class Adapters:
    """The adapters of a model, whose own weights are frozen: W + scale B A, where B is initially 0.

    Args:
        model: changed in place; its linear layers become peft's. `initialize` gives the adapters their values.
        base: the base model that adapter_config.json names.

    Raises:
        ConfigError: names of layers that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, section: LoraAdapterConfig, *, base: str) -> None:
        from peft import LoraConfig, TaskType, inject_adapter_in_model

        names = select_adapted_modules(model, section)
        self._model = model
        self._config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            base_model_name_or_path=base,
            target_modules=_short_names(model, names),
            r=section.dim,
            lora_alpha=section.alpha,
        )
        inject_adapter_in_model(self._config, model)
        self._config.inference_mode = True  # as peft's own files say
        self._layers: list[Any] = [model.get_submodule(name) for name in names]
        self.scale = section.alpha / section.dim
        self._initialization = section.lora_A_init

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set A to random values and B to 0: on every rank its shards of the same values."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole = torch.empty(a.shape)
            _initialize_lora_a(whole, self._initialization, generator)
            index, local = own_part(a)
            local.copy_(whole[index])
            own_part(b)[1].zero_()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model is the initial one."""
        for layer in self._layers:
            layer.enable_adapters(False)
            for part in (layer.lora_A, layer.lora_B):
                part.requires_grad_(True)  # peft froze it, and FSDP2 reads it when the model first runs
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole tensors under the names of peft's files; all ranks iterate together."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name.endswith((_A, _B)):
                yield _PREFIX + name.replace(".default.", "."), gather_full_tensor(tensor.detach())

    def scaled_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `tensors` for an engine that adds B A as they are: B is multiplied by the scale."""
        for name, tensor in self.tensors():
            yield name, (tensor * self.scale if name.endswith(_B.replace(".default", "")) else tensor).to(dtype)

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write what `tensors` yielded, in peft's format."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), directory / WEIGHTS_FILE)
        self._config.save_pretrained(str(directory))

    def load(self, directory: Path) -> None:
        """Load an adapter; raises CheckpointError for none there, or one of other layers or sizes."""
        try:
            saved = load_file(directory / WEIGHTS_FILE)
            config = json.loads((directory / CONFIG_FILE).read_text())
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{directory} holds no adapter: {error}") from error
        own = {n: t.shape for n, t in self._model.state_dict(keep_vars=True).items() if n.endswith((_A, _B))}
        given: dict[str, Any] = {
            n.removeprefix(_PREFIX).replace(".weight", ".default.weight"): t for n, t in saved.items()
        }
        if own != {n: t.shape for n, t in given.items()}:
            raise CheckpointError(f"{directory} holds the adapter of other layers or of another dim")
        if config.get("lora_alpha") != self._config.lora_alpha:
            raise CheckpointError(
                f"{directory} holds an adapter of alpha {config.get('lora_alpha')}, not {self._config.lora_alpha}"
            )
        set_model_state_dict(self._model, given, options=StateDictOptions(full_state_dict=True, strict=False))


class AdaptersDisabled(nn.Module):
    """A module over a model whose adapters are disabled in each call, and which replays no routes: it is another
    policy. Its distribution is of the engine's sets all the same."""

    def __init__(self, module: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self._module = module
        self._adapters = adapters

    def forward(self, *args: Any, columns: Mapping[str, torch.Tensor] | None = None, **kwargs: Any) -> Any:
        kept = {name: column for name, column in (columns or {}).items() if name != ROUTED_EXPERTS}
        with self._adapters.disabled():
            return self._module(*args, columns=kept or None, **kwargs)


@dataclass(frozen=True, slots=True)
class LazyMergedWeight:
    """W + scale B A, computed on demand, so that one such tensor exists at a time and W is unchanged."""

    base: torch.Tensor  # W [out, in]
    a: torch.Tensor  # [dim, in]
    b: torch.Tensor  # [out, dim]
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def materialize(self) -> torch.Tensor:
        """Return the whole merged tensor in the dtype of the adapters; all ranks call it together."""
        base, a, b = (gather_full_tensor(tensor).to(self.a.dtype) for tensor in (self.base, self.a, self.b))
        return torch.addmm(base, b, a, alpha=self.scale)


def merge_adapter_weights(
    tensors: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor | LazyMergedWeight]:
    """Return the state dict under the plain model's names, with adapted weights as `LazyMergedWeight`."""
    merged: dict[str, torch.Tensor | LazyMergedWeight] = {}
    for name, tensor in tensors.items():
        layer, is_weight = name.removesuffix(f"{BASE_LAYER}weight"), name.endswith(f"{BASE_LAYER}weight")
        if is_weight:
            merged[f"{layer}.weight"] = LazyMergedWeight(tensor, tensors[layer + _A], tensors[layer + _B], scale)
        elif not name.endswith((_A, _B)):
            merged[name.replace(BASE_LAYER, ".")] = tensor
    return merged


def check_modules(section: LoraAdapterConfig, model_config: PreTrainedConfig) -> None:
    """Raise ConfigError for names of layers that a model of this configuration does not have; needs no weights."""
    if section.enabled:
        with torch.device("meta"):
            select_adapted_modules(AutoModelForCausalLM.from_config(model_config), section)


def select_adapted_modules(model: PreTrainedModel, section: LoraAdapterConfig) -> list[str]:
    """Return the full names of the layers that get an adapter, in the model's order.

    Raises:
        ConfigError: a name that no layer has, or nothing left to adapt.
    """
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    allowed = [name for name, module in linear.items() if module is not output]
    has_experts = next(find_experts(model), None) is not None
    _check_patterns(f"{LORA_KEY}.target_modules", section.target_modules, allowed, has_experts=has_experts)
    _check_patterns(f"{LORA_KEY}.exclude_modules", section.exclude_modules, list(linear), has_experts=has_experts)
    names = [
        name
        for name in allowed
        if (not section.target_modules or _matches(name, section.target_modules))
        and not _matches(name, section.exclude_modules)
    ]
    if not names:
        kind = model.config.model_type
        raise ConfigError(f"{LORA_KEY}.enabled", True, f"no linear layer of this {kind!r} model is left to adapt")
    return names


def _check_patterns(key: str, patterns: list[str], names: list[str], *, has_experts: bool) -> None:
    known = dict.fromkeys(name.rpartition(".")[2] for name in names)
    experts = " (experts are stacked weights, and have no adapters)" if has_experts else ""
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            problem = f"no linear layer of that name to adapt{experts}; known: {', '.join(known)}"
            raise ConfigError(key, pattern, problem)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(f".{name}".endswith(f".{pattern}") or fnmatchcase(name, pattern) for pattern in patterns)


def _short_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return the last parts of the names if they match the same layers, else the names."""
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    meant = [name for name, _ in model.named_modules() if _matches(name, last_parts)]
    return last_parts if meant == names else names


@torch.no_grad()
def _initialize_lora_a(a: torch.Tensor, how: str, generator: torch.Generator) -> None:
    if how == "xavier":
        nn.init.xavier_normal_(a, generator=generator)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
