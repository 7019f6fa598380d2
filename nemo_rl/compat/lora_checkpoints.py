"""LoRA checkpoints of NeMo-RL's DTensor policies: peft's two files beside Automodel's, merged into the base model."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.errors import CheckpointError
from nemo_rl.policy.adapter_files import PREFIX, A, B, read_adapter
from nemo_rl.policy.hf_model import tied_names


def merged_weights(directory: Path, base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a base model in float32, as its files hold them, with the adapters in `directory` merged.

    Raises CheckpointError for adapters of layers, or of shapes, that the model does not have.
    """
    saved, described = read_adapter(directory)
    adapters = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items()}
    tensors, groups = base.state_dict(), tied_names(base)
    layers = {name.removesuffix(end) for name in adapters for end in (A, B) if name.endswith(end)}
    expected = {f"{layer}{end}" for layer in layers for end in (A, B)}
    unknown = sorted(layer for layer in layers if f"{layer}.weight" not in tensors)
    if unknown or expected != adapters.keys():
        example = (unknown or sorted(expected ^ adapters.keys()))[0]
        raise CheckpointError(f"{directory} holds adapters that the base model has no layer for, e.g. {example}")
    merged = {
        name: _merge(name, tensor, adapters, described.scale, directory)
        for name, tensor in tensors.items()
        if name == next(one for one in tensors if one in groups[name])
    }
    for name, tensor in revert_weight_conversion(base, merged).items():
        yield name, tensor.clone(memory_format=torch.contiguous_format)  # those of experts are views of all experts'


def _merge(
    name: str, weight: torch.Tensor, adapters: dict[str, torch.Tensor], scale: float, directory: Path
) -> torch.Tensor:
    """Return W + scale B A, computed in float32 as peft merges; W itself for a layer without an adapter."""
    layer = name.removesuffix(".weight")
    if f"{layer}{A}" not in adapters:
        return weight
    a, b = adapters[f"{layer}{A}"].float(), adapters[f"{layer}{B}"].float()
    if (b.shape[0], a.shape[-1]) != tuple(weight.shape) or a.shape[0] != b.shape[-1]:
        shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
        raise CheckpointError(
            f"{directory}: the adapter of {layer} has the shapes {shapes}, its weight {tuple(weight.shape)}"
        )
    return weight.float() + (b @ a) * scale
