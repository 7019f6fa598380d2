"""Loading and gathering a stage's weights, or tensors of their shape, under Hugging Face's names."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from nemo_rl.policy.hf_model import ModelTensors
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.mapping import Weight, iter_model_weights
from nemo_rl.policy.megatron.model import Stage

OUTPUT = "lm_head.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

Value = Callable[[nn.Parameter], torch.Tensor]
Store = Callable[[nn.Parameter, torch.Tensor], object]


class StageWeights:
    """The weights of the model that a stage holds, and gathering them.

    Gathering is collective over the ranks of a copy of the model, and goes weight by weight.
    """

    def __init__(self, stage: Stage, model: PreTrainedConfig, shapes: Mapping[str, torch.Size]) -> None:
        """Find the stage's weights; `shapes` are those of all whole tensors, by Hugging Face's names."""
        self.shapes = shapes
        self._weights = list(iter_model_weights(model))
        parameters = dict(_global_named_parameters(stage))
        self._stage_of = _stages(self._weights, set(parameters))
        self._held = {w.name: parameters[w.name] for w in self._weights if w.name in parameters}
        embedding = self._weights[0]
        self._copy: tuple[Weight, nn.Parameter] | None = None  # the tied embedding, in the last stage
        if model.tie_word_embeddings and "output_layer.weight" in parameters:
            self._copy = (replace(embedding, name="output_layer.weight"), parameters["output_layer.weight"])

    @property
    def names(self) -> list[str]:
        """Return Hugging Face's names of the whole model's weights."""
        return [name for weight in self._weights for name in weight.sources]

    def held_parameters_by_source(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield Hugging Face's names of the stage's weights with the parameter that contains each."""
        for weight in self._weights:
            if weight.name in self._held:
                yield from ((name, self._held[weight.name]) for name in weight.sources)
        if self._copy:
            yield from ((name, self._copy[1]) for name in self._copy[0].sources)

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank counts the parameter; one of the ranks of a copy that hold the same does."""
        split = {id(self._held[w.name]): w.is_split for w in self._weights if w.name in self._held}
        return split.get(id(parameter), False) or (id(parameter) in split and parallel.tensor_rank() == 0)

    @torch.no_grad()
    def load(self, tensors: ModelTensors, store: Store) -> None:
        """Call `store` with every parameter of the stage and this tensor-parallel rank's shard, in its source's dtype.

        Of `tensors`, named as the whole model's, only the parts of these shards are read, a weight at a time.
        """
        held = [(w, self._held[w.name]) for w in self._weights if w.name in self._held]
        rank, size = parallel.tensor_rank(), dist.get_world_size(parallel.tensor_group())
        found = tensors.shapes()
        for weight, parameter in [*held, *([self._copy] if self._copy else [])]:
            names = [name if name in found else OUTPUT for name in weight.sources]  # a tied one may be there once
            indices = weight.indices([found[name] for name in names], rank, size)
            parts = [tensors.read(name, index) for name, index in zip(names, indices, strict=True)]
            store(parameter, weight.join(parts, size))

    @torch.no_grad()
    def own(self, value: Value) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the stage's weights, on all tensor-parallel ranks."""
        for weight in self._weights:
            if weight.name in self._held:
                yield from zip(weight.sources, _whole(weight, value(self._held[weight.name])), strict=True)

    @torch.no_grad()
    def all(self, value: Value, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of all stages' weights on every rank of a copy of the model."""
        for weight in self._weights:
            tensors: list[torch.Tensor] | None = None
            if weight.name in self._held:
                tensors = _whole(weight, value(self._held[weight.name]).to(dtype))
            if dist.get_world_size(parallel.pipeline_group()) > 1:
                tensors = self._from_stage(self._stage_of[weight.name], weight, tensors, dtype)
            assert tensors is not None
            yield from zip(weight.sources, tensors, strict=True)

    def _from_stage(
        self, stage: int, weight: Weight, tensors: list[torch.Tensor] | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        group = parallel.pipeline_group()
        device = next(iter(self._held.values())).device
        result: list[torch.Tensor] = []
        for index, name in enumerate(weight.sources):
            whole = torch.empty(self.shapes[name], dtype=dtype, device=device) if tensors is None else tensors[index]
            whole = whole.contiguous()
            dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
            result.append(whole)
        return result


def _global_named_parameters(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters named by their layer's index among all layers."""
    numbers = [cast(int, layer.layer_number) - 1 for layer in stage.decoder.layers]
    for name, parameter in stage.named_parameters():
        match = _LAYER.match(name)
        yield (_LAYER.sub(f"decoder.layers.{numbers[int(match[1])]}.", name) if match else name), parameter


def _stages(weights: list[Weight], own: set[str]) -> dict[str, int]:
    """Return the stage that holds each weight; all stages call it together."""
    held: list[set[str] | None] = [None] * dist.get_world_size(parallel.pipeline_group())
    dist.all_gather_object(held, {w.name for w in weights} & own, group=parallel.pipeline_group())
    return {name: stage for stage, names in enumerate(held) for name in names or ()}


def _whole(weight: Weight, part: torch.Tensor) -> list[torch.Tensor]:
    """Return whole tensors from the shards of all tensor-parallel ranks."""
    size = dist.get_world_size(parallel.tensor_group())
    if size == 1 or not weight.is_split:
        return weight.whole([part])
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=parallel.tensor_group())
    return weight.whole(parts)
