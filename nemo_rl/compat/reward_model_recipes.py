"""NeMo-RL's recipes of reward models in this project's terms: one process, one model directory, its best weights.

`admit` runs before a backend is chosen and before the table of single keys, `translate` after them. Unknown keys are
refused as in every other recipe.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nemo_rl.compat.tables import Cause, Report, find_cause, is_same_value, load_rules
from nemo_rl.config.keys import UNKNOWN_KEY, dotted, find_schema_node, make_unknown_key_error
from nemo_rl.config.recipe_files import at
from nemo_rl.errors import ConfigError

ONE_PROCESS = Cause("layout", "a reward model trains in one process, on one device")
KIND_KEYS = ("enabled", "reward_model_type")
OWN_CONFIG = Cause("results", "a reward model has the config.json of its model")
OWN_LOSS = Cause("results", "reward models learn from pairs (Bradley and Terry)")
ALL_WEIGHTS = Cause("results", "all weights are trained")
OPTIMIZER = Cause(
    "results",
    "Megatron's optimizer and schedule are not read: write policy.optimizer and policy.scheduler, and "
    "policy.megatron_cfg.enabled: false",
)
PADDED = Cause("speed", "the pairs of a micro-batch are padded")
ONE_DIRECTORY = Cause("speed", "checkpoint_dir holds one model: that with the best checkpointing.metric_name")
ALWAYS_WRITTEN = Cause("speed", "the trained model is always written, to model/ in the run directory")
UNRANKED = Cause("speed", "nothing is validated, so the final weights are written")
MEAN_RANKS = Cause("results", "the mean over the validation sets ranks the weights: val:loss or val:accuracy")
WRONG_SIGN = Cause("results", "a loss is better when it is lower, an accuracy when it is higher")
ENOUGH_STEPS = 1_000_000  # more than max_num_epochs allows
METRICS = {"val:loss": "val:loss", "val:accuracy": "val:pair_accuracy", "val:pair_accuracy": "val:pair_accuracy"}
SIZES = ("gpus_per_node", "num_nodes", "tensor_parallel_size", "data_parallel_size")


def admit(config: dict[str, Any], report: Report) -> None:
    """Take what makes the recipe one of a reward model, in place: the table refuses it for every other algorithm."""
    policy = config.get("policy")
    if not isinstance(policy, dict):
        return
    _check_kind(policy.pop("reward_model_cfg", None), report)
    _check_megatron_names(config, policy, report)


def _check_kind(section: object, report: Report) -> None:
    key = "policy.reward_model_cfg"
    if section is None:
        return
    if not isinstance(section, dict):
        report.problems.append(ConfigError(key, section, f"must be a mapping of {' and '.join(KIND_KEYS)}"))
        return
    for name in section.keys() - set(KIND_KEYS):
        report.problems.append(ConfigError(f"{key}.{name}", section[name], UNKNOWN_KEY, known=KIND_KEYS))
    loss = section.get("reward_model_type", "bradley_terry")
    if loss != "bradley_terry":
        report.refuse(f"{key}.reward_model_type", loss, OWN_LOSS)


def _check_megatron_names(config: dict[str, Any], policy: dict[str, Any], report: Report) -> None:
    """Report the unknown keys of Megatron's section, which is removed; known are the schema's and the table's."""
    path = ("policy", "megatron_cfg")
    section, node = policy.get("megatron_cfg"), find_schema_node(path, config)  # in GRPO's schema
    if section is None:
        return
    if not isinstance(section, dict):
        report.problems.append(ConfigError(dotted(path), section, "must be a mapping"))
        policy.pop("megatron_cfg")
        return
    of_table = (rule.key.split(".") for rule in load_rules())
    known = {parts[2] for parts in of_table if tuple(parts[:2]) == path} | (node.names if node is not None else set())
    for name in section.keys() - known:
        report.problems.append(make_unknown_key_error((*path, name), config))


def translate(config: dict[str, Any], report: Report) -> None:
    """Rewrite a resolved recipe of `rm`, in place; what needs several processes is refused."""
    section, policy = config.get("rm"), config.get("policy")
    if isinstance(section, dict) and section.get("max_num_steps") == -1:
        section["max_num_steps"] = ENOUGH_STEPS
    if isinstance(policy, dict):
        _take_layout(config, policy, report)
    _take_cluster(config, report)
    checkpointing = config.get("checkpointing")
    if isinstance(checkpointing, dict):
        _take_checkpoints(config, checkpointing, report)


def _take_layout(config: dict[str, Any], policy: dict[str, Any], report: Report) -> None:
    megatron = policy.pop("megatron_cfg", None)
    if isinstance(megatron, dict) and megatron.get("enabled"):
        report.refuse("policy.megatron_cfg.enabled", True, ONE_PROCESS)
        for name in ("optimizer", "scheduler"):
            if megatron.get(name):
                report.refuse(f"policy.megatron_cfg.{name}", "set", OPTIMIZER)
    dtensor = policy.get("dtensor_cfg")
    lora = dtensor.get("lora_cfg") if isinstance(dtensor, dict) else None
    if isinstance(lora, dict) and lora.get("enabled"):
        report.refuse("policy.dtensor_cfg.lora_cfg.enabled", True, ALL_WEIGHTS)
    _take_section(config, ("policy", "dtensor_cfg"), report, ONE_PROCESS, unread=("enabled", "lora_cfg"))
    for name in ("dynamic_batching", "sequence_packing"):
        batching = policy.get(name)
        if isinstance(batching, dict) and batching.get("enabled"):
            report.skip(f"policy.{name}.enabled", True, PADDED)
        _take_section(config, ("policy", name), report, None)
    policy.pop("logprob_batch_size", None)
    if overrides := policy.pop("hf_config_overrides", None):
        report.refuse("policy.hf_config_overrides", overrides, OWN_CONFIG)


def _take_cluster(config: dict[str, Any], report: Report) -> None:
    cluster = config.get("cluster")
    if isinstance(cluster, dict) and (variables := cluster.pop("env_vars", None)):
        report.refuse("cluster.env_vars", sorted(variables), find_cause("env_vars"))  # values may be secrets
    _take_section(config, ("cluster",), report, ONE_PROCESS)


def _take_section(
    config: dict[str, Any], path: tuple[str, ...], report: Report, cause: Cause | None, unread: Collection[str] = ()
) -> None:
    """Remove a section that other algorithms have; report its unknown keys, and refuse with `cause` what it asks for.

    A value asks for nothing if it is null, its key's default, or a size of 1.
    """
    holder, node = at(config, path[:-1]), find_schema_node(path, config)  # in GRPO's schema
    section = holder.get(path[-1]) if isinstance(holder, dict) else None
    if not isinstance(section, dict):  # null, or for the schema to refuse
        if isinstance(holder, dict) and section is None:
            holder.pop(path[-1], None)
        return
    fields: Mapping[str, Any] = node.section.model_fields if node is not None and node.section is not None else {}
    for name, value in section.items():
        if name not in fields:
            report.problems.append(make_unknown_key_error((*path, name), config))
        elif cause is not None and name not in unread and not _asks_for_nothing(name, value, fields[name]):
            report.refuse(".".join((*path, name)), value, cause)
    del holder[path[-1]]


def _asks_for_nothing(name: str, value: object, field: Any) -> bool:
    default = field.get_default(call_default_factory=True, validated_data={})
    return value is None or is_same_value(value, 1 if name in SIZES else default)


def _take_checkpoints(config: dict[str, Any], checkpointing: dict[str, Any], report: Report) -> None:
    """Keep the directory and the metric that ranks weights; NeMo-RL saves further ones, and may resume from them."""
    if checkpointing.pop("enabled", True) is False:
        report.skip("checkpointing.enabled", False, ALWAYS_WRITTEN)
        checkpointing.pop("checkpoint_dir", None)
    for name in ("keep_top_k", "save_period", "checkpoint_must_save_by"):
        if checkpointing.get(name) is not None:
            report.skip(f"checkpointing.{name}", checkpointing[name], ONE_DIRECTORY)
    for name in ("keep_top_k", "save_period", "checkpoint_must_save_by", "save_optimizer", "max_failed_saves"):
        checkpointing.pop(name, None)
    higher_is_better = checkpointing.pop("higher_is_better", None)
    metric = checkpointing.pop("metric_name", None)
    if metric is None:
        return
    if not _validates(config):
        report.skip("checkpointing.metric_name", metric, UNRANKED)
    elif metric not in METRICS:
        report.refuse("checkpointing.metric_name", metric, MEAN_RANKS)
    else:
        checkpointing["metric_name"] = METRICS[metric]
        if higher_is_better is (metric == "val:loss"):
            report.refuse("checkpointing.higher_is_better", higher_is_better, WRONG_SIGN)


def _validates(config: dict[str, Any]) -> bool:
    train = at(config, ["data", "train"])
    split = train.get("split_validation_size") if isinstance(train, dict) else None
    return bool(at(config, ["data", "validation"]) or split)
