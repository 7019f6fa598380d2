"""NeMo-RL's checkpoints as Hugging Face directories.

`convert` finds the weights in a checkpoint, names them as the model's configuration does, and writes them with the
configuration and the tokenizer.
"""

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.compat.checkpoint_tensors import (
    METADATA_FILE,
    SAFETENSORS,
    DistributedTensors,
    SafetensorsShards,
    SavedTensors,
)
from nemo_rl.compat.lora_checkpoints import merged_weights
from nemo_rl.config.recipe_files import at
from nemo_rl.durable_files import complete_or_absent
from nemo_rl.errors import CheckpointError, ConfigError, describe_error
from nemo_rl.policy.adapter_files import WEIGHTS_FILE
from nemo_rl.policy.hf_model import empty_model, load_model, tied_names
from nemo_rl.policy.megatron.backend import SUPPORTED_MODEL_TYPES
from nemo_rl.policy.megatron.mapping import VocabularyRows, Weight, iter_model_weights
from nemo_rl.policy.saving import save_weights

RECIPE_FILE = "config.yaml"
WRAPPER = "model."  # DTensor's state dict has it before 0.6
# Megatron's norms under the names of TransformerEngine's fused layers, which its checkpoints use in any case.
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
OWN_EXPERTS, SAVED_EXPERTS = "local_experts.{}.", "experts."  # all experts of a layer are one tensor of a checkpoint
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
IGNORED = re.compile(r"^(optimizer|chained_\d+)\.|_extra_state|^rng_state|^rerun_state|rotary_emb\.inv_freq$")


def convert(checkpoint: Path, output: Path, *, model_name: str | None = None) -> int:
    """Write the weights of a NeMo-RL checkpoint as a Hugging Face directory; return their number.

    Args:
        checkpoint: `step_N`, its `policy/weights`, or a directory below that.
        output: must not exist.
        model_name: the model that was trained; None: the one in the checkpoint or in its config.yaml.

    Raises CheckpointError for a checkpoint that cannot be read or lacks weights, ConfigError for the model or `output`.
    """
    if output.exists():
        raise ConfigError("output", str(output), "exists already; name a directory that does not")
    above = (checkpoint.absolute(), *checkpoint.absolute().parents[:3])
    step = next((one for one in above if (one / "policy").is_dir()), checkpoint)
    recipe = _read_recipe(step / RECIPE_FILE)
    model, names = _open_weights(checkpoint, recipe, model_name)
    tensors = dict(names)
    precision = at(recipe, ["policy", "precision"])
    dtype = precision if isinstance(precision, str) else str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with complete_or_absent(output) as written:
        save_weights(tensors, model, written, config_dtype=dtype)
        _save_tokenizer(_find_tokenizer(step, recipe, model_name), written)
        written.chmod(0o755)
    return len(tensors)


def _open_weights(
    checkpoint: Path, recipe: dict[str, Any], model_name: str | None
) -> tuple[PreTrainedModel, Iterator[tuple[str, torch.Tensor]]]:
    """Return a model of the trained structure, and its weights; those of adapters are merged into the base model's."""
    adapted = next((each for each in _weight_directories(checkpoint) if (each / WEIGHTS_FILE).is_file()), None)
    if adapted is not None:
        base = load_model(*_find_model(adapted, recipe, model_name))
        return base, merged_weights(adapted, base)
    saved, is_megatron = open_tensors(checkpoint)
    model = empty_model(*_find_model(saved.directory, recipe, model_name))
    if is_megatron:
        in_files = revert_weight_conversion(model, dict(_megatron_names(saved, model)))  # experts are views
        return model, ((name, tensor.clone()) for name, tensor in in_files.items())
    return model, _plain_names(saved, model)


def _weight_directories(checkpoint: Path) -> tuple[Path, ...]:
    """Return where a checkpoint may have its weights."""
    weights = checkpoint / "policy" / "weights"
    weights = weights if weights.is_dir() else checkpoint
    return (weights, weights / "model", *sorted(weights.glob("iter_*"))[-1:])


def open_tensors(checkpoint: Path) -> tuple[SavedTensors, bool]:
    """Return the tensors of a checkpoint and whether Megatron saved them.

    Raises ConfigError if there are none, and CheckpointError for those of another kind.
    """
    for directory in _weight_directories(checkpoint):
        if (directory / METADATA_FILE).is_file():
            return DistributedTensors(directory), (directory / "metadata.json").is_file()
        if (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} is a Hugging Face directory already: policy.model_name={directory}")
        if next(directory.glob(SAFETENSORS), None) is not None:
            return SafetensorsShards(directory), False
    problem = "no checkpoint of NeMo-RL: it has neither .metadata nor *.safetensors, nor policy/weights with them"
    raise ConfigError("CHECKPOINT", str(checkpoint), problem)


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return the checkpoint's recipe; {} if it has none."""
    if not path.is_file():
        return {}
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {describe_error(error)}") from error
    return recipe if isinstance(recipe, dict) else {}


def _find_model(directory: Path, recipe: dict[str, Any], model_name: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return name and overrides of the trained model: named, described in the checkpoint, or named by its recipe."""
    described = directory / ".hf_metadata"
    overrides = at(recipe, ["policy", "hf_config_overrides"])
    if model_name is None and (described / "config.json").is_file():
        model_name, overrides = str(described), None
    name = model_name or at(recipe, ["policy", "model_name"])
    if not isinstance(name, str):
        raise ConfigError("model", name, "the checkpoint does not name its model; name it with --model")
    return name, overrides if isinstance(overrides, Mapping) else {}


def _plain_names(saved: SavedTensors, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that were saved under the names of Hugging Face's files, one per expert, tied ones once."""
    shapes, tied = revert_weight_conversion(model, dict(model.state_dict())), tied_names(model)
    groups = {name: tied.get(name, {name}) for name in shapes}
    prefix = WRAPPER if any(WRAPPER + name in saved.shapes for name in groups) else ""
    keys = {  # by the first name of each tensor
        name: next((prefix + one for one in (name, *sorted(groups[name])) if prefix + one in saved.shapes), None)
        for name in groups
        if name == next(one for one in groups if one in groups[name])
    }
    _check_keys(saved, {prefix + name for name in groups}, [name for name, key in keys.items() if key is None])
    for name, key in keys.items():
        assert key is not None
        _check_shape(saved, key, tuple(shapes[name].shape))
        yield name, saved.read(key)


def _megatron_names(saved: SavedTensors, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face's tensors of Megatron's, whose layers are saved one by one or all together."""
    if model.config.model_type not in SUPPORTED_MODEL_TYPES:
        problem = f"no such model's weights are mapped from Megatron; allowed: {', '.join(SUPPORTED_MODEL_TYPES)}"
        raise ConfigError("model", model.config.model_type, problem)
    by_key: dict[str, list[tuple[int | None, Weight]]] = defaultdict(list)
    missing = []
    for weight in iter_model_weights(model.config):
        key, layer = _find_megatron_key(saved, weight.name)
        if key is None:
            missing.append(weight.name)
        else:
            by_key[key].append((layer, weight))
    _check_keys(saved, by_key, missing)
    shapes = model.state_dict()
    for key, weights in by_key.items():
        layer, weight = weights[0]
        expected = tuple(weight.shard([shapes[name] for name in weight.sources], 0, 1).shape)
        is_vocabulary = isinstance(weight, VocabularyRows)
        _check_shape(saved, key, expected if layer is None else (len(weights), *expected), is_padded=is_vocabulary)
        tensor = saved.read(key)
        for layer, weight in weights:
            parts = weight.whole([tensor if layer is None else tensor[layer]])
            yield from zip(weight.sources, parts, strict=True)


def _find_megatron_key(saved: SavedTensors, name: str) -> tuple[str | None, int | None]:
    """Return the key of a weight of Megatron's and, if it holds all layers, the layer's index in it."""
    name = name.replace(OWN_EXPERTS, SAVED_EXPERTS)
    names = [name, *(name.replace(own, fused) for own, fused in FUSED_NORMS.items() if own in name)]
    for one in names:
        if one in saved.shapes:
            return one, None
        match = LAYER.fullmatch(one)
        if match and f"decoder.layers.{match[2]}" in saved.shapes:
            return f"decoder.layers.{match[2]}", int(match[1])
    return None, None


def _check_keys(saved: SavedTensors, known: Container[str], missing: list[str]) -> None:
    """Raise CheckpointError if weights are missing, or there are others than the known ones."""
    if missing:
        raise CheckpointError(f"{saved.directory} lacks {len(missing)} weights of the model, e.g. {min(missing)}")
    others = [key for key in saved.shapes if key not in known and not IGNORED.search(key)]
    if others:
        problem = f"holds {len(others)} weights that the model does not have, e.g. {min(others)}"
        raise CheckpointError(f"{saved.directory} {problem}")


def _check_shape(saved: SavedTensors, key: str, expected: tuple[int, ...], *, is_padded: bool = False) -> None:
    """Raise CheckpointError for another shape; a padded one may have more rows."""
    found = saved.shapes[key]
    if found != expected and not (is_padded and found[1:] == expected[1:] and found[0] > expected[0]):
        raise CheckpointError(f"{saved.directory}: {key} has the shape {found}, not {expected}")


def _find_tokenizer(step: Path, recipe: dict[str, Any], model_name: str | None) -> str:
    """Return where the checkpoint's tokenizer is, or else the recipe's or the model's."""
    if (step / "policy" / "tokenizer").is_dir():
        return str(step / "policy" / "tokenizer")
    return str(at(recipe, ["policy", "tokenizer", "name"]) or model_name or at(recipe, ["policy", "model_name"]))


def _save_tokenizer(source: str, directory: Path) -> None:
    try:
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(directory)
    except Exception as error:  # missing, of no known kind, or damaged: anything
        raise CheckpointError(f"no tokenizer can be loaded from {source}: {describe_error(error)}") from error
