"""A model's weights under the names of its Hugging Face checkpoint: for engines, and as a folder on disk.

Where ranks share the weights all of them iterate together, since each tensor is gathered when its turn comes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.policy.lora import Merged, merged_tensors
from nemo_rl.policy.sharding import whole

ResultT = TypeVar("ResultT")


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, adapter_scale: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs for an engine, gathered and cast one at a time.

    Persistent tensors, tied ones once, split as the files have them. What one rank holds whole in `dtype` is not
    copied: these are the weights themselves. Adapters, which `adapter_scale` belongs to, are merged into copies.
    """
    own = _persistent_tensors(model)
    tensors = own if adapter_scale is None else merged_tensors(own, adapter_scale)
    is_shared = any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in own.values())
    made_later = is_shared or adapter_scale is not None  # each when its turn comes
    if not made_later or _are_converted(model, tensors):  # experts: of several tensors the files make others
        tensors = revert_weight_conversion(model, {name: _made(tensor) for name, tensor in tensors.items()})
    for name, one in tensors.items():
        tensor = one.whole() if isinstance(one, Merged) else one
        yield name, whole(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def use_on_first_rank(
    use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT],
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    is_first: bool,
) -> ResultT | None:
    """The result of `use` on the first rank, None on the others, which only take part in gathering.

    All weights are gathered, also when `use` stops before the last one or raises.
    """
    try:
        return use(weights) if is_first else None
    finally:
        for _ in weights:
            pass


def weight_copies(weights: Iterator[tuple[str, torch.Tensor]], *, is_first: bool = True) -> dict[str, torch.Tensor]:
    """All weights as they are, on the CPU of the first rank; nothing on the others, which help to gather them."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if is_first:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copies


def save_weights(
    tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, folder: Path, *, config_dtype: str
) -> None:
    """Write config.json, generation_config.json and safetensors files of what `weight_copies` gave.

    The tensors are float32, so that training goes on exactly; `config_dtype` is what config.json names, which is what
    transformers and vLLM load them as unless told otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(dict(tensors), folder)
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [_architecture(model)]
    config.dtype = config_dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        (folder / "generation_config.json").write_text(model.generation_config.to_json_string() + "\n")


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Overwrite the target's weights, or this rank's part of them, with those of an equal model.

    Raises:
        RuntimeError: the source is another model.
    """
    set_model_state_dict(target, source.state_dict(), options=StateDictOptions(full_state_dict=True))


def _persistent_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _made(tensor: torch.Tensor | Merged) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, Merged) else whole(tensor)


def _are_converted(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor | Merged]) -> bool:
    """Whether the files hold other tensors than the model; asked of tensors without values."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    converted = revert_weight_conversion(model, dict(shapes))
    return {n: t.shape for n, t in converted.items()} != {n: t.shape for n, t in shapes.items()}


def _architecture(model: PreTrainedModel) -> str:
    """The class in transformers; FSDP2 puts "FSDP" before the name of what it wraps."""
    return type(model).__name__.removeprefix("FSDP")
