"""Loading and gathering a stage's weights, or tensors of their shape, under Hugging Face's names."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from nemo_rl.policy.hf_model import ModelTensors
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.mapping import Weight, iter_model_weights
from nemo_rl.policy.megatron.model import Stage

OUTPUT = "lm_head.weight"
EXPERT_BIAS = "router.expert_bias"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

NamedT = TypeVar("NamedT")
Value = Callable[[torch.Tensor], torch.Tensor]  # a function of a parameter or buffer of the stage
Store = Callable[[torch.Tensor, torch.Tensor], object]


class StageWeights:
    """The weights of the model that a stage holds, and gathering them.

    Gathering is collective over the ranks of a copy of the model, and goes weight by weight.
    """

    def __init__(
        self,
        stage: Stage,
        model: PreTrainedConfig,
        shapes: Mapping[str, torch.Size],
        *,
        weights: Sequence[Weight] | None = None,
    ) -> None:
        """Find the stage's weights among `weights` (None: all of the model's, without adapters).

        `shapes` are those of all whole tensors, by Hugging Face's names.
        """
        self.shapes = shapes
        expert_tensor_size = dist.get_world_size(parallel.expert_tensor_group())
        of_model = iter_model_weights(model, expert_tensor_size=expert_tensor_size) if weights is None else weights
        self._weights = list(of_model)
        tensors = dict(_global_named_tensors(stage))
        names = {w.name: w.tensor_names(_num_ranks(w)) for w in self._weights}
        self._held = {name: [tensors[n] for n in own] for name, own in names.items() if own[0] in tensors}
        self._is_split = {id(t): w.is_split for w in self._weights for t in self._held.get(w.name, ())}
        self._stage_of, self._trained = _stages({name: _is_trained(own[0]) for name, own in self._held.items()})
        self._copy: tuple[Weight, list[torch.Tensor]] | None = None  # the tied embedding, in the last stage
        if weights is None and model.tie_word_embeddings and "output_layer.weight" in tensors:
            embedding = replace(self._weights[0], name="output_layer.weight")
            self._copy = (embedding, [tensors["output_layer.weight"]])

    @property
    def trained_names(self) -> list[str]:
        """Return Hugging Face's names of the whole model's trained weights."""
        return [name for weight in self._weights if weight.name in self._trained for name in weight.sources]

    def trained_by_source(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield Hugging Face's names of the stage's trained weights with the parameters that hold parts of each."""
        for weight, tensors in self._held_weights(trained=True):
            yield from ((name, tensors) for name in weight.sources)

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank counts the parameter, unless it leaves that to another data-parallel rank.

        One of the ranks of a copy of the model that hold the same does; the copy of a tied embedding is not counted.
        """
        is_split = self._is_split.get(id(parameter))
        return is_split is not None and (is_split or parallel.tensor_rank() == 0)

    @torch.no_grad()
    def load(self, tensors: ModelTensors, store: Store, *, trained: bool = False) -> None:
        """Call `store` with every (trained) tensor of the stage and this rank's shard, in its source's dtype.

        Of `tensors`, named as the whole model's, only the parts of these shards are read, a weight at a time.
        """
        found = tensors.shapes()
        for weight, own in self._held_weights(trained=trained):
            rank, size = dist.get_rank(_group(weight)), _num_ranks(weight)
            names = [name if name in found else OUTPUT for name in weight.read_from]  # a tied one may be there once
            indices = weight.indices([found[name] for name in names], rank, size)
            parts = [tensors.read(name, index) for name, index in zip(names, indices, strict=True)]
            shard = weight.join(parts, size)
            for tensor, part in zip(own, shard if weight.is_of_experts else [shard], strict=True):
                store(tensor, part)

    @torch.no_grad()
    def own(self, value: Value) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the stage's trained weights, on all ranks of the stage."""
        for weight in self._weights:
            if weight.name in self._held and weight.name in self._trained:
                yield from zip(weight.sources, _whole(weight, self._shard(weight, value)), strict=True)

    @torch.no_grad()
    def all(self, value: Value, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of all stages' weights on every rank; the biases of routers stay in float32."""
        for weight in self._weights:
            kind = torch.float32 if weight.name.endswith(EXPERT_BIAS) else dtype
            tensors: list[torch.Tensor] | None = None
            if weight.name in self._held:
                tensors = _whole(weight, self._shard(weight, value).to(kind))
            if dist.get_world_size(parallel.pipeline_group()) > 1:
                tensors = self._from_stage(self._stage_of[weight.name], weight, tensors, kind)
            assert tensors is not None
            yield from zip(weight.sources, tensors, strict=True)

    def _held_weights(self, *, trained: bool = False) -> Iterator[tuple[Weight, list[torch.Tensor]]]:
        """Yield the stage's (trained) weights with their tensors, the copy of a tied embedding last."""
        held = [(weight, self._held[weight.name]) for weight in self._weights if weight.name in self._held]
        for weight, own in [*held, *([self._copy] if self._copy else [])]:
            if _is_trained(own[0]) or not trained:
                yield weight, own

    def _shard(self, weight: Weight, value: Value) -> torch.Tensor:
        """Return the values of this rank's shard of a weight."""
        values = [value(tensor) for tensor in self._held[weight.name]]
        return torch.stack(values) if weight.is_of_experts else values[0]

    def _from_stage(
        self, stage: int, weight: Weight, tensors: list[torch.Tensor] | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        group = parallel.pipeline_group()
        device = next(iter(self._held.values()))[0].device
        result: list[torch.Tensor] = []
        for index, name in enumerate(weight.sources):
            whole = torch.empty(self.shapes[name], dtype=dtype, device=device) if tensors is None else tensors[index]
            whole = whole.contiguous()
            dist.broadcast(whole, src=dist.get_global_rank(group, stage), group=group)
            result.append(whole)
        return result


def _global_named_tensors(stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers, named by their layer's index among all layers."""
    return _globally_named(stage, [*stage.named_parameters(), *stage.named_buffers()])


def global_named_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules, named by their layer's index among all layers."""
    return _globally_named(stage, stage.named_modules())


def _globally_named(stage: Stage, named: Iterable[tuple[str, NamedT]]) -> Iterator[tuple[str, NamedT]]:
    numbers = [cast(int, layer.layer_number) - 1 for layer in stage.decoder.layers]
    for name, value in named:
        match = _LAYER.match(name)
        yield (_LAYER.sub(f"decoder.layers.{numbers[int(match[1])]}.", name) if match else name), value


def _stages(own: dict[str, bool]) -> tuple[dict[str, int], set[str]]:
    """Return the stage that holds each weight, and which are trained; all stages call it together with their own."""
    held: list[dict[str, bool] | None] = [None] * dist.get_world_size(parallel.pipeline_group())
    dist.all_gather_object(held, own, group=parallel.pipeline_group())
    stages = {name: stage for stage, names in enumerate(held) for name in names or ()}
    return stages, {name for names in held for name, is_trained in (names or {}).items() if is_trained}


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _group(weight: Weight) -> dist.ProcessGroup:
    """Return the group of the ranks that together hold a weight of this stage."""
    return parallel.expert_group() if weight.is_of_experts else parallel.tensor_group()


def _num_ranks(weight: Weight) -> int:
    return dist.get_world_size(_group(weight))


def _whole(weight: Weight, part: torch.Tensor) -> list[torch.Tensor]:
    """Return whole tensors from the shards of all ranks that hold one."""
    size = _num_ranks(weight)
    if size == 1 or not weight.is_split:
        return weight.whole([part])
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=_group(weight))
    return weight.whole(parts)
