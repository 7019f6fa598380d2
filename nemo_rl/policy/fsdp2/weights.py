"""A model's weights under Hugging Face's names: gathered from FSDP2 shards, with adapters merged, and loaded back."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.fsdp2.lora import LazyMergedWeight, merge_adapter_weights
from nemo_rl.policy.fsdp2.sharding import gather_full_tensor
from nemo_rl.policy.hf_model import load_model


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, adapter_scale: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) pairs for an engine, gathered and cast one at a time.

    Persistent tensors, tied ones once, split as in the model's files. A tensor that one rank holds whole in `dtype` is
    not copied: it is the live weight. With an `adapter_scale`, adapters are merged into copies.
    """
    own = _persistent_tensors(model)
    tensors = own if adapter_scale is None else merge_adapter_weights(own, adapter_scale)
    is_sharded = any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in own.values())
    is_materialized_lazily = is_sharded or adapter_scale is not None  # each when its turn comes
    if not is_materialized_lazily or _needs_weight_conversion(model, tensors):
        tensors = revert_weight_conversion(model, {name: _materialize(tensor) for name, tensor in tensors.items()})
    for name, one in tensors.items():
        tensor = one.materialize() if isinstance(one, LazyMergedWeight) else one
        yield name, gather_full_tensor(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Load a Hugging Face directory; raises CheckpointError for no weights there, or those of another model."""
    try:
        saved = load_model(str(directory), {})
    except ConfigError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    try:
        copy_weights(saved, model)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{directory} holds another model: {error}") from error


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Overwrite the target's weights, or this rank's shards of them, with those of an equal model.

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


def _materialize(tensor: torch.Tensor | LazyMergedWeight) -> torch.Tensor:
    return tensor.materialize() if isinstance(tensor, LazyMergedWeight) else gather_full_tensor(tensor)


def _needs_weight_conversion(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor | LazyMergedWeight]) -> bool:
    """Return whether the model's files hold other tensors than the model, e.g. one per expert; needs no values."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    converted = revert_weight_conversion(model, dict(shapes))
    return {n: t.shape for n, t in converted.items()} != {n: t.shape for n, t in shapes.items()}
