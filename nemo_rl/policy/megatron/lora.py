"""LoRA on Megatron's linear layers: W + scale B A for each of the model's matrices that a layer holds.

linear_qkv holds q_proj, k_proj and v_proj, and linear_fc1 gate_proj and up_proj; each has an A and a B of its own, as
in peft's files. Tensor-parallel ranks divide them as the layer divides its matrix: B by rows beside a whole A, or, of a
layer that is split along its inputs, A by columns beside a whole B. If each rank has a part of the tokens between the
layers, a whole A or B sees these alone, and Megatron sums its gradient over the ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.config.lora import LoraAdapterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.adapted_layers import initial_values, make_peft_config, select_adapted_modules
from nemo_rl.policy.adapter_files import MODEL_A, MODEL_B, read_matching_adapter, save_adapter, to_file_name
from nemo_rl.policy.hf_model import LoadedTensors
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.backend import PEFT_KEY, MegatronLoraConfig
from nemo_rl.policy.megatron.mapping import Columns, GatedRows, Replicated, Weight, iter_model_weights
from nemo_rl.policy.megatron.optimizer import MainWeights
from nemo_rl.policy.megatron.weights import StageWeights, global_named_modules

Value = Callable[[torch.Tensor], torch.Tensor]


# From A x to what B is applied to, by whether the layer is split along its inputs, and ranks split the tokens.
_EXCHANGES: dict[tuple[bool, bool], Callable[[torch.Tensor], torch.Tensor]] = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}


class LayerAdapter(nn.Module):
    """The adapters of one linear layer, this rank's shards; a part of the layer, to whose output it adds its own.

    Args:
        layer: Megatron's.
        weight: of the layer's matrix.
        rows: of each of the model's matrices in it on this rank, by the last part of its name, in their order.
        names: the adapted ones.
        splits_tokens: each tensor-parallel rank has a part of the tokens outside of the layer.
    """

    def __init__(
        self,
        layer: Any,
        weight: Weight,
        rows: Mapping[str, int],
        names: list[str],
        section: LoraAdapterConfig,
        *,
        splits_tokens: bool,
    ) -> None:
        super().__init__()
        dim = section.dim
        self._weight, self._rows, self._dim, self._scale = weight, rows, dim, section.alpha / dim
        self._num_ranks = dist.get_world_size(parallel.tensor_group())
        new = layer.weight.detach().new_zeros
        self.a = nn.ParameterDict({name: nn.Parameter(new(dim, layer.weight.shape[1])) for name in names})
        self.b = nn.ParameterDict({name: nn.Parameter(new(rows[name], dim)) for name in names})
        self.is_on = True
        self._exchange = _EXCHANGES[isinstance(weight, Columns), splits_tokens]
        for parameter in (self.b if isinstance(weight, Columns) else self.a).values():
            parameter.sequence_parallel = splits_tokens  # pyright: ignore[reportAttributeAccessIssue] - for Megatron
        layer.adapter = self
        layer.register_forward_hook(_add)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scale B A x of [T, B, inputs]; all tensor-parallel ranks call it together."""
        a, b = self._stacked(lambda parameter: parameter)
        return F.linear(self._exchange(F.linear(inputs, a)), b) * self._scale

    def merged(self, matrix: torch.Tensor, value: Value) -> torch.Tensor:
        """Return this rank's shard of the merged matrix, in the dtype of `value` of the adapters' parameters."""
        a, b = self._stacked(value)
        return torch.addmm(matrix.to(a.dtype), b, a, alpha=self._scale)

    def _stacked(self, value: Value) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A of all matrices below each other, and their B, each in its rows and in the columns of its A."""
        a, b = ([value(parameter) for parameter in parameters.values()] for parameters in (self.a, self.b))
        width = len(a) * self._dim
        left = {name: index * self._dim for index, name in enumerate(self.a)}
        own = dict(zip(self.b, b, strict=True))
        parts = [
            F.pad(own[name], (left[name], width - left[name] - self._dim))
            if name in own
            else b[0].new_zeros(rows, width)
            for name, rows in self._rows.items()
        ]
        return torch.cat(a), self._weight.join(parts, self._num_ranks)


def _add(layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    if not layer.adapter.is_on:
        return output
    return output[0] + layer.adapter(inputs[0]), output[1]


class StageAdapters:
    """The adapters of a stage, whose own weights are frozen.

    Args:
        stage: changed in place; `initialize` gives the adapters their values.
        model: Hugging Face's, on the meta device.
        section: names layers as either does.
        base: the base model that adapter_config.json names.

    Raises:
        ConfigError: names of layers that the model does not have, or a stage without an adapter.
    """

    def __init__(self, stage: Any, model: PreTrainedModel, section: MegatronLoraConfig, *, base: str) -> None:
        own = section.in_model_names()
        self._names = select_adapted_modules(model, own, key=PEFT_KEY)
        self._config = make_peft_config(model, self._names, own, base=base)
        self._config.inference_mode = True  # as peft's own files say
        self._section, self.scale = section, section.alpha / section.dim
        self.save_merged = section.save_merged
        stage.requires_grad_(False)
        whole = {name: model.get_parameter(f"{name}.weight").shape for name in self._names}
        weights, self._layers = self._attach(stage, model)
        shapes = {name + MODEL_A: torch.Size((section.dim, shape[1])) for name, shape in whole.items()}
        shapes |= {name + MODEL_B: torch.Size((shape[0], section.dim)) for name, shape in whole.items()}
        self.weights = StageWeights(stage, model.config, shapes, weights=weights)
        self.num_parameters = sum(shape.numel() for shape in shapes.values())  # over all stages
        if not self._layers:
            raise ConfigError(
                f"{PEFT_KEY}.target_modules", section.target_modules, "leaves a pipeline stage without any"
            )

    def _attach(self, stage: Any, model: PreTrainedModel) -> tuple[list[Weight], dict[int, LayerAdapter]]:
        """Return the weights of all stages' adapters, and this stage's, by the id of their layer's matrix."""
        modules = dict(global_named_modules(stage))
        size = dist.get_world_size(parallel.tensor_group())
        weights: list[Weight] = []
        layers: dict[int, LayerAdapter] = {}
        covered: set[str] = set()
        for weight in iter_model_weights(model.config):
            sources = [name.removesuffix(".weight") for name in weight.sources]
            adapted = [name for name in sources if name in self._names]
            if weight.is_of_experts or not adapted:
                continue
            covered |= {*adapted}
            is_split_by_inputs = isinstance(weight, Columns)
            layer = weight.name.removesuffix(".weight")
            weights += [one for name in adapted for one in _adapter_weights(layer, name, is_split_by_inputs)]
            if layer in modules:
                divisor = 1 if is_split_by_inputs else size
                rows = {_last(name): model.get_parameter(f"{name}.weight").shape[0] // divisor for name in sources}
                splits_tokens = bool(stage.config.sequence_parallel)
                layers[id(modules[layer].weight)] = LayerAdapter(
                    modules[layer], weight, rows, [*map(_last, adapted)], self._section, splits_tokens=splits_tokens
                )
        if missing := [name for name in self._names if name not in covered]:
            raise ConfigError(f"{PEFT_KEY}.target_modules", missing[0], "Megatron's layers hold no such matrix")
        return weights, layers

    def initialize(self, seed: int, main: MainWeights) -> None:
        """Set A to random values and B to 0: on every rank its shards of the same values; `main` has their weights."""
        self._main = main
        shapes = [self.weights.shapes[name + MODEL_A] for name in self._names]
        drawn = initial_values(shapes, self._section.lora_A_init, seed)
        values = {name + MODEL_A: a for name, a in zip(self._names, drawn, strict=True)}
        zeros = {name + MODEL_B: torch.zeros(self.weights.shapes[name + MODEL_B]) for name in self._names}
        self.weights.load(LoadedTensors({**values, **zeros}), main.store)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the stage is the initial one."""
        for adapter in self._layers.values():
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._layers.values():
                adapter.is_on = True

    def merged(self, value: Value) -> Value:
        """Return `value` with the adapters in the matrices, merged from their main weights."""

        def merge(parameter: torch.Tensor) -> torch.Tensor:
            adapter = self._layers.get(id(parameter))
            own = value(parameter)
            return own if adapter is None else adapter.merged(own, self._whole)

        return merge

    def _whole(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._main.whole(parameter).detach()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole tensors under the names of peft's files; all ranks iterate together."""
        for name, tensor in self.weights.all(self._whole, torch.float32):
            yield to_file_name(name), tensor

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write what `tensors` yielded, in peft's format."""
        save_adapter(tensors, self._config, directory)

    def load(self, directory: Path) -> None:
        """Load an adapter; raises CheckpointError for none there, or one of other layers or sizes."""
        names = {to_file_name(name): name for name in self.weights.shapes}
        shapes = {file_name: self.weights.shapes[name] for file_name, name in names.items()}
        found = read_matching_adapter(directory, shapes, self._section.alpha)
        self.weights.load(LoadedTensors({names[name]: tensor for name, tensor in found.items()}), self._main.store)
        self._main.copy_to_model()


def _adapter_weights(layer: str, name: str, is_split_by_inputs: bool) -> Iterator[Weight]:
    """Yield A and B of one of the model's matrices that a layer of Megatron's holds."""
    last = _last(name)
    a, b = f"{layer}.adapter.a.{last}", f"{layer}.adapter.b.{last}"
    if is_split_by_inputs:
        yield Columns(a, (name + MODEL_A,))
        yield Replicated(b, (name + MODEL_B,), is_split=False)
    else:
        yield Replicated(a, (name + MODEL_A,), is_split=False)
        yield GatedRows(b, (name + MODEL_B,))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
