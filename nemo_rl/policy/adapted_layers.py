"""The layers of a model that LoRA adapts, on either backend: which they are, and the first values of their adapters."""

import math
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nemo_rl.config.lora import LORA_KEY, LoraAdapterConfig
from nemo_rl.config.moe import num_experts
from nemo_rl.distributed.vision_towers import auto_class
from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import text_decoder


def check_modules(section: LoraAdapterConfig, model_config: PreTrainedConfig, *, key: str = LORA_KEY) -> None:
    """Raise ConfigError for names of layers that a model of this configuration does not have; needs no weights."""
    if section.enabled:
        with torch.device("meta"):
            select_adapted_modules(auto_class(model_config).from_config(model_config), section, key=key)


def select_adapted_modules(model: PreTrainedModel, section: LoraAdapterConfig, *, key: str = LORA_KEY) -> list[str]:
    """Return the full names of the layers that get an adapter, in the model's order; `key` is the section's.

    Those of a model that sees are in its decoder: the vision tower and its projector have none.

    Raises:
        ConfigError: a name that no layer has, or nothing left to adapt.
    """
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    decoder = set(text_decoder(model).modules())
    allowed = [name for name, module in linear.items() if module in decoder and module is not output]
    has_experts = num_experts(model.config) > 0
    _check_patterns(f"{key}.target_modules", section.target_modules, allowed, has_experts=has_experts)
    _check_patterns(f"{key}.exclude_modules", section.exclude_modules, list(linear), has_experts=has_experts)
    names = [
        name
        for name in allowed
        if (not section.target_modules or _matches(name, section.target_modules))
        and not _matches(name, section.exclude_modules)
    ]
    if not names:
        kind = model.config.model_type
        raise ConfigError(f"{key}.enabled", True, f"no linear layer of this {kind!r} model is left to adapt")
    return names


def make_peft_config(model: nn.Module, names: list[str], section: LoraAdapterConfig, *, base: str) -> Any:
    """Return peft's description of adapters of these layers; `base` is the model that it names."""
    from peft import LoraConfig, TaskType  # takes seconds

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        target_modules=_short_names(model, names),
        r=section.dim,
        lora_alpha=section.alpha,
    )


@torch.no_grad()
def initial_values(shapes: Iterable[torch.Size], how: str, seed: int) -> Iterator[torch.Tensor]:
    """Yield random values of each A, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for shape in shapes:
        a = torch.empty(shape)
        if how == "xavier":
            nn.init.xavier_normal_(a, generator=generator)
        else:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        yield a


def _check_patterns(key: str, patterns: list[str], names: list[str], *, has_experts: bool) -> None:
    known = dict.fromkeys(name.rpartition(".")[2] for name in names)
    experts = " (experts are stacked weights, and have no adapters)" if has_experts else ""
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            problem = f"no linear layer of that name to adapt{experts}; known: {', '.join(known)}"
            raise ConfigError(key, pattern, problem)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(f".{name}".endswith(f".{pattern}") or fnmatchcase(name, pattern) for pattern in patterns)


def _short_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return the last parts of the names if they match the same layers, else the names."""
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    meant = [name for name, _ in model.named_modules() if _matches(name, last_parts)]
    return last_parts if meant == names else names
