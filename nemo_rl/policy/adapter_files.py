"""peft's files of a LoRA adapter: its tensors, under the names of peft's model, and adapter_config.json."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nemo_rl.errors import CheckpointError

DIRECTORY = "adapter"  # subdirectory of a checkpoint
POLICIES_DIRECTORY = "adapters"  # subdirectory of a checkpoint with several policies: a directory for each, by name
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # begins the names in peft's files
A, B = ".lora_A.weight", ".lora_B.weight"
MODEL_A, MODEL_B = ".lora_A.default.weight", ".lora_B.default.weight"  # as peft's model has them
# Options of peft under which a weight is not W + alpha / r B A, each with the values that leave it so.
_OTHER_FORMS: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (None, False),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "peft_type": (None, "LORA"),
}


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """Description of an adapter in adapter_config.json."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / self.rank


def describe_adapter(directory: Path) -> AdapterDescription:
    """Return the description of a directory's adapter.

    Raises CheckpointError for one that cannot be read, or of another form than W + alpha / r B A.
    """
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        described = AdapterDescription(int(config["r"]), float(config["lora_alpha"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} holds no adapter: {error!r}") from error
    others = [f"{key}: {config[key]}" for key, plain in _OTHER_FORMS.items() if config.get(key) not in plain]
    if others:
        raise CheckpointError(f"{directory}/{CONFIG_FILE} has {', '.join(others)}: allowed is plain LoRA alone")
    if described.rank < 1:
        raise CheckpointError(f"{directory}/{CONFIG_FILE} has r: {described.rank}; allowed: at least 1")
    return described


def read_adapter(directory: Path) -> tuple[dict[str, torch.Tensor], AdapterDescription]:
    """Return an adapter's tensors under the names of its file; raises as `describe_adapter`."""
    described = describe_adapter(directory)
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory} holds no adapter: {error}") from error
    if other := next((name for name in tensors if not name.endswith((A, B))), None):
        raise CheckpointError(f"{directory}/{WEIGHTS_FILE} has {other}: allowed are {A} and {B} of linear layers alone")
    return tensors, described


def read_matching_adapter(directory: Path, shapes: Mapping[str, torch.Size], alpha: float) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors; raises CheckpointError for one of other names, shapes or alpha."""
    found, described = read_adapter(directory)
    if {name: tensor.shape for name, tensor in found.items()} != shapes:
        raise CheckpointError(f"{directory} holds the adapter of other layers or of another dim")
    if described.alpha != alpha:
        raise CheckpointError(f"{directory} holds an adapter of alpha {described.alpha:g}, not {alpha:g}")
    return found


def to_file_name(name: str) -> str:
    """Return the name in peft's files of a tensor of peft's model."""
    return PREFIX + name.replace(".default.", ".")


def scaled_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], scale: float, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an adapter's tensors in `dtype` for an engine that adds B A as they are: B is multiplied by the scale."""
    for name, tensor in tensors:
        yield name, (tensor * scale if name.endswith(B) else tensor).to(dtype)


def save_adapter(tensors: Mapping[str, torch.Tensor], config: Any, directory: Path) -> None:
    """Write an adapter's tensors and its configuration, a LoraConfig of peft."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / WEIGHTS_FILE)
    config.save_pretrained(str(directory))
