"""Hugging Face causal models: loading them, their overrides, their layers, the operations of training them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from nemo_rl.errors import ConfigError


def load_config(
    model_path: str, overrides: Mapping[str, Any], *, section: str = "policy", trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the model's configuration with `hf_config_overrides`; a nested mapping changes single keys of a part.

    `section` is the key of the section that names the model, for errors.

    Raises:
        ConfigError: no such model, or a key that its configuration does not have.
    """
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        problem = f"no Hugging Face model can be read there ({reason})"
        if not Path(model_path).exists():
            problem = f"no such directory here, and no such model on the hub ({reason})"
        raise ConfigError(f"{section}.model_name", model_path, problem) from error
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
    """Load the model in float32 on the CPU; every weight must be in its files.

    Raises:
        ConfigError: no such model, not a causal one, or files that lack weights.
    """
    config, key = load_config(model_path, overrides, section=section), f"{section}.model_name"
    try:
        with _quiet_progress():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                model_path, config=config, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(key, model_path, f"cannot be loaded as a causal model: {error}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(key, model_path, f"its files lack {len(missing)} weights, e.g. {missing[0]}")
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are sharded and recomputed one at a time."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def recompute_activations(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass (`activation_checkpointing`).

    The model's own option works only in training mode, which enables dropout.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def matmul_parameters(model: nn.Module) -> int:
    """Count the weights that every token is multiplied with: all but an embedding table that is only looked up.

    A frozen weight counts as two thirds: 4 of 6 operations per token, since it has no gradient.
    """
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tables.pop(id(module.weight), None)  # tied: the output head multiplies with it
    counted = (p for p in model.parameters() if id(p) not in tables)
    return round(sum(p.numel() * (1 if p.requires_grad else 2 / 3) for p in counted))


def train_flops(num_parameters: int, config: PreTrainedConfig, lengths: Iterable[int]) -> float:
    """Return the operations of one forward and backward pass over sequences of these lengths, with causal attention.

    6 N per token for the weights (2 forward, 4 backward) and 6 L H T^2 per sequence for attention, with L layers and H
    the width of all heads together: forward 2 T^2 H for the scores and 2 T^2 H for the values, half of both under a
    causal mask, three times that with the backward pass. Recomputation is not counted. For a mixture of experts the
    number is an upper bound, since all experts are counted.

    Example: N = 1000, L = 2, H = 8, one sequence of 10 tokens: 6*1000*10 + 6*2*8*100 = 69600.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    width = num_heads * (getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    lengths = list(lengths)
    attention = 6 * text.num_hidden_layers * width * sum(n * n for n in lengths)
    return float(6 * num_parameters * sum(lengths) + attention)


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
