"""Hugging Face causal models: loading, overrides, layers, and the floating-point operations of training."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_rl.config.moe import EXPERT_COUNTS, num_experts
from nemo_rl.distributed.file_names import HALVES, FilePart, file_parts, parts_by_tensor
from nemo_rl.distributed.vision_towers import auto_class, frozen_vision_names, sees, shrink_tower
from nemo_rl.errors import ConfigError, describe_error

logger = logging.getLogger(__name__)


def load_config(
    model_path: str, overrides: Mapping[str, Any], *, section: str = "policy", trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the model's configuration with `hf_config_overrides`; a nested mapping changes single keys of a part.

    `section` is the key of the section that names the model, for errors.

    Raises:
        ConfigError: no such model, one of quantised weights, or a key that its configuration does not have.
    """
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file may raise anything
        reason = describe_error(error)
        problem = f"no Hugging Face model can be read there ({reason})"
        if not Path(model_path).exists():
            problem = f"no such directory here, and no such model on the hub ({reason})"
        raise ConfigError(f"{section}.model_name", model_path, problem) from error
    if (quantised := getattr(config, "quantization_config", None)) and "quantization_config" not in overrides:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        problem = f"its weights are quantised ({method}); allowed: a copy of the model in bfloat16 or float32"
        raise ConfigError(f"{section}.model_name", model_path, problem)
    _check_overrides(config, overrides, f"{section}.hf_config_overrides")
    if not overrides:
        return config
    merged = _merged(config.to_dict(), overrides)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and merged.get("layer_types"):
        kept = merged["layer_types"][: merged["num_hidden_layers"]]  # one entry a layer
        merged["layer_types"] = kept if len(kept) == merged["num_hidden_layers"] else None
    try:
        return type(config).from_dict(merged)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"{section}.hf_config_overrides", dict(overrides), str(error)) from error


def load_model(model_path: str, overrides: Mapping[str, Any], *, section: str = "policy") -> PreTrainedModel:
    """Load the model in float32 on the CPU; its files must hold its weights and no others.

    Raises:
        ConfigError: no such model, not a causal one, or files of other weights.
    """
    config, key = load_config(model_path, overrides, section=section), f"{section}.model_name"
    try:
        with _quiet_progress():
            loaded: Any = auto_class(config).from_pretrained(
                model_path, config=config, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # a damaged file may raise anything, a pickle whatever it names
        raise ConfigError(key, model_path, f"cannot be loaded as a causal model: {describe_error(error)}") from error
    model, info = loaded
    _check_names(key, model_path, missing=info["missing_keys"], unexpected=() if overrides else info["unexpected_keys"])
    return model


def empty_model(model_path: str, overrides: Mapping[str, Any], *, section: str = "policy") -> PreTrainedModel:
    """Return the model in float32 on the meta device: its structure without values.

    Raises:
        ConfigError: no such model, or not a causal one.
    """
    config = load_config(model_path, overrides, section=section)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=torch.float32)
    except Exception as error:  # sizes that contradict each other may raise anything
        problem = f"cannot be loaded as a causal model: {describe_error(error)}"
        raise ConfigError(f"{section}.model_name", model_path, problem) from error
    with suppress(OSError):  # defaults remain without such a file
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return model


def small_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a random model of the same kind on `device`, small enough to be made beside it.

    It has the fewest first layers among which every kind of layer is, 64 tokens, and as many experts as a token needs;
    all else is as in the model.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    text = config.get_text_config()
    layers = decoder_layers(text_decoder(model))
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    kinds = [
        (of_type, tuple(type(part) for part in layer.modules())) for of_type, layer in zip(types, layers, strict=False)
    ]
    num_layers = max((kinds.index(kind) + 1 for kind in set(kinds)), default=text.num_hidden_layers)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    text.vocab_size, text.pad_token_id = 64, None
    if sees(config):
        shrink_tower(config)
    _drop_experts(text)
    text.initializer_range = text.hidden_size**-0.5  # activations of the size of 1, whatever the width
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        small = auto_class(config).from_config(config, dtype=torch.float32)
    return small.eval()


def _drop_experts(text: PreTrainedConfig) -> None:
    """Leave the fewest experts that a router can choose from: in groups, at least two in each."""
    chosen, groups = getattr(text, "num_experts_per_tok", None), getattr(text, "n_group", None) or 1
    name = next((name for name in EXPERT_COUNTS if getattr(text, name, None)), None)
    if name is None or not chosen:
        return
    in_group = max(-(-chosen // (getattr(text, "topk_group", None) or 1)), 2)
    setattr(text, name, min(in_group * groups, getattr(text, name)))


class ModelTensors(Protocol):
    """The values of a model under the names of its `state_dict`; tied tensors under at least one of theirs."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor on the CPU, in the dtype of its source."""
        ...


class WeightFiles:
    """A model's safetensors files, of which any slice is read alone; experts that the model stacks, one at a time.

    Args:
        sources: the open file and the name in it of each tensor that files hold, by its part of the model.
        shapes: of the model's tensors.
    """

    def __init__(self, sources: Mapping[FilePart, tuple[Any, str]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._slices: dict[str, list[tuple[FilePart, Any]]] = defaultdict(list)
        for part, (file, own_name) in sources.items():
            self._slices[part.tensor].append((part, file.get_slice(own_name)))
        self._shapes = {name: _stacked_shape(parts, shapes.get(name)) for name, parts in self._slices.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        (first, values), *_ = self._slices[name]
        if first.expert is None:
            return values[index]
        experts, rows, columns = (range(size)[at] for at, size in zip(index, self._shapes[name], strict=True))
        result: torch.Tensor | None = None
        for part, values in self._slices[name]:
            own = range(self._shapes[name][1])[part.rows(self._shapes[name][1])]
            shared = range(max(own.start, rows.start), min(own.stop, rows.stop))
            if part.expert is None or part.expert not in experts or not shared:
                continue
            of_file = slice(shared.start - own.start, shared.stop - own.start)
            found: torch.Tensor = values[of_file, columns.start : columns.stop]
            if result is None:
                result = found.new_empty(len(experts), len(rows), len(columns))
            result[part.expert - experts.start, shared.start - rows.start : shared.stop - rows.start] = found
        return torch.empty(len(experts), len(rows), len(columns)) if result is None else result


def _stacked_shape(parts: Sequence[tuple[FilePart, Any]], shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a tensor of the model that some tensors of files make up: the model's, if they fit."""
    (first, values), *_ = parts
    if first.expert is None or shape is None:
        return tuple(values.get_shape())
    for part, values in parts:
        rows, columns = values.get_shape()
        if (rows, columns) != (len(range(shape[1])[part.rows(shape[1])]), shape[2]):
            return len({part.expert for part, _ in parts}), rows * HALVES // (part.halves[1] - part.halves[0]), columns
    return shape


class LoadedTensors:
    """The tensors of a model that are in memory as a whole."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return self._tensors[name][index]


def open_tensors(
    model_path: str, model: PreTrainedModel, overrides: Mapping[str, Any], *, section: str = "policy"
) -> ModelTensors:
    """Return the values of `model` at `model_path`: its safetensors files if they hold the model's own tensors.

    Experts may be stacked in files, or one tensor each. Other files (.bin, conversions of another kind) are loaded as a
    whole, with a warning. With `overrides`, which may remove layers, files may hold more than the model.

    Raises:
        ConfigError: files that cannot be read, weights that they lack, that the model does not have, or of another
            shape; names them.
    """
    key = f"{section}.model_name"
    try:
        sources = _find_sources(model_path, model)
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(key, model_path, f"its weights cannot be read: {describe_error(error)}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if sources is None:
        tensors = LoadedTensors(load_model(model_path, overrides, section=section).state_dict())
    else:
        tensors = WeightFiles(sources, shapes)
    found = tensors.shapes()
    groups = tied_names(model)
    missing = [name for name in shapes if not found.keys() & groups[name]] or _missing_parts(model, sources or {})
    unexpected = [] if overrides else _expected_alone(sorted(found.keys() - shapes.keys()), model)
    _check_names(key, model_path, missing=missing, unexpected=unexpected)
    for name in found.keys() & shapes.keys():
        if found[name] != shapes[name]:
            raise ConfigError(key, model_path, f"{name} has the shape {found[name]}, not {shapes[name]}")
    return tensors


def tensors_of_files(
    model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors as its files hold them: a stacked one as one per expert, under the files' names.

    One tensor of the model is converted at a time, when its turn comes. The model has `file_parts`.
    """
    names = parts_by_tensor(file_parts(model) or {})
    for name, tensor in tensors:
        yield from ((file_name, part.of(tensor)) for file_name, part in names[name].items())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are sharded and recomputed one at a time."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of the model that reads tokens: the model itself unless it also sees."""
    return cast(PreTrainedModel, model.get_decoder()) if sees(model.config) else model


def freeze_vision(model: PreTrainedModel) -> None:
    """Train no parameter of the vision tower; the projector between it and the tokens is trained."""
    names = frozen_vision_names(model)
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def freeze_parameters(model: nn.Module, patterns: Sequence[str], *, key: str) -> None:
    """Train no parameter whose full name fits one of the patterns; raises ConfigError if none fits or is left."""
    names = {name for name, _ in model.named_parameters() if any(fnmatchcase(name, one) for one in patterns)}
    if patterns and not names:
        raise ConfigError(key, list(patterns), "no parameter of the model has such a name, e.g. *.layers.0.*")
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(key, list(patterns), "all parameters of the model have such names: nothing would be trained")


def recompute_activations(
    layers: Iterable[nn.Module], contexts: Callable[[], tuple[Any, Any]] = noop_context_fn
) -> None:
    """Keep only each layer's input for the backward pass (`activation_checkpointing`).

    The model's own option works only in training mode, which enables dropout. `contexts` returns those of a forward
    pass and of its recomputation.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def matmul_parameters(model: PreTrainedModel) -> int:
    """Count the weights that every token is multiplied with: all but an embedding table that is only looked up.

    A frozen weight counts as two thirds: 4 of 6 operations per token, since it has no gradient. Of stacked experts
    those of one token count.
    """
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tables.pop(id(module.weight), None)  # tied: the output head multiplies with it
    text = model.config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None)
    share = chosen / num_experts(model.config) if chosen and num_experts(model.config) else 1.0
    return round(
        sum(
            p.numel() * (1 if p.requires_grad else 2 / 3) * (share if p.ndim == 3 and ".experts." in name else 1)
            for name, p in model.named_parameters()
            if id(p) not in tables
        )
    )


def train_flops(num_parameters: int, config: PreTrainedConfig, lengths: Iterable[int]) -> float:
    """Return the operations of one forward and backward pass over sequences of these lengths, with causal attention.

    6 N per token for the weights (2 forward, 4 backward) and 6 L H T^2 per sequence for attention, with L layers and H
    the width of all heads together: forward 2 T^2 H for the scores and 2 T^2 H for the values, half of both under a
    causal mask, three times that with the backward pass. Recomputation is not counted.

    Example: N = 1000, L = 2, H = 8, one sequence of 10 tokens: 6*1000*10 + 6*2*8*100 = 69600.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    width = num_heads * (getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    lengths = list(lengths)
    attention = 6 * text.num_hidden_layers * width * sum(n * n for n in lengths)
    return float(6 * num_parameters * sum(lengths) + attention)


def _find_sources(model_path: str, model: PreTrainedModel) -> dict[FilePart, tuple[Any, str]] | None:
    """Return the open file of each part of the model; None, with a warning, if a file holds anything else."""
    files = _safetensors_files(model_path)
    reason = None if files else "has no safetensors files"
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    own: dict[str, Any] = model.state_dict()
    parts = file_parts(model) or {}
    sources: dict[FilePart, tuple[Any, str]] = {}
    for path in files:
        file: Any = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118  a file, not a mapping
            renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
            part = parts.get(name) if converter is not None else FilePart(renamed)
            if part is None and renamed in own:
                reason = reason or f"holds {name}, which is a part of one of the model's tensors"
            sources[part or FilePart(renamed)] = (file, name)
    if reason is None:
        return sources
    logger.warning("%s %s: each process loads the whole model in float32 into host memory", model_path, reason)
    return None


def _missing_parts(model: PreTrainedModel, sources: Collection[FilePart]) -> list[str]:
    """Return the names in files of experts that are missing from tensors of which files hold others."""
    stacked = {part.tensor for part in sources if part.expert is not None}
    parts = (file_parts(model) or {}).items() if stacked else ()
    return [name for name, part in parts if part.tensor in stacked and part not in sources]


def _safetensors_files(model_path: str) -> list[Path]:
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if index := cached_file(model_path, SAFE_WEIGHTS_INDEX_NAME, **optional):
        return [Path(path) for path in get_checkpoint_shard_files(model_path, index)[0]]
    single = cached_file(model_path, SAFE_WEIGHTS_NAME, **optional)
    return [Path(single)] if single else []


def tied_names(model: PreTrainedModel) -> dict[str, set[str]]:
    """Return for each name all names of the same tensor."""
    by_tensor: dict[int, set[str]] = defaultdict(set)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        by_tensor[id(tensor)].add(name)
    return {name: by_tensor[id(tensor)] for name, tensor in tensors.items()}


def _expected_alone(names: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Return the names without those that transformers too ignores in files of this kind of model."""
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def _check_names(key: str, model_path: str, *, missing: Collection[str], unexpected: Collection[str]) -> None:
    if missing:
        raise ConfigError(key, model_path, f"its files lack {len(missing)} weights, e.g. {min(missing)}")
    if unexpected:
        problem = f"its files hold {len(unexpected)} weights that the model does not have, e.g. {min(unexpected)}"
        raise ConfigError(key, model_path, problem)


def _check_overrides(config: PreTrainedConfig, overrides: Mapping[str, Any], key: str) -> None:
    known = config.to_dict()
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if name not in known and part is None:
            raise ConfigError(f"{key}.{name}", value, "unknown key of this model's configuration", known=known)
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            _check_overrides(part, value, f"{key}.{name}")


def _merged(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return merged


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """Hide transformers' progress bar of each load, which would corrupt the run's own display."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
