"""NeMo-RL's recipes of reward models in this project's terms: one process, one model directory, its best weights."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.config.compatibility import Cause, Report, is_same_value
from nemo_rl.config.keys import at

ONE_PROCESS = Cause("layout", "a reward model trains in one process, on one device")
OWN_ENVIRONMENT = Cause("layout", "the one process has the environment of its shell")
OWN_CONFIG = Cause("results", "a reward model has the config.json of its model")
PADDED = Cause("speed", "the pairs of a micro-batch are padded")
ONE_DIRECTORY = Cause("speed", "checkpoint_dir holds one model: that with the best checkpointing.metric_name")
ENOUGH_STEPS = 1_000_000  # more than max_num_epochs allows
INERT: Mapping[str, tuple[object, ...]] = {  # of each section that shards or packs: values that ask for nothing
    "enabled": (True, False),
    "cpu_offload": (False, None),
    "sequence_parallel": (False, None),
    "activation_checkpointing": (False, None),
    "tensor_parallel_size": (1, None),
    "context_parallel_size": (1, None),
}


def translate(config: dict[str, Any], report: Report) -> None:
    """Rewrite a resolved recipe of `rm`, in place; what needs several processes is refused."""
    section, policy = config.get("rm"), config.get("policy")
    if isinstance(section, dict) and section.get("max_num_steps") == -1:
        section["max_num_steps"] = ENOUGH_STEPS
    if isinstance(policy, dict):
        policy.pop("reward_model_cfg", None)
        _take_layout(policy, report)
    cluster = config.pop("cluster", None)
    for name, size in (cluster or {}).items() if isinstance(cluster, dict) else ():
        if name in ("gpus_per_node", "num_nodes") and size != 1:
            report.refuse(f"cluster.{name}", size, ONE_PROCESS)
    checkpointing = config.get("checkpointing")
    if isinstance(checkpointing, dict):
        _take_checkpoints(checkpointing, report, validates=_validates(config))


def _take_layout(policy: dict[str, Any], report: Report) -> None:
    megatron = policy.pop("megatron_cfg", None)
    if isinstance(megatron, dict) and megatron.get("enabled"):
        report.refuse("policy.megatron_cfg.enabled", True, ONE_PROCESS)
    dtensor = policy.pop("dtensor_cfg", None)
    for name, value in (dtensor or {}).items() if isinstance(dtensor, dict) else ():
        if name in INERT and not any(is_same_value(value, inert) for inert in INERT[name]):
            report.refuse(f"policy.dtensor_cfg.{name}", value, ONE_PROCESS)
        elif name == "lora_cfg" and isinstance(value, dict) and value.get("enabled"):
            report.refuse("policy.dtensor_cfg.lora_cfg.enabled", True, Cause("results", "all weights are trained"))
        elif name == "custom_parallel_plan" and value is not None:
            report.refuse(f"policy.dtensor_cfg.{name}", value, ONE_PROCESS)
        elif name == "env_vars":
            report.skip(f"policy.dtensor_cfg.{name}", value, OWN_ENVIRONMENT)
    for name in ("dynamic_batching", "sequence_packing"):
        batching = policy.pop(name, None)
        if isinstance(batching, dict) and batching.get("enabled"):
            report.skip(f"policy.{name}.enabled", True, PADDED)
    policy.pop("logprob_batch_size", None)
    if overrides := policy.pop("hf_config_overrides", None):
        report.refuse("policy.hf_config_overrides", overrides, OWN_CONFIG)


def _take_checkpoints(checkpointing: dict[str, Any], report: Report, *, validates: bool) -> None:
    """Keep the directory and the metric that ranks weights; NeMo-RL saves further ones, and may resume from them."""
    metric = str(checkpointing.get("metric_name"))
    kept = {"checkpoint_dir": checkpointing["checkpoint_dir"]} if "checkpoint_dir" in checkpointing else {}
    if metric.endswith("loss") and validates:
        kept["metric_name"] = "val:loss"
    for name in ("keep_top_k", "save_period", "checkpoint_must_save_by"):
        if checkpointing.get(name) is not None:
            report.skip(f"checkpointing.{name}", checkpointing[name], ONE_DIRECTORY)
    checkpointing.clear()
    checkpointing.update(kept)


def _validates(config: dict[str, Any]) -> bool:
    train = at(config, ["data", "train"])
    split = train.get("split_validation_size") if isinstance(train, dict) else None
    return bool(at(config, ["data", "validation"]) or split)
