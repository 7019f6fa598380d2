"""NeMo-RL's features that have another shape here: each is rewritten as its counterpart, or refused with the reason.

Steps of translation.py, which run on a resolved recipe in place; single keys are rows of keys.yaml (tables.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl.compat.tables import Cause, Report, find_named_models
from nemo_rl.config.recipe_files import at
from nemo_rl.errors import ConfigError

# Samplers of the single controller: the key of their bound, and what becomes of a group that exceeds it.
SAMPLERS = {
    "in_order": ("max_lookahead_versions", "wait"),
    "weight_fifo": ("max_staleness_versions", "wait"),
    "ready_first": ("max_staleness_versions", "wait"),
    "windowed": ("max_staleness_versions", "drop"),
}
TAGGED_ANSWERS = "nemo_rl.environments.final_answers:score_tagged_answer"
TUNING = Cause("speed", "sizes of buffers and reports of the single controller; batches are whole here")
BOUND = Cause("speed", "the age bound of grpo.async_grpo holds for late groups too")
VARIABLE = Cause("speed", "a variable of the recipe, which its other keys have read")
UNREAD = Cause("speed", "data.train names the dataset")
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
ADAM_KWARGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "fused")
FLOAT32 = Cause("speed", "torch's AdamW, fused, on float32 weights and state")
HEADS = Cause("speed", "heads for further tokens are not trained; detached, they do not change the policy")
RANKS = Cause("layout", "a reward model is whole on each GPU of reward_model")
VALIDATED = ("grpo", "distillation", "sft", "dpo")
UNRANKED = Cause("speed", "nothing is validated, so the newest checkpoints are kept")


def translate_single_controller(config: dict[str, Any], report: Report) -> None:
    """Write `async_rl` as `grpo.async_grpo`: a sampler that may not look ahead is synchronous."""
    section, grpo = config.get("async_rl"), config.get("grpo")
    if not isinstance(section, dict) or not isinstance(grpo, dict):
        return
    given = section.get("sampler")
    sampler: Any = {"name": "in_order"} if given is None else given
    name = sampler.get("name", "in_order") if isinstance(sampler, dict) else None
    if not isinstance(sampler, dict) or not isinstance(name, str) or name not in SAMPLERS:
        return  # the table refuses it
    if sampler.get("sample_freshest_first"):
        return
    key, stale_groups = SAMPLERS[name]
    bound = sampler.get(key, 1)
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise ConfigError(f"async_rl.sampler.{key}", bound, "must be a whole number of steps, e.g. 1")
    options = grpo["async_grpo"] if isinstance(grpo.get("async_grpo"), dict) else {}
    options |= {"enabled": bound > 0}
    if bound > 0:
        options |= {"max_trajectory_age_steps": bound, "stale_groups": stale_groups}
        options["recompute_kv_cache_after_weight_updates"] = bool(
            section.get("recompute_kv_cache_after_weight_updates")
        )
    grpo["async_grpo"] = options
    if name == "ready_first":
        report.skip("async_rl.sampler.name", name, BOUND)
    for other in section.keys() - {"sampler", "recompute_kv_cache_after_weight_updates"}:
        report.skip(f"async_rl.{other}", section[other], TUNING)
    del config["async_rl"]


def translate_teachers_by_agent(config: dict[str, Any], report: Report) -> None:
    """Write `on_policy_distillation` with one teacher for all agents as `teacher`; several are refused by the table."""
    section = config.get("on_policy_distillation")
    if not isinstance(section, dict) or not section.get("enabled"):
        return
    models = section.get("teacher_model_by_agent_name")
    placement = section.get("non_colocated_teachers") or {}
    options = placement.get("default_teacher_cfg") or {} if isinstance(placement, dict) else None
    if not isinstance(options, dict) or placement.get("teacher_cfgs"):
        return
    names = list(models.values()) if isinstance(models, Mapping) else []
    if not names or not all(isinstance(name, str) and name == names[0] for name in names):
        return
    precisions, precision = {"bf16": "bfloat16", "fp32": "float32"}, str(options.get("precision", "bf16"))
    teacher: dict[str, Any] = {
        "model_name": names[0],
        "precision": precisions.get(precision, precision),
        "logprob_batch_size": options.get("micro_batch_size", 1),
        "dtensor_cfg": {},
        "megatron_cfg": {"enabled": True}
        | {
            key: options[key]
            for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
            if key in options
        },
    }
    if placement.get("enabled"):
        resources = {key: options[key] for key in ("gpus_per_node", "num_nodes") if key in options}
        teacher["colocated"] = {"enabled": False, "resources": resources}
    config.setdefault("teacher", teacher)
    estimator = at(config, ["grpo", "adv_estimator"])
    if isinstance(estimator, dict) and estimator.get("name") == "opd":  # set by the base recipe; opd reads no reward
        estimator.pop("minus_baseline", None)
        estimator |= {"normalize_rewards": False, "use_leave_one_out_baseline": False}
    del config["on_policy_distillation"]


def translate_scoring_environments(config: dict[str, Any], report: Report) -> None:
    """Write NeMo-RL's environments of a reward model and of several mathematical rewards in this project's parts."""
    environments = config.get("env")
    if report.release is None or not isinstance(environments, dict):
        return
    several = environments.get("math_multi_reward")
    if isinstance(several, dict) and "type" not in several:
        environments["math_multi_reward"] = {"type": TAGGED_ANSWERS}
    section = environments.get("reward_model")
    if not isinstance(section, dict) or "model_name" not in section or section.get("checkpoint_path") is not None:
        return
    names = {"model_name": "model_name", "precision": "precision", "batch_size": "micro_batch_size"}
    scorer = {new: section[old] for old, new in (names | {"max_model_len": "max_length"}).items() if old in section}
    tokenizer = section.get("tokenizer")
    if isinstance(tokenizer, dict) and tokenizer.get("name") is not None:
        scorer["tokenizer_name"] = tokenizer["name"]
    if isinstance(tokenizer, dict) and tokenizer.get("chat_template") not in (None, "default"):
        scorer["chat_template"] = tokenizer["chat_template"]
    if isinstance(tokenizer, dict) and tokenizer.get("chat_template_kwargs"):
        scorer["chat_template_kwargs"] = tokenizer["chat_template_kwargs"]
    resources = section["resources"] if isinstance(section.get("resources"), dict) else {}
    config["scorers"] = {"reward_model": {"type": "reward_model", **scorer}, **(config.get("scorers") or {})}
    environments["reward_model"] = {"scorers": ["reward_model"]}
    config.setdefault(
        "reward_model",
        {
            "enable": True,
            "enable_resource_pool": True,
            "n_gpus_per_node": resources.get("gpus_per_node", 1),
            "nnodes": resources.get("num_nodes", 1),
        },
    )
    if isinstance(section.get("dtensor_cfg"), dict):
        report.skip("env.reward_model.dtensor_cfg", "set", RANKS)


def translate_gym_options(config: dict[str, Any], report: Report) -> None:
    """Remove an effort shaping that shapes nothing."""
    section = at(config, ["env", "nemo_gym"])
    effort = section.get("effort_levels") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(effort, dict):
        return
    weight = effort.get("low_weight", 0)
    if not effort.get("low_string") or (isinstance(weight, int | float) and weight <= 0):
        del section["effort_levels"]


def translate_models(config: dict[str, Any], report: Report) -> None:
    """Rename a packing algorithm and TransformerEngine's Adam; leave out heads for further tokens without effect."""
    for key, model in find_named_models(config):
        _rename_fused_adam(f"{key}.optimizer", model.get("optimizer"), report)
        packing, megatron = model.get("sequence_packing"), model.get("megatron_cfg")
        if isinstance(packing, dict) and packing.get("algorithm") == "modified_ffd":
            packing["algorithm"] = "modified_first_fit_decreasing"
        if not isinstance(megatron, dict) or not megatron.get("mtp_num_layers"):
            continue
        if megatron.get("mtp_detach_heads") or megatron.get("mtp_loss_scaling_factor") == 0:
            report.skip("megatron_cfg.mtp_num_layers", megatron.pop("mtp_num_layers"), HEADS)


def _rename_fused_adam(key: str, optimizer: Any, report: Report) -> None:
    """Write TransformerEngine's Adam as torch's, which takes the same steps in float32."""
    if not isinstance(optimizer, dict) or optimizer.get("name") != FUSED_ADAM or report.release is None:
        return
    kwargs = optimizer["kwargs"] if isinstance(optimizer.get("kwargs"), dict) else {}
    for name in [name for name in kwargs if name not in ADAM_KWARGS]:
        report.skip(f"{key}.kwargs.{name}", kwargs.pop(name), FLOAT32)
    optimizer["name"] = "torch.optim.AdamW"
    optimizer["kwargs"] = {"lr": 1e-3, "weight_decay": 0.0} | kwargs  # if torch's defaults differ
    report.skip(f"{key}.name", FUSED_ADAM, FLOAT32)


def translate_variables(config: dict[str, Any], report: Report) -> None:
    """Leave out single values beside the sections, which interpolations have read, and a dataset that is not read."""
    if report.release is None:
        return
    for name in [name for name, value in config.items() if isinstance(value, str | int | float)]:
        report.skip(name, config.pop(name), VARIABLE)
    data = config.get("data")
    if isinstance(data, dict) and "train" in data and "dataset_name" in data:
        report.skip("data.dataset_name", data.pop("dataset_name"), UNREAD)


def translate_ranking(config: dict[str, Any], report: Report) -> None:
    """Rank no checkpoints by a validation that never runs, as NeMo-RL does with a warning."""
    checkpointing, data = config.get("checkpointing"), config.get("data")
    section = next((config[family] for family in VALIDATED if isinstance(config.get(family), dict)), None)
    if report.release is None or not isinstance(checkpointing, dict) or section is None:
        return
    metric = checkpointing.get("metric_name")
    has_data = not isinstance(data, dict) or bool(data.get("validation")) or _splits(data)
    validates = has_data and (section.get("val_period") != 0 or section.get("val_at_end"))
    if str(metric).startswith("val:") and not validates:
        checkpointing["metric_name"] = None
        report.skip("checkpointing.metric_name", metric, UNRANKED)


def _splits(data: dict[str, Any]) -> bool:
    """Return whether rows of a training dataset are held out."""
    sections = [data.get("default"), *(data["train"] if isinstance(data.get("train"), list) else [data.get("train")])]
    return any(one.get("split_validation_size") for one in sections if isinstance(one, dict))


STEPS: tuple[Callable[[dict[str, Any], Report], None], ...] = (
    translate_single_controller,
    translate_teachers_by_agent,
    translate_scoring_environments,
    translate_gym_options,
    translate_models,
    translate_variables,
)
