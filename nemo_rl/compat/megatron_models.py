"""Models of NeMo-RL's Megatron recipes that Megatron here does not map: FSDP2 trains them, if a layout may change.

The model's type tells whether it is mapped; of an unknown one, that the recipe has no expert parallelism.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nemo_rl.compat.hub_models import find_model_type
from nemo_rl.compat.tables import Cause, Report, find_named_models
from nemo_rl.policy.megatron.backend import (
    SUPPORTED_MODEL_TYPES,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    to_model_names,
)

EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
FOREVER = 1_000_000_000  # training steps
UNMAPPED = Cause("layout", "Megatron trains models of type {types}; write {key}.megatron_cfg.enabled: false for FSDP2")
SWITCHED = (
    "{key}: Megatron does not map {model}, so FSDP2 trains it (--allow-unsupported): a rank holds whole layers and "
    "sequences, and policy.optimizer and policy.scheduler are those of megatron_cfg"
)


@dataclass(frozen=True, slots=True)
class UnmappedModel:
    """A model that the recipe trains or scores by Megatron, which does not map it."""

    key: str  # policy, teacher or teachers.<task>
    section: dict[str, Any]


def find_unmapped(config: dict[str, Any]) -> list[UnmappedModel]:
    """Return the models whose chosen backend, Megatron, does not map them."""
    found = []
    for key, model in find_named_models(config):
        section = model.get("megatron_cfg")
        if isinstance(section, dict) and not _is_mapped(key, model, section):
            found.append(UnmappedModel(key, model))
    return found


def train_elsewhere(unmapped: list[UnmappedModel], report: Report) -> None:
    """Refuse the models, or write them for FSDP2 if a layout may change, once the table has read their sections."""
    types = ", ".join(SUPPORTED_MODEL_TYPES)
    for one in unmapped:
        section = one.section.get("megatron_cfg")
        if not isinstance(section, dict):
            continue
        if not report.allow_unsupported:
            cause = Cause(UNMAPPED.effect, UNMAPPED.text.format(types=types, key=one.key))
            report.refuse(f"{one.key}.megatron_cfg.enabled", True, cause)
            continue
        try:
            changes = _optimizer_and_schedule(section) if one.key == "policy" else {}
        except ValidationError:
            continue  # the schema reports it
        dtensor = {key: section[key] for key in ("activation_checkpointing",) if key in section}
        if isinstance(lora := section.get("peft"), dict):
            patterns = {key: own for key, own in lora.items() if key.endswith("_modules") and isinstance(own, list)}
            named = {key: list(to_model_names(map(str, own))) for key, own in patterns.items()}
            dtensor["lora_cfg"] = lora | named
        one.section.pop("megatron_cfg")
        one.section.update({"dtensor_cfg": dtensor, "backend": "fsdp2", **changes})
        report.notes.append(SWITCHED.format(key=one.key, model=one.section.get("model_name")))


def _is_mapped(key: str, model: dict[str, Any], section: dict[str, Any]) -> bool:
    kind = find_model_type(f"{key}.model_name", model.get("model_name"))
    if kind is not None:
        return kind in SUPPORTED_MODEL_TYPES
    return all(section.get(size) in (None, 1) for size in EXPERT_SIZES)


def _optimizer_and_schedule(section: dict[str, Any]) -> dict[str, Any]:
    """Return `policy.optimizer` and `policy.scheduler` that step as Megatron's; raises ValidationError for bad keys."""
    if not isinstance(section.get("optimizer"), dict):
        return {}
    own = MegatronOptimizerConfig.model_validate(section["optimizer"])
    kwargs: dict[str, Any] = {"lr": own.lr, "weight_decay": own.weight_decay}
    if own.optimizer == "sgd":
        optimizer = {"name": "torch.optim.SGD", "kwargs": {**kwargs, "momentum": own.sgd_momentum}}
    else:
        kwargs |= {"betas": [own.adam_beta1, own.adam_beta2], "eps": own.adam_eps}
        optimizer = {"name": "torch.optim.AdamW", "kwargs": kwargs}
    schedule = MegatronSchedulerConfig.model_validate(section.get("scheduler") or {})
    return {"optimizer": optimizer | {"decay_norm_and_bias": False}, "scheduler": _stages(schedule, own)}


def _stages(schedule: MegatronSchedulerConfig, optimizer: MegatronOptimizerConfig) -> list[dict[str, Any]] | None:
    """Return torch's schedulers of warm-up, decay and end, with the steps at which one follows another."""
    warmup, lowest = schedule.lr_warmup_iters, optimizer.min_lr / optimizer.lr
    stages: list[tuple[dict[str, Any], int]] = []
    if warmup:
        start = max(schedule.lr_warmup_init / optimizer.lr, 1e-10)  # torch refuses 0
        stages.append((_stage("LinearLR", start_factor=start, end_factor=1.0, total_iters=warmup), warmup))
    if schedule.lr_decay_style != "constant" and schedule.lr_decay_iters:
        steps = max(schedule.lr_decay_iters - warmup, 1)
        if schedule.lr_decay_style == "linear":
            decay = _stage("LinearLR", start_factor=1.0, end_factor=lowest, total_iters=steps)
        else:
            decay = _stage("CosineAnnealingLR", T_max=steps, eta_min=optimizer.min_lr)
        stages.append((decay, warmup + steps))
        stages.append((_stage("ConstantLR", factor=lowest, total_iters=FOREVER), FOREVER))
    elif stages:
        stages.append((_stage("ConstantLR", factor=1.0, total_iters=FOREVER), FOREVER))
    if not stages:
        return None
    return [*(stage for stage, _ in stages), {"milestones": [end for _, end in stages[:-1]]}]


def _stage(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}
