"""A model's weights under the names of its Hugging Face checkpoint: for engines, and as a folder on disk."""

from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.policy.sharding import whole


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Name to tensor as in a checkpoint: persistent tensors, tied ones once, split as the files have them."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = whole(tensor.detach())
    return revert_weight_conversion(model, tensors)


def named_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs for an engine, cast one at a time; in float32 they are the weights themselves."""
    for name, tensor in checkpoint_tensors(model).items():
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def save_weights(model: PreTrainedModel, folder: Path, *, config_dtype: str) -> None:
    """Write config.json, generation_config.json and safetensors files.

    The tensors are float32, so that training goes on exactly; `config_dtype` is what config.json names, which is what
    transformers and vLLM load them as unless told otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _with_own_storage(t.cpu().contiguous()) for name, t in checkpoint_tensors(model).items()}
    save_torch_state_dict(tensors, folder)
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [_architecture(model)]
    config.dtype = config_dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        (folder / "generation_config.json").write_text(model.generation_config.to_json_string() + "\n")


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Overwrite the target's weights in place with those of an equal model."""
    values = source.state_dict()
    with torch.no_grad():
        for name, tensor in target.state_dict(keep_vars=True).items():
            whole(tensor.detach()).copy_(values[name])


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """safetensors refuses views, as which the experts of a mixture are taken from one tensor."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _architecture(model: PreTrainedModel) -> str:
    """The class in transformers; FSDP2 puts "FSDP" before the name of what it wraps."""
    return type(model).__name__.removeprefix("FSDP")
