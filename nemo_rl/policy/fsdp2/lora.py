"""LoRA by peft: the adapters in a model, merging them into its weights, and the directory they are saved in.

`adapter/` is peft's own format (adapter_files.py), which PeftModel.from_pretrained loads.
peft is imported only when a model gets adapters, since that takes seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

from nemo_rl.errors import PolicyError
from nemo_rl.policy.adapted_layers import initial_values, make_peft_config, select_adapted_modules
from nemo_rl.policy.adapter_files import (
    MODEL_A,
    MODEL_B,
    PREFIX,
    A,
    B,
    read_matching_adapter,
    save_adapter,
    to_file_name,
)
from nemo_rl.policy.fsdp2.backend import LoraAdapterConfig
from nemo_rl.policy.fsdp2.sharding import BASE_LAYER
from nemo_rl.policy.fsdp2.shards import gather_full_tensor, own_part, with_own_part
from nemo_rl.token_columns import ROUTED_EXPERTS


class Adapters:
    """The adapters of a model, whose own weights are frozen: W + scale B A, where B is initially 0.

    Args:
        model: changed in place; its linear layers become peft's. `initialize` gives the adapters their values.
        base: the base model that adapter_config.json names.

    Raises:
        ConfigError: names of layers that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, section: LoraAdapterConfig, *, base: str) -> None:
        from peft import inject_adapter_in_model

        names = select_adapted_modules(model, section)
        self._model = model
        self._config = make_peft_config(model, names, section, base=base)
        inject_adapter_in_model(self._config, model)
        self._config.inference_mode = True  # as peft's own files say
        self._layers: list[Any] = [model.get_submodule(name) for name in names]
        self._linears: dict[str, Any] = {  # each A and B by its name in peft's files
            f"{PREFIX}{name}{suffix}": part["default"]
            for name, layer in zip(names, self._layers, strict=True)
            for suffix, part in ((A, layer.lora_A), (B, layer.lora_B))
        }
        self.scale = section.alpha / section.dim
        self._initialization = section.lora_A_init
        self.save_merged = section.save_merged

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set A to random values and B to 0: on every rank its shards of the same values."""
        parts = [(layer.lora_A["default"].weight, layer.lora_B["default"].weight) for layer in self._layers]
        drawn = initial_values((a.shape for a, _ in parts), self._initialization, seed)
        for (a, b), whole in zip(parts, drawn, strict=True):
            index, local = own_part(a)
            local.copy_(whole[index])
            own_part(b)[1].zero_()

    def parts(self) -> list[torch.Tensor]:
        """Return the memory of this rank's shards of all A and B."""
        return [own_part(linear.weight)[1] for linear in self._linears.values()]

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

    def tensors(self, parts: Sequence[torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole tensors under the names of peft's files; all ranks iterate together.

        With `parts` they are those of other values: a rank's shards in the order of `parts()`.
        """
        for index, (name, linear) in enumerate(self._linears.items()):
            weight = linear.weight.detach()
            yield name, gather_full_tensor(weight if parts is None else with_own_part(weight, parts[index]))

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write what `tensors` yielded, in peft's format."""
        save_adapter(tensors, self._config, directory)

    def load(self, directory: Path) -> None:
        """Load an adapter; raises CheckpointError for none there, or one of other layers or sizes."""
        own = {to_file_name(n): n for n in self._model.state_dict(keep_vars=True) if n.endswith((MODEL_A, MODEL_B))}
        shapes = {name: self._model.get_parameter(own[name]).shape for name in own}
        found = read_matching_adapter(directory, shapes, self._config.lora_alpha)
        given: dict[str, Any] = {own[name]: tensor for name, tensor in found.items()}
        set_model_state_dict(self._model, given, options=StateDictOptions(full_state_dict=True, strict=False))


class AdapterSets:
    """The adapters of several policies on one base. The model holds one set of values at a time; the others are beside
    it.

    All have the same parameters, so sharding, compiled layers and recomputation know of one adapter alone. At first the
    sets are equal: each has the values that the model has when this is made.
    """

    def __init__(self, adapters: Adapters, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.selected = self.names[0]
        self._adapters = adapters
        values = adapters.parts()
        self._beside = {name: [part.clone() for part in values] for name in self.names[1:]}

    @torch.no_grad()
    def select(self, name: str) -> None:
        """Exchange the model's values for those of a policy; raises PolicyError for an unknown name."""
        if name == self.selected:
            return
        if name not in self._beside:
            raise PolicyError(f"no policy is named {name!r}; known: {', '.join(self.names)}")
        in_model = self._adapters.parts()
        self._beside[self.selected] = [part.clone() for part in in_model]
        for part, values in zip(in_model, self._beside.pop(name), strict=True):
            part.copy_(values)
        self.selected = name

    def tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensors of a policy as `Adapters.tensors`; nothing is exchanged for it."""
        return self._adapters.tensors(self._beside.get(name))

    def parts_beside(self) -> Iterator[torch.Tensor]:
        """Yield the memory of the sets that the model does not hold."""
        for parts in self._beside.values():
            yield from parts

    @contextmanager
    def each(self) -> Iterator[Iterator[str]]:
        """Return a context with an iterator over the names, each of which is selected meanwhile."""
        before = self.selected

        def names() -> Iterator[str]:
            for name in self.names:
                self.select(name)
                yield name

        try:
            yield names()
        finally:
            self.select(before)


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
            merged[f"{layer}.weight"] = LazyMergedWeight(
                tensor, tensors[layer + MODEL_A], tensors[layer + MODEL_B], scale
            )
        elif not name.endswith((MODEL_A, MODEL_B)):
            merged[name.replace(BASE_LAYER, ".")] = tensor
    return merged
