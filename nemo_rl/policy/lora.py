"""LoRA by peft: the adapters in a model, its weights with them merged, and the folder that they are saved in.

`adapter/` is peft's own format (adapter_config.json, adapter_model.safetensors), which PeftModel.from_pretrained loads.
peft itself is imported where a model gets adapters, since that takes seconds.
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

from nemo_rl.config.policy import KEY, LoraAdapterConfig
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.sharding import whole

DIRECTORY = "adapter"  # of a checkpoint
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."  # in the names of peft's layers
_PREFIX = "base_model.model."  # of names in peft's files


class Adapters:
    """The adapters that were put into a model, whose own weights are frozen then; W + scale B A, B is 0 at first.

    Args:
        model: changed in place; its linear layers become peft's.
        base: what adapter_config.json says the adapter belongs to.
        seed: of the first values of A, the same on every rank.

    Raises:
        ConfigError: names of layers that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, section: LoraAdapterConfig, *, base: str, seed: int) -> None:
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
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers:
            _initialize_lora_a(layer.lora_A["default"].weight, section.lora_A_init, generator)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is the one that training began with."""
        for layer in self._layers:
            layer.enable_adapters(False)
            for part in (layer.lora_A, layer.lora_B):
                part.requires_grad_(True)  # peft has frozen it, and FSDP2 looks at it when the model first runs
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the adapters under the names of peft's files, whole; all ranks iterate together."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if name.endswith((_A, _B)):
                yield _PREFIX + name.replace(".default.", "."), whole(tensor.detach())

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write what `tensors` gave."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), directory / WEIGHTS_FILE)
        self._config.save_pretrained(str(directory))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError: no adapter there, or one of other layers or sizes."""
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
    """A module over a model with adapters, called as if there were none."""

    def __init__(self, module: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self._module = module
        self._adapters = adapters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._adapters.disabled():
            return self._module(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class LazyMergedWeight:
    """W + scale B A, computed when it is asked for, so that one such tensor exists at a time and W stays as it is."""

    base: torch.Tensor  # W [out, in]
    a: torch.Tensor  # [dim, in]
    b: torch.Tensor  # [out, dim]
    scale: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def whole(self) -> torch.Tensor:
        """In the type of W; all ranks ask together."""
        return torch.addmm(whole(self.base), whole(self.b), whole(self.a), alpha=self.scale)


def merge_adapter_weights(
    tensors: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor | LazyMergedWeight]:
    """Return the state dict under the plain model's names, adapted weights as `LazyMergedWeight`."""
    merged: dict[str, torch.Tensor | LazyMergedWeight] = {}
    for name, tensor in tensors.items():
        layer, is_weight = name.removesuffix(f"{_BASE}weight"), name.endswith(f"{_BASE}weight")
        if is_weight:
            merged[f"{layer}.weight"] = LazyMergedWeight(tensor, tensors[layer + _A], tensors[layer + _B], scale)
        elif not name.endswith((_A, _B)):
            merged[name.replace(_BASE, ".")] = tensor
    return merged


def check_modules(section: LoraAdapterConfig, model_config: PreTrainedConfig) -> None:
    """Raise ConfigError for names of layers that a model of this configuration does not have; needs no weights."""
    if section.enabled:
        with torch.device("meta"):
            select_adapted_modules(AutoModelForCausalLM.from_config(model_config), section)


def select_adapted_modules(model: PreTrainedModel, section: LoraAdapterConfig) -> list[str]:
    """Whole names of the layers that get an adapter, in the model's order.

    Raises:
        ConfigError: a name that no layer has, or nothing left to adapt.
    """
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    allowed = [name for name, module in linear.items() if module is not output]
    _check_patterns(f"{KEY}.target_modules", section.target_modules, allowed)
    _check_patterns(f"{KEY}.exclude_modules", section.exclude_modules, list(linear))
    names = [
        name
        for name in allowed
        if (not section.target_modules or _matches(name, section.target_modules))
        and not _matches(name, section.exclude_modules)
    ]
    if not names:
        kind = model.config.model_type
        raise ConfigError(f"{KEY}.enabled", True, f"no linear layer of this {kind!r} model is left to adapt")
    return names


def _check_patterns(key: str, patterns: list[str], names: list[str]) -> None:
    known = dict.fromkeys(name.rpartition(".")[2] for name in names)
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            raise ConfigError(key, pattern, f"no linear layer of that name to adapt; known: {', '.join(known)}")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(f".{name}".endswith(f".{pattern}") or fnmatchcase(name, pattern) for pattern in patterns)


def _short_names(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names where they mean the same layers, else the names."""
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    meant = [name for name, _ in model.named_modules() if _matches(name, last_parts)]
    return last_parts if meant == names else names


@torch.no_grad()
def _initialize_lora_a(a: torch.Tensor, how: str, generator: torch.Generator) -> None:
    if how == "xavier":
        nn.init.xavier_normal_(a, generator=generator)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
