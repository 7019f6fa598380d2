"""Refits of a CPU engine without vLLM's loaders: the copies of one reload, recorded, then repeated.

vLLM 0.32's layerwise reload calls every loader twice and finds each parameter by its name: a third of a millisecond of
Python a tensor, for small models twice as long as copying and packing. Where a tensor goes does not depend on its
values.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride and dtype of a tensor


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements after the tensor's first one

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a part of the policy's tensor `source` into a part of a parameter."""

    source: str
    read: View
    write: View


@dataclass(slots=True)
class PlannedTensor:
    """A parameter or buffer of a layer, and the copies that fill it."""

    name: str  # of the attribute
    path: str  # in the model
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: list[Copy] = field(default_factory=list)
    is_filled: bool = False  # a constant is written to a part of it, such as the padding of a vocabulary

    def is_covered(self) -> bool:
        """Return whether the copies write all of it."""
        covered = torch.zeros(self.shape, dtype=torch.bool)
        for copy in self.copies:
            copy.write.of(covered).fill_(True)
        return bool(covered.all())


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer, its tensors, and whether vLLM packs its weight into a form of the CPU's own."""

    layer: nn.Module
    tensors: tuple[PlannedTensor, ...]
    is_packed: bool

    def can_be_repeated(self) -> bool:
        """Return whether copies alone, and packing, do what the loaders did."""
        method = getattr(self.layer, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        return not is_deferred_attention_layer(self.layer) and all(map(self._is_possible, self.tensors))

    def _is_possible(self, planned: PlannedTensor) -> bool:
        held: torch.Tensor = getattr(self.layer, planned.name)
        if held.shape == planned.shape and held.is_contiguous():
            return True
        # After packing vLLM keeps an empty weight: it is made again, whole.
        is_made = self.is_packed and planned.name == "weight" and held.numel() == 0 and len(planned.shape) == 2
        return is_made and planned.is_covered() and not planned.is_filled

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill the layer's tensors, and pack its weight."""
        made: torch.Tensor | None = None
        for planned in self.tensors:
            target: torch.Tensor = getattr(self.layer, planned.name).data
            if target.shape != planned.shape:
                target = made = torch.empty(planned.shape, dtype=planned.dtype)
            for copy in planned.copies:
                copy.write.of(target).copy_(copy.read.of(tensors[copy.source]))
        if self.is_packed:
            self._pack(made)

    def _pack(self, made: torch.Tensor | None) -> None:
        layer = cast(Any, self.layer)
        held = layer.weight
        if made is not None:
            layer.weight = nn.Parameter(made, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        layer.weight = held  # the parameter with vLLM's attributes, which its own reload expects


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The copies of a reload of one model, and the tensors that it was recorded with."""

    sources: Mapping[str, Key]
    layers: tuple[PlannedLayer, ...]
    attention_layers: tuple[nn.Module, ...]  # which may hold what they compute from weights of others

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these tensors have the names, shapes, strides and dtypes of the recorded ones."""
        return self.sources == {name: _key(tensor) for name, tensor in tensors.items()}

    def apply(self, tensors: Mapping[str, torch.Tensor], model_config: ModelConfig) -> None:
        """Copy the tensors into the model and pack its matrices, but for those of output layers."""
        for layer in self.layers:
            layer.copy(tensors)
        for layer in self.attention_layers:
            cast(Any, layer).process_weights_after_loading(model_config.dtype)


class ReloadRecorder(TorchDispatchMode):
    """Records, while it is active, which parts of the policy's tensors a model's loaders copy into which parameters.

    Make it between vLLM's `initialize_layerwise_reload`, after which parameters are on the meta device, and
    `load_weights`, which is given what `watch` yields.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._targets: dict[int, tuple[nn.Module, PlannedTensor, torch.Tensor]] = {}  # by storage, kept alive
        for path, layer in model.named_modules():
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is not None:
                    place = f"{path}.{name}" if path else name
                    planned = PlannedTensor(name, place, tuple(tensor.shape), tensor.dtype)
                    self._targets.setdefault(_storage(tensor), (layer, planned, tensor))
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}  # by storage, kept alive
        self._is_possible = True

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights; copies from these very tensors are recorded."""
        for name, tensor in weights:
            self._is_possible &= _storage(tensor) not in self._sources  # two in one storage are not told apart
            self._sources[_storage(tensor)] = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def plan(self, loaded: Set[str] | None) -> ReloadPlan | None:
        """Return the plan, or None where copies are not all that happened.

        `loaded` are the names of the parameters that the model says it has loaded.
        """
        by_layer: dict[nn.Module, list[PlannedTensor]] = {}
        for layer, planned, _ in self._targets.values():
            if planned.copies:
                by_layer.setdefault(layer, []).append(planned)
        layers = tuple(
            PlannedLayer(
                layer, tuple(tensors), hasattr(layer, "quant_method") and not isinstance(layer, ParallelLMHead)
            )
            for layer, tensors in by_layer.items()
        )
        tensors = [planned for layer in layers for planned in layer.tensors]
        used = {copy.source for planned in tensors for copy in planned.copies}
        sources = {name: _key(tensor) for name, tensor in self._sources.values()}
        is_complete = used == sources.keys() and (loaded or set()) <= {planned.path for planned in tensors}
        if not (self._is_possible and is_complete and all(layer.can_be_repeated() for layer in layers)):
            return None
        return ReloadPlan(sources, layers, tuple(filter(is_deferred_attention_layer, self._model.modules())))

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        self._is_possible &= _storage(args[0]) not in self._sources  # a loader changes what it is given
        known = self._targets.get(_storage(args[0]))
        if known is None:
            return
        _, planned, target = known
        if func is torch.ops.aten.copy_.default:
            if _storage(args[1]) == _storage(args[0]):  # a parameter onto itself
                return
            source = self._sources.get(_storage(args[1]))
            if source is not None:
                name, whole = source
                copy = Copy(name, _view(args[1], whole), _view(args[0], target))
                if copy not in planned.copies:  # loaders are called twice
                    planned.copies.append(copy)
                return
        elif func is torch.ops.aten.fill_.Scalar:
            planned.is_filled = True
            return
        self._is_possible = False  # it is computed, not copied


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(part: torch.Tensor, whole: torch.Tensor) -> View:
    offset = int(part.storage_offset()) - int(whole.storage_offset())
    return View(tuple(part.shape), tuple(part.stride()), offset)


def _key(tensor: torch.Tensor) -> Key:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
