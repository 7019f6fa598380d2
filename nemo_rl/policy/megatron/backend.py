"""Checks of models and options that Megatron-core cannot compute or train; needs neither weights nor Megatron."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from nemo_rl.config.policy import (
    MegatronConfig,
    MegatronOptimizerConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerStageConfig,
    TrainedMegatronConfig,
)
from nemo_rl.errors import ConfigError


def to_torch_config(config: PolicyConfig) -> PolicyConfig:
    """`policy.optimizer` and `policy.scheduler` that do what `policy.megatron_cfg` asks for, where it does."""
    section = config.megatron_cfg
    if section.optimizer is None and section.scheduler is None:
        return config
    changes: dict[str, Any] = {}
    if section.optimizer is not None:
        changes["optimizer"] = _torch_optimizer(section.optimizer)
        changes["scheduler"] = None
    if section.scheduler is not None:
        factor = learning_rate_factor(section, float(changes.get("optimizer", config.optimizer).kwargs["lr"]))
        changes["scheduler"] = SchedulerStageConfig(
            name="torch.optim.lr_scheduler.LambdaLR", kwargs={"lr_lambda": factor}
        )
    return config.model_copy(update=changes)


def learning_rate_factor(section: TrainedMegatronConfig, lr: float) -> Callable[[int], float]:
    """What the learning rate is multiplied by in each training step, from 0.

    Warm-up: from `lr_warmup_init` to `lr` over `lr_warmup_iters` steps. Then, up to `lr_decay_iters`, from `lr` to
    `min_lr` in a line or half a cosine, or constant.
    """
    schedule = section.scheduler
    assert schedule is not None
    lowest = section.optimizer.min_lr if section.optimizer is not None else 0.0
    warmup, end = schedule.lr_warmup_iters, schedule.lr_decay_iters

    def factor(step: int) -> float:
        if step < warmup:
            return (schedule.lr_warmup_init + (lr - schedule.lr_warmup_init) * step / warmup) / lr
        if schedule.lr_decay_style == "constant" or end is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(end - warmup, 1))
        left = 1 - done if schedule.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
        return (lowest + (lr - lowest) * left) / lr

    return factor


def _torch_optimizer(section: MegatronOptimizerConfig) -> OptimizerConfig:
    if section.optimizer == "sgd":
        kwargs = {"lr": section.lr, "momentum": section.sgd_momentum, "weight_decay": section.weight_decay}
        return OptimizerConfig(name="torch.optim.SGD", kwargs=kwargs)
    kwargs = {
        "lr": section.lr,
        "betas": [section.adam_beta1, section.adam_beta2],
        "eps": section.adam_eps,
        "weight_decay": section.weight_decay,
    }
    return OptimizerConfig(name="torch.optim.AdamW", kwargs=kwargs)


SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
SUPPORTED_OPTIMIZERS = ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD")
SUPPORTED_ROTARY_EMBEDDINGS = ("default", "linear", "llama3")

KEY = "policy.megatron_cfg"
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_megatron(policy: PolicyConfig, model: PreTrainedConfig) -> None:
    """Raises ConfigError, with the key and what is allowed, for what cannot be trained; nothing where it is off."""
    section = policy.megatron_cfg
    if not section.enabled:
        return
    check_model(section, model, key=KEY)
    if section.optimizer is None and policy.optimizer.name not in SUPPORTED_OPTIMIZERS:
        raise ConfigError(
            "policy.optimizer.name",
            policy.optimizer.name,
            "on Megatron an optimizer sees parts of weights, so it must treat each entry by itself; allowed: "
            + ", ".join(SUPPORTED_OPTIMIZERS),
        )
    if section.scheduler is not None and section.optimizer is None and not policy.optimizer.kwargs.get("lr"):
        problem = f"{KEY}.scheduler starts from it; allowed: above 0"
        raise ConfigError("policy.optimizer.kwargs.lr", policy.optimizer.kwargs.get("lr"), problem)
    _check_scheduler(section)


def check_model(section: MegatronConfig, model: PreTrainedConfig, *, key: str) -> None:
    """The same of a model that need not be trained; `key` is that of `section`, for errors."""
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError(f"{key}.enabled", True, "megatron-core is not installed (uv sync --extra megatron)")
    _check_architecture(model, key)
    _check_tensor_parallel(section.tensor_model_parallel_size, model, f"{key}.tensor_model_parallel_size")
    _check_stages(section, model.num_hidden_layers, key)


def _check_scheduler(section: TrainedMegatronConfig) -> None:
    schedule = section.scheduler
    if schedule is None or schedule.lr_decay_style == "constant":
        return
    if schedule.lr_decay_iters is None or schedule.lr_decay_iters <= schedule.lr_warmup_iters:
        raise ConfigError(
            f"{KEY}.scheduler.lr_decay_iters",
            schedule.lr_decay_iters,
            f"a {schedule.lr_decay_style} decay ends after the warm-up; allowed: above lr_warmup_iters, "
            f"{schedule.lr_warmup_iters}",
        )


def _check_architecture(model: PreTrainedConfig, key: str) -> None:
    kind = model.model_type
    if kind not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(f"{key}.enabled", True, f"no weights are mapped for type {kind!r}; supported: {supported}")
    rotary = (getattr(model, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in SUPPORTED_ROTARY_EMBEDDINGS:
        allowed = ", ".join(SUPPORTED_ROTARY_EMBEDDINGS)
        raise ConfigError(f"{key}.enabled", True, f"no rotary embedding of type {rotary!r}; supported: {allowed}")
    unsupported: dict[str, Any] = {
        "mlp_bias": getattr(model, "mlp_bias", False),
        "layer_types": "sliding_attention" in (getattr(model, "layer_types", None) or ()),
        "hidden_act": model.hidden_act != "silu",
    }
    for name, is_set in unsupported.items():
        if is_set:
            problem = f"the model's {name} is {getattr(model, name)!r}, which is not mapped to Megatron"
            raise ConfigError(f"{key}.enabled", True, problem)


def _check_tensor_parallel(size: int, model: PreTrainedConfig, key: str) -> None:
    widths = {name: getattr(model, name) for name in _DIVIDED}
    allowed = [n for n in range(1, min(widths.values()) + 1) if all(width % n == 0 for width in widths.values())]
    if size not in allowed:
        shown = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigError(key, size, f"must divide the model's {shown}; allowed: {', '.join(map(str, allowed))}")
    rows = -(-model.vocab_size // size)
    if rows * (size - 1) >= model.vocab_size:
        raise ConfigError(key, size, f"leaves the last rank no token of the model's vocab_size {model.vocab_size}")


def _check_stages(section: MegatronConfig, num_layers: int, key: str) -> None:
    """As many layers in each stage as in any other, but for the first and the last where that is asked for."""
    size, size_key = section.pipeline_model_parallel_size, f"{key}.pipeline_model_parallel_size"
    ends = {
        "num_layers_in_first_pipeline_stage": section.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": section.num_layers_in_last_pipeline_stage,
    }
    given = {name: number for name, number in ends.items() if number is not None}
    for name, number in given.items():
        if size == 1:
            raise ConfigError(f"{key}.{name}", number, f"there is one stage; {size_key} is 1")
    left, stages = num_layers - sum(given.values()), size - len(given)
    if stages == 0 and left == 0:
        return
    if stages <= 0 or left < stages or left % stages:
        shown = "".join(f", {number} of them in {name}" for name, number in given.items())
        raise ConfigError(
            size_key,
            size,
            f"the model's {num_layers} layers{shown}, must fall into stages of the same number"
            if shown
            else f"must divide the model's {num_layers} layers, or set {key}.num_layers_in_first_pipeline_stage",
        )
