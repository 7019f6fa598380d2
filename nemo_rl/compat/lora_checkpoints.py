"""LoRA checkpoints of NeMo-RL's DTensor policies: peft's two files beside Automodel's, merged into the base model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.errors import CheckpointError
from nemo_rl.policy.hf_model import tied_names

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # begins the names in peft's files
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Options of peft under which a weight is not W + alpha / r B A, each with the values that leave it so.
_OTHER_FORMS: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


def read_adapters(directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Return the adapters' tensors by the names of the base model's layers, and the factor of B A.

    Raises CheckpointError for files that cannot be read and for adapters of another form than W + alpha / r B A.
    """
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        saved = load_file(directory / WEIGHTS_FILE)
        rank, alpha = float(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{directory} holds no LoRA adapters that can be read: {error!r}") from error
    others = [f"{key}: {config[key]}" for key, plain in _OTHER_FORMS.items() if config.get(key) not in plain]
    if others:
        raise CheckpointError(f"{directory}/{CONFIG_FILE} has {', '.join(others)}: only plain LoRA is merged")
    return {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}, alpha / rank


def merged_weights(directory: Path, base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a base model in float32, as its files hold them, with the adapters in `directory` merged.

    Raises CheckpointError for adapters of layers, or of shapes, that the model does not have.
    """
    adapters, scale = read_adapters(directory)
    tensors, groups = base.state_dict(), tied_names(base)
    layers = {name.removesuffix(end) for name in adapters for end in (_A, _B) if name.endswith(end)}
    expected = {f"{layer}{end}" for layer in layers for end in (_A, _B)}
    unknown = sorted(layer for layer in layers if f"{layer}.weight" not in tensors)
    if unknown or expected != adapters.keys():
        example = (unknown or sorted(expected ^ adapters.keys()))[0]
        raise CheckpointError(f"{directory} holds adapters that the base model has no layer for, e.g. {example}")
    merged = {
        name: _merge(name, tensor, adapters, scale, directory)
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
    if f"{layer}{_A}" not in adapters:
        return weight
    a, b = adapters[f"{layer}{_A}"].float(), adapters[f"{layer}{_B}"].float()
    if (b.shape[0], a.shape[-1]) != tuple(weight.shape) or a.shape[0] != b.shape[-1]:
        shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
        raise CheckpointError(
            f"{directory}: the adapter of {layer} has the shapes {shapes}, its weight {tuple(weight.shape)}"
        )
    return weight.float() + (b @ a) * scale
