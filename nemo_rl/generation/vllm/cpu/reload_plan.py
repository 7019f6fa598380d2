"""Refits of a CPU engine without vLLM's loaders: the copies of one reload, recorded, then repeated.

vLLM 0.32's layerwise reload calls every loader twice and finds each parameter by its name: a third of a millisecond of
Python per tensor, for small models twice as long as copying and packing. The destination of a tensor does not depend
on its values.
"""

import logging
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

logger = logging.getLogger(__name__)

TensorLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride and dtype


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

    name: str  # attribute of the layer
    path: str  # full name in the model
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    copies: dict[Copy, None] = field(default_factory=dict)  # ordered and unique: loaders are called twice
    fills: list[View] = field(default_factory=list)  # parts set to a constant, e.g. the padding of a vocabulary

    def written_part(self) -> torch.Tensor:
        """Return a mask of the elements that the copies write."""
        written = torch.empty_strided(self.shape, self.stride, dtype=torch.bool).fill_(False)
        for each in self.copies:
            each.write.of(written).fill_(True)
        return written


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer, its tensors, and whether vLLM packs its weight into a CPU layout."""

    layer: nn.Module
    tensors: tuple[PlannedTensor, ...]
    is_packed: bool

    def can_be_repeated(self) -> bool:
        """Return whether copying and packing alone reproduce the loaders' effect."""
        method = getattr(self.layer, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        return not is_deferred_attention_layer(self.layer) and all(map(self._can_be_filled, self.tensors))

    def _can_be_filled(self, planned: PlannedTensor) -> bool:
        held: torch.Tensor = getattr(self.layer, planned.name)
        written = planned.written_part()
        if any(bool(view.of(written).any()) for view in planned.fills):  # the order would matter
            return False
        if (tuple(held.shape), tuple(held.stride())) == (planned.shape, planned.stride):
            return True
        # After packing vLLM keeps an empty weight. It is allocated again, so the copies must write all of it.
        is_allocated = self.is_packed and planned.name == "weight" and held.numel() == 0 and len(planned.shape) == 2
        return is_allocated and bool(written.all())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill the layer's tensors, and pack its weight."""
        allocated: torch.Tensor | None = None
        for planned in self.tensors:
            target: torch.Tensor = getattr(self.layer, planned.name).data
            if target.shape != planned.shape:
                target = allocated = torch.empty_strided(planned.shape, planned.stride, dtype=planned.dtype)
            for each in planned.copies:
                each.write.of(target).copy_(each.read.of(tensors[each.source]))
        if self.is_packed:
            self._pack(allocated)

    def _pack(self, allocated: torch.Tensor | None) -> None:
        layer = cast(Any, self.layer)
        held = layer.weight
        if allocated is not None:
            layer.weight = nn.Parameter(allocated, requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        layer.weight = held  # the parameter with vLLM's attributes, which its own reload expects


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The copies of a reload of one model, and the tensors that it was recorded with."""

    sources: Mapping[str, TensorLayout]
    layers: tuple[PlannedLayer, ...]
    attention_layers: tuple[nn.Module, ...]  # may hold values computed from weights of other layers

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the tensors match the recorded names, shapes, strides and dtypes."""
        return self.sources == layouts_of(tensors)

    def apply(self, tensors: Mapping[str, torch.Tensor], model_config: ModelConfig) -> None:
        """Copy the tensors into the model and pack its matrices, except output layers, which the caller packs."""
        for layer in self.layers:
            layer.load(tensors)
        for layer in self.attention_layers:
            cast(Any, layer).process_weights_after_loading(model_config.dtype)


class ReloadRecorder(TorchDispatchMode):
    """Records, while active, which parts of the policy's tensors a model's loaders copy into which parameters.

    Make it after vLLM's `initialize_layerwise_reload`, which moves parameters to the meta device, and pass the output
    of `watch` to `load_weights`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._targets: dict[int, tuple[nn.Module, PlannedTensor, torch.Tensor]] = {}  # storage -> tensor, kept alive
        for path, layer in model.named_modules():
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is not None:
                    full_path = f"{path}.{name}" if path else name
                    planned = PlannedTensor(name, full_path, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
                    self._targets.setdefault(_storage(tensor), (layer, planned, tensor))
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}  # storage -> tensor, kept alive
        self._obstacle: str | None = None  # why copies alone do not reproduce the load

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights; copies from the yielded tensors are recorded."""
        for name, tensor in weights:
            if _storage(tensor) in self._sources:
                self._object(f"{name} shares its storage with another weight")
            self._sources[_storage(tensor)] = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def plan(self, loaded: Set[str] | None) -> ReloadPlan | None:
        """Return the plan; None, with a log line, if more than copies happened.

        `loaded` are the names of the parameters that the model reports as loaded.
        """
        by_layer: dict[nn.Module, list[PlannedTensor]] = {}
        for layer, planned, _ in self._targets.values():
            if planned.copies:
                by_layer.setdefault(layer, []).append(planned)
        layers = tuple(PlannedLayer(layer, tuple(tensors), _is_packed(layer)) for layer, tensors in by_layer.items())
        sources = layouts_of(dict(self._sources.values()))
        self._check(layers, sources.keys(), loaded or set())
        if self._obstacle is not None:
            logger.info("falling back to vLLM's weight loaders for refits: %s", self._obstacle)
            return None
        return ReloadPlan(sources, layers, tuple(filter(is_deferred_attention_layer, self._model.modules())))

    def _check(self, layers: Iterable[PlannedLayer], sources: Set[str], loaded: Set[str]) -> None:
        tensors = [planned for layer in layers for planned in layer.tensors]
        used = {each.source for planned in tensors for each in planned.copies}
        if unused := sorted(sources - used):
            self._object(f"{unused[0]} is not copied")
        if uncopied := sorted(loaded - {planned.path for planned in tensors}):
            self._object(f"{uncopied[0]} is loaded otherwise than by copies")
        for layer in layers:
            if not layer.can_be_repeated():
                self._object(f"{layer.tensors[0].path} is processed after it is loaded")

    def _object(self, obstacle: str) -> None:
        self._obstacle = self._obstacle or obstacle

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        if _storage(args[0]) in self._sources:
            self._object(f"a loader writes to {self._sources[_storage(args[0])][0]}, which it is given")
        known = self._targets.get(_storage(args[0]))
        if known is None:
            return
        _, planned, target = known
        if func is torch.ops.aten.copy_.default:
            if _storage(args[1]) == _storage(args[0]):  # a parameter onto itself
                return
            name, whole = self._sources.get(_storage(args[1]), ("", None))
            if whole is not None and (args[0].dtype, args[1].dtype) == (target.dtype, whole.dtype):
                planned.copies[Copy(name, _view(args[1], whole), _view(args[0], target))] = None
                return
        elif func is torch.ops.aten.fill_.Scalar:
            planned.fills.append(_view(args[0], target))
            return
        self._object(f"{planned.path} is computed, not copied")


def _is_packed(layer: nn.Module) -> bool:
    """Return whether vLLM packs a layer after loading; the caller of `apply` packs output layers."""
    return getattr(layer, "quant_method", None) is not None and not isinstance(layer, ParallelLMHead)


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorLayout]:
    """Return shape, stride and dtype of each tensor."""
    return {name: (tuple(t.shape), tuple(t.stride()), t.dtype) for name, t in tensors.items()}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(part: torch.Tensor, whole: torch.Tensor) -> View:
    offset = int(part.storage_offset()) - int(whole.storage_offset())
    return View(tuple(part.shape), tuple(part.stride()), offset)
