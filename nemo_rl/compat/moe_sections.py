"""NeMo-RL's keys of experts: `policy.megatron_cfg.freeze_moe_router` and `moe_*` as `policy.moe`, and their layout.

Its recipes write them for dense models too, and ask for nothing then: the table (keys.yaml) drops what is left.
"""

from typing import Any

from nemo_rl.compat.hub_models import HUB_TYPES, find_model_type, read_values
from nemo_rl.compat.megatron_models import EXPERT_SIZES
from nemo_rl.compat.tables import Cause, Report, find_named_models, reach
from nemo_rl.config.moe import EXPERT_COUNTS, SIGMOID_MODEL_TYPES
from nemo_rl.config.recipe_files import at
from nemo_rl.policy.fsdp2.backend import EXPERT_MODEL_TYPES

PREFIX = "policy.megatron_cfg"
LOSSES = ("aux_loss", "global_aux_loss")  # shares over a micro-batch of all data-parallel ranks, or over the step
UNKNOWN_COEFFICIENT = Cause(
    "results", "the weight would be the model's own in NeMo-RL; write policy.moe.aux_loss_coeff"
)
OTHER_LOSS = Cause("results", "load is balanced over whole batches: write aux_loss, or policy.moe.aux_loss_coeff")
SHARDED = Cause("layout", "this model's experts are sharded by FSDP2 like other weights")
NO_BIAS = Cause("results", f"only routers of {', '.join(SIGMOID_MODEL_TYPES)} have a bias per expert; write 0")


def translate_routers(config: dict[str, Any], report: Report) -> None:
    """Move the policy's keys of routers to `policy.moe`, in place, if the model has experts."""
    policy, section = config.get("policy"), at(config, ["policy", "megatron_cfg"])
    if not isinstance(policy, dict) or not isinstance(section, dict):
        return
    name = policy.get("model_name")
    kind = find_model_type("policy.model_name", name)
    if not _has_experts(read_values("policy.model_name", name), kind, section):
        return
    found: dict[str, Any] = {}
    if section.pop("freeze_moe_router", None):
        found["freeze_router"] = True
    found |= _balance_loss(section, report)
    found |= _bias_rate(section, kind, report)
    for name, value in found.items():
        reach(config, ["policy", "moe"]).setdefault(name, value)


def translate_expert_parallel(config: dict[str, Any], report: Report) -> None:
    """Remove NeMo-RL's `expert_parallel_size` of models whose experts FSDP2 shards like other weights, in place."""
    if report.release is None:
        return
    for key, model in find_named_models(config):
        section = model.get("dtensor_cfg")
        if not isinstance(section, dict) or (size := section.get("expert_parallel_size")) in (None, 1):
            continue
        kind = find_model_type(f"{key}.model_name", model.get("model_name"))
        if kind is not None and kind not in EXPERT_MODEL_TYPES:
            report.skip(f"{key}.dtensor_cfg.expert_parallel_size", size, SHARDED)
            del section["expert_parallel_size"]


def _has_experts(values: dict[str, Any] | None, kind: str | None, section: dict[str, Any]) -> bool:
    """Return whether config.json names experts; without one on this machine, whether the name or the layout does."""
    if values is not None:
        return any(values.get(name) for name in EXPERT_COUNTS)
    return kind in HUB_TYPES.values() or any(section.get(size) not in (None, 1) for size in EXPERT_SIZES)


def _balance_loss(section: dict[str, Any], report: Report) -> dict[str, Any]:
    kind, coefficient = section.pop("moe_router_load_balancing_type", None), section.pop("moe_aux_loss_coeff", None)
    if kind in (None, "none") or coefficient == 0:
        return {}
    if kind not in LOSSES or coefficient is None:
        cause = UNKNOWN_COEFFICIENT if kind in LOSSES else OTHER_LOSS
        report.refuse(f"{PREFIX}.moe_router_load_balancing_type", kind, cause)
        return {}
    return {"aux_loss_coeff": coefficient}


def _bias_rate(section: dict[str, Any], model_type: str | None, report: Report) -> dict[str, Any]:
    """Return the rate; Megatron reads it only if the router has a bias, which other models get by a switch."""
    rate, is_enabled = (
        section.pop("moe_router_bias_update_rate", None),
        section.pop("moe_router_enable_expert_bias", None),
    )
    if not rate or is_enabled is False:
        return {}
    if model_type is None or model_type in SIGMOID_MODEL_TYPES:
        return {"bias_update_rate": rate}
    if is_enabled:
        report.refuse(f"{PREFIX}.moe_router_enable_expert_bias", True, NO_BIAS)
    return {}
