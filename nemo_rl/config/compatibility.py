"""NeMo-RL's recipe keys that this project does not have, in one table.

A key is *inert* with values that ask for nothing special: those are removed silently. With another value it is ignored
with a note, refused with the reason, or left for the schema.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nemo_rl.config.keys import Path, dotted
from nemo_rl.config.policy import AUTO, BACKEND_SECTIONS
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    key: str  # dotted; `*` is any key, items of lists included
    inert: tuple[object, ...] | None  # None: every value
    otherwise: Literal["note", "refuse", "keep"]
    text: str = ""


def dropped(key: str) -> Rule:
    """Return the rule of a key without meaning here, whatever its value."""
    return Rule(key, None, "note")


def ignored(key: str, note: str, *inert: object) -> Rule:
    """Return the rule of a key that is not needed here; noted once when it asks for something."""
    return Rule(key, inert, "note", note)


def rejected(key: str, reason: str, *inert: object) -> Rule:
    """Return the rule of a key that is not supported; null and the inert values are accepted."""
    return Rule(key, (None, *inert), "refuse", reason)


def defaulted(key: str, *inert: object) -> Rule:
    """Return the rule of NeMo-RL's way of writing our default; other values are left for the schema."""
    return Rule(key, inert, "keep")


_KEY = "policy.dtensor_cfg.lora_cfg"

LORA_RULES = (
    rejected(f"{_KEY}.dropout", "dropout is off: log-probs are those of the sampled model", 0),
    dropped(f"{_KEY}.dropout_position"),
    ignored(f"{_KEY}.use_triton", "adapters are peft's, which has no kernels", None, False),
    ignored(f"{_KEY}.lora_dtype", "adapters are float32", None, "float32"),
    rejected(f"{_KEY}.use_dora", "adapters are plain LoRA", False),
    defaulted(f"{_KEY}.target_modules", None),
    defaulted(f"{_KEY}.exclude_modules", None),
    ignored("checkpointing.is_peft", f"{_KEY}.enabled says whether there are adapters", None, False),
    dropped("checkpointing.peft_config"),
)


MEGATRON = "megatron_cfg"  # of `policy`, and of each teacher
_NO_EXPERTS = "models with experts are not mapped to Megatron"

MEGATRON_RULES: tuple[Rule, ...] = (
    rejected(
        f"{MEGATRON}.sequence_parallel",
        "layers have torch's norms, which Megatron gives whole sequences only",
        False,
    ),
    rejected(f"{MEGATRON}.context_parallel_size", "sequences are not split over ranks", 1),
    rejected(f"{MEGATRON}.expert_model_parallel_size", _NO_EXPERTS, 1),
    rejected(f"{MEGATRON}.expert_tensor_parallel_size", _NO_EXPERTS, 1),
    rejected(f"{MEGATRON}.peft.enabled", "all weights are trained", False),
    dropped(f"{MEGATRON}.peft"),
    rejected(f"{MEGATRON}.fp8_cfg.enabled", "layers compute in float32 or bfloat16", False),
    dropped(f"{MEGATRON}.fp8_cfg"),
    rejected(f"{MEGATRON}.mtp_num_layers", "one token is predicted at a time", 0),
    rejected(f"{MEGATRON}.env_vars", "set them in the environment of the command", {}),
    dropped(f"{MEGATRON}.converter_type"),  # the mapping follows from the model
    dropped(f"{MEGATRON}.force_reconvert_from_hf"),  # weights are read from Hugging Face's files each time
    dropped(f"{MEGATRON}.empty_unused_memory_level"),
    dropped(f"{MEGATRON}.defer_fp32_logits"),  # logits are made a chunk at a time
    dropped(f"{MEGATRON}.freeze_moe_router"),
    dropped(f"{MEGATRON}.track_moe_metrics"),
    *(
        dropped(f"{MEGATRON}.moe_{name}")
        for name in (
            "router_dtype",
            "router_load_balancing_type",
            "router_bias_update_rate",
            "router_enable_expert_bias",
            "permute_fusion",
            "per_layer_logging",
            "enable_deepep",
            "token_dispatcher_type",
            "shared_expert_overlap",
            "grouped_gemm",
            "pad_experts_for_cuda_graph_inference",
        )
    ),
    *(
        ignored(f"{MEGATRON}.{name}", "layers are made of torch's own kernels", None, True, False)
        for name in ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
    ),
    dropped(f"{MEGATRON}.optimizer.bf16"),
    dropped(f"{MEGATRON}.optimizer.params_dtype"),
    rejected(f"{MEGATRON}.optimizer.fp16", "layers compute in float32 or bfloat16", False),
    dropped(f"{MEGATRON}.optimizer.clip_grad"),  # policy.max_grad_norm, which NeMo-RL's recipes refer to
    ignored(
        f"{MEGATRON}.optimizer.use_distributed_optimizer",
        "each data parallel rank keeps the whole state of the optimizer",
        None,
        False,
    ),
    ignored(
        f"{MEGATRON}.optimizer.use_precision_aware_optimizer",
        "the optimizer's state is float32",
        None,
        False,
    ),
    rejected(
        f"{MEGATRON}.optimizer.optimizer_cpu_offload",
        "the optimizer's state stays where the weights are",
        False,
    ),
    dropped(f"{MEGATRON}.optimizer.optimizer_offload_fraction"),
    rejected(f"{MEGATRON}.scheduler.weight_decay_incr_style", "the weight decay stays", "constant"),
    dropped(f"{MEGATRON}.scheduler.start_weight_decay"),
    dropped(f"{MEGATRON}.scheduler.end_weight_decay"),
    ignored(
        f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather",
        "weights are not gathered",
        None,
        False,
    ),
    dropped(f"{MEGATRON}.distributed_data_parallel_config.average_in_collective"),
    dropped(f"{MEGATRON}.distributed_data_parallel_config.use_distributed_optimizer"),
    rejected(
        f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp",
        "policy.dtensor_cfg is FSDP2",
        False,
    ),
    dropped(f"{MEGATRON}.distributed_data_parallel_config.data_parallel_sharding_strategy"),
)


def choose_backend(config: dict[str, Any]) -> None:
    """Remove, in place, the keys of the backend that is off; NeMo-RL's recipes have both sections.

    Without a `backend` it is Megatron where `megatron_cfg.enabled`, whatever `dtensor_cfg.enabled` says.
    """
    teachers = config.get("teachers")
    task_teachers = teachers.values() if isinstance(teachers, dict) else ()
    for model in (config.get("policy"), config.get("teacher"), *task_teachers):
        if not isinstance(model, dict):
            continue
        megatron, dtensor = model.get("megatron_cfg"), model.get("dtensor_cfg")
        chosen = model.get("backend", AUTO)
        is_on = isinstance(megatron, dict) and megatron.get("enabled")
        if not (is_on if chosen == AUTO else BACKEND_SECTIONS.get(chosen) == "megatron_cfg"):
            model.pop("megatron_cfg", None)
        elif isinstance(dtensor, dict):
            dtensor.pop("enabled", None)


# NeMo-RL accepts these beside `adv_estimator` and inside it. They are moved layer by layer, so that a later one wins.
MOVED_KEYS = {
    "grpo.normalize_rewards": "grpo.adv_estimator.normalize_rewards",
    "grpo.use_leave_one_out_baseline": "grpo.adv_estimator.use_leave_one_out_baseline",
}


DATASET_KEYS = ("train", "validation", "input")
RESPONSE_DATASETS, NEMO_GYM_DATASET = ("ResponseDataset", "openai_format"), "NemoGymDataset"
NO_TP = "the policy is parallel over data and tensors alone"
NO_FP8 = "engines run in bfloat16 or float32"
ONE_ENGINE = "an engine is parallel over tensors alone"

# NeMo-RL writes a whole policy section under `teacher`: what only training or sampling reads has no meaning there.
TEACHER_RULES = (
    *map(dropped, (
        "train_global_batch_size", "train_micro_batch_size", "generation_batch_size", "max_total_sequence_length",
        "max_grad_norm", "optimizer", "scheduler", "generation", "refit_buffer_size_gb",
        "sequence_packing.sequence_length_round", "make_sequence_length_divisible_by",
        "offload_optimizer_for_logprob", "draft", "dtensor_cfg._v2", "dtensor_cfg.model_save_format",
        "dtensor_cfg.save_consolidated", "dtensor_cfg.single_rank_consolidation",
        "dtensor_cfg.consolidation_timeout_minutes", "dtensor_cfg.clear_cache_every_n_steps",
        "dtensor_cfg.automodel_kwargs", "dtensor_cfg.lora_cfg", "megatron_cfg.activation_checkpointing",
        "megatron_cfg.optimizer", "megatron_cfg.scheduler", "megatron_cfg.distributed_data_parallel_config",
        "megatron_cfg.peft",
    )),
    defaulted("tokenizer.chat_template", "default"),
    defaulted("tokenizer.chat_template_kwargs", None),
    defaulted("hf_config_overrides", None),
    defaulted("logprob_batch_size", None),
    defaulted("sequence_packing", None),
    defaulted("dynamic_batching", None),
    rejected("dtensor_cfg.enabled", "without megatron_cfg.enabled it is the teacher's backend", True),
    *(rejected(f"dtensor_cfg.{key}", NO_TP, *inert) for key, *inert in (
        ("sequence_parallel", False), ("context_parallel_size", 1), ("expert_parallel_size", 1),
        ("custom_parallel_plan",),
    )),
    rejected("dtensor_cfg.env_vars", "set them in the environment of the command"),
    *MEGATRON_RULES,
    rejected("reward_model_cfg.enabled", "a teacher gives log-probs of tokens", False),
    dropped("reward_model_cfg"),
    rejected("is_vlm", "only text is trained on", False),
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    *(replace(rule, key=f"{section}.{rule.key}") for section in ("teacher", "teachers.*") for rule in TEACHER_RULES),
    # grpo
    ignored(
        "grpo.skip_reference_policy_logprobs_calculation",
        "the reference's log-probs are computed exactly when something reads them",
        None,
        False,
    ),
    ignored("grpo.calculate_advantages_on_gpu", "advantages are computed where the batch lies", None, False),
    rejected("grpo.reward_shaping.stop_properly_penalty_coef", "use grpo.overlong_filtering or the overlong penalty"),
    rejected("grpo.stop_at_validation_metric", "end a run with grpo.max_num_steps"),
    dropped("grpo.stop_at_validation_threshold"),
    rejected("grpo.algorithm", "only grpo and its estimators", "grpo"),
    defaulted("grpo.val_batch_size", None),
    defaulted("distillation.val_batch_size", None),
    defaulted("grpo.reward_shaping", None),
    defaulted("grpo.reward_scaling", None),
    defaulted("grpo.adv_estimator", None),
    defaulted("grpo.adv_estimator.reward_weights", {}),
    defaulted("reward_penalties", None),
    defaulted("reward_penalties.token_ids", None),
    defaulted("reward_penalties.token_ids.unwanted", None),
    # policy
    defaulted("policy.tokenizer.chat_template", "default"),
    defaulted("policy.tokenizer.chat_template_kwargs", None),
    defaulted("policy.hf_config_overrides", None),
    defaulted("policy.optimizer", None),
    ignored("policy.generation_batch_size", "the hf engine batches the requests that it receives", 32, None),
    ignored("policy.offload_optimizer_for_logprob", "the optimizer's state stays where it is", None, False),
    ignored("policy.refit_buffer_size_gb", "weights go tensor by tensor, or in chunks of 64 MiB", None),
    dropped("policy.make_sequence_length_divisible_by"),
    rejected("policy.dtensor_cfg.enabled", "without policy.megatron_cfg.enabled it is the training backend", True),
    dropped("policy.dtensor_cfg._v2"),
    rejected("policy.dtensor_cfg.sequence_parallel", NO_TP, False),
    rejected("policy.dtensor_cfg.context_parallel_size", NO_TP, 1),
    rejected("policy.dtensor_cfg.expert_parallel_size", NO_TP, 1),
    rejected("policy.dtensor_cfg.custom_parallel_plan", NO_TP),
    ignored("policy.dtensor_cfg.clear_cache_every_n_steps", "the allocator's cache is left alone", None),
    rejected("policy.dtensor_cfg.env_vars", "set them in the environment of the command"),
    rejected("policy.dtensor_cfg.automodel_kwargs", "models are those of transformers", {}),
    *LORA_RULES,
    dropped("policy.sequence_packing.sequence_length_round"),  # a pack has no padding
    defaulted("policy.sequence_packing", None),
    defaulted("policy.dynamic_batching", None),
    rejected("policy.reward_model_cfg.enabled", "examples/run_rm.py trains reward models", False),
    dropped("policy.reward_model_cfg"),
    rejected("policy.draft.enabled", "no draft model is trained", False),
    dropped("policy.draft"),
    rejected("policy.router_replay.enabled", "experts are routed again in training", False),
    dropped("policy.router_replay"),
    rejected("policy.is_vlm", "only text is trained on", False),
    *(replace(rule, key=f"policy.{rule.key}") for rule in MEGATRON_RULES),
    # policy.generation
    dropped("policy.generation.model_name"),
    dropped("policy.generation._pad_token_id"),
    dropped("policy.generation.mcore_generation_config"),
    dropped("policy.generation.sglang_cfg"),
    rejected("policy.generation.min_p", "the trainer cannot reproduce it", 0),
    defaulted("policy.generation.top_k", -1),
    defaulted("policy.generation.vllm_kwargs", None),
    ignored("policy.generation.vllm_cfg.async_engine", "the engine is always asynchronous", None, True, False),
    rejected("policy.generation.vllm_cfg.pipeline_parallel_size", ONE_ENGINE, 1),
    rejected("policy.generation.vllm_cfg.expert_parallel_size", ONE_ENGINE, 1),
    rejected("policy.generation.vllm_cfg.enable_expert_parallel", ONE_ENGINE, False),
    rejected("policy.generation.vllm_cfg.kv_cache_dtype", NO_FP8, "auto"),
    ignored("policy.generation.vllm_cfg.load_format", "the engine starts from the policy's files", None, "auto"),
    rejected("policy.generation.vllm_cfg.is_mx", NO_FP8, False),
    dropped("policy.generation.vllm_cfg.use_deep_gemm"),
    dropped("policy.generation.vllm_cfg.num_last_layers_in_bf16"),
    dropped("policy.generation.vllm_cfg.num_first_layers_in_bf16"),
    dropped("policy.generation.vllm_cfg.quantization_ignored_layer_kws"),
    dropped("policy.generation.vllm_cfg.use_activation_pow2_scale"),
    dropped("policy.generation.vllm_cfg.pow2_weight_scaling_factors"),
    dropped("policy.generation.vllm_cfg.skip_tokenizer_init"),
    dropped("policy.generation.vllm_cfg.use_tqdm"),
    dropped("policy.generation.vllm_cfg.enable_vllm_metrics_logger"),
    dropped("policy.generation.vllm_cfg.vllm_metrics_logger_interval"),
    rejected("policy.generation.vllm_cfg.expose_http_server", "rollouts call the engine themselves", False),
    dropped("policy.generation.vllm_cfg.http_server_serving_chat_kwargs"),
    rejected("policy.generation.vllm_cfg.logprobs_mode", "log-probs are those of the sampled distribution",
            "processed_logprobs"),
    # data
    ignored("data.num_workers", "rows are prepared once, in the trainer's process", None, 0, 1),
    rejected("data.use_multiple_dataloader", "the datasets of data.train are blended into one", False),
    dropped("data.num_prompts_per_dataloader"),
    rejected("data.dataset_name", "datasets are described in data.train and data.validation"),
    rejected("data.train_data_path", "write data.train.data_path"),
    rejected("data.val_data_path", "write data.validation.data_path"),
    rejected("data.prompt_file", "write data.default.prompt_file"),
    rejected("data.system_prompt_file", "write data.default.system_prompt_file"),
    rejected("data.*.split_validation_size", "describe the validation set in data.validation; data.disjoint keeps its "
            "prompts out of training", 0),
    defaulted("data.*.processor", "math_hf_data_processor", "math_data_processor", "nemo_gym_data_processor"),
    rejected("data.train_jsonl_fpath", "write data.train.data_path, with dataset_name: nemo_gym"),
    rejected("data.validation_jsonl_fpath", "write data.validation.data_path, with dataset_name: nemo_gym"),
    rejected("data.agent_name", "write data.default.agent_name"),
    defaulted("data.default", None),
    # env
    dropped("env.should_use_nemo_gym"),  # an entry of type nemo_gym says so
    dropped("env.should_log_nemo_gym_responses"),
    rejected("env.should_mask_flagged_samples", "mask_sample of NeMo Gym's replies is honoured", True),
    rejected("env.*.math_verify_impl", "answers are compared by math-verify", "hf_math_verify"),
    rejected("env.*.verifier_type", "write env.<name>.type", "math"),
    # checkpointing
    rejected("checkpointing.model_save_format", "weights are saved as Hugging Face safetensors", "safetensors"),
    ignored("checkpointing.save_consolidated", "weights are saved as Hugging Face files", None, True, False),
    dropped("checkpointing.model_cache_dir"),
    dropped("checkpointing.model_repo_id"),
    # logger
    rejected("logger.mlflow_enabled", "metrics go to metrics.jsonl, W&B and TensorBoard", False),
    rejected("logger.swanlab_enabled", "metrics go to metrics.jsonl, W&B and TensorBoard", False),
    dropped("logger.mlflow"),
    dropped("logger.swanlab"),
    dropped("logger.tensorboard"),
    ignored("logger.monitor_gpus", "W&B records the machine's own metrics", None, True, False),
    dropped("logger.gpu_monitoring"),
    # cluster
    dropped("cluster.master_port_range_low"),
    dropped("cluster.master_port_range_high"),
    dropped("cluster.segment_size"),
)  # fmt: skip


SFT_RULES: tuple[Rule, ...] = (
    ignored("policy.generation", "supervised training samples nothing", None),
    dropped("data.add_bos"),  # the chat template's text is what is trained
    dropped("data.add_eos"),
    dropped("data.add_generation_prompt"),
    defaulted("data.*.chat_key", "messages"),
    defaulted("data.*.tool_key", "tools"),
    defaulted("data.*.system_key", None),
    defaulted("data.*.system_prompt", None),
    *RULES,
)


# NeMo-RL's switches of `loss_fn`: the loss that each turns on (none of them: ppo), and the options that it excludes.
_RATIO_OPTIONS = ("force_on_policy_ratio", "ratio_clip_c")
LOSS_SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "use_cispo": ("cispo", _RATIO_OPTIONS),
    "disable_ppo_ratio": ("reinforce", _RATIO_OPTIONS),
    "sequence_level_importance_ratios": ("gspo", ()),
}


def translate_loss_switches(config: dict[str, Any]) -> None:
    """Write NeMo-RL's switches of `loss_fn` as its type, in place; raises ConfigError where they contradict it."""
    loss = config.get("loss_fn")
    if not isinstance(loss, dict):
        return
    switches = {name: loss.pop(name) for name in LOSS_SWITCHES if name in loss}
    _check_loss_switches(switches, loss)
    for switch in (name for name, is_on in switches.items() if is_on and "type" not in loss):
        loss["type"] = LOSS_SWITCHES[switch][0]
        if loss["type"] == "gspo" and loss.get("token_level_loss", True):
            problem = f"{switch} (GSPO) needs false: one ratio a sequence"
            raise ConfigError("loss_fn.token_level_loss", True, problem)


def _check_loss_switches(switches: dict[str, Any], loss: dict[str, Any]) -> None:
    """Raise ConfigError for switches that exclude each other, an option of the loss, or its type."""
    for switch, is_on in switches.items():
        if not isinstance(is_on, bool):
            raise ConfigError(f"loss_fn.{switch}", is_on, "must be true or false")
        loss_type, excluded = LOSS_SWITCHES[switch]
        others = {name: value for name, value in switches.items() if name != switch}
        others |= {name: loss[name] for name in excluded if name in loss}
        for name, value in others.items():
            if is_on and value:
                allowed = "null" if name == "ratio_clip_c" else "false"
                raise ConfigError(f"loss_fn.{name}", value, f"has no meaning with loss_fn.{switch}; allowed: {allowed}")
        named = loss.get("type")
        if named is not None and is_on != (named == loss_type):
            problem = f"contradicts loss_fn.type: {named}; write loss_fn.type alone"
            raise ConfigError(f"loss_fn.{switch}", is_on, problem)


def current_key(key: str) -> str:
    """Return the key that now holds NeMo-RL's `key`."""
    return MOVED_KEYS.get(key, key)


def apply_moved_keys(layer: dict[str, Any]) -> None:
    """Move the keys of MOVED_KEYS in one layer, in place; where both stand, the one inside wins."""
    for old, new in MOVED_KEYS.items():
        section, name = old.split(".")
        _, inner, _ = new.split(".")
        values = layer.get(section)
        if isinstance(values, dict) and name in values:
            value = values.pop(name)
            target = values.get(inner)
            if not isinstance(target, dict):
                target = values[inner] = {}
            target.setdefault(name, value)


def remove_unsupported_keys(config: dict[str, Any], rules: Sequence[Rule] = RULES) -> None:
    """Remove the table's keys from a resolved configuration, in place; raises ConfigError for a refused one."""
    choose_backend(config)
    for rule in rules:
        for parent, name, path in list(_find(config, rule.key.split("."))):
            value = parent[name]
            is_inert = rule.inert is None or value in rule.inert
            if not is_inert and rule.otherwise == "refuse":
                allowed = ", ".join(_format_value(v) for v in (rule.inert or ()) if v is not None)
                hint = f"; only {allowed} is accepted" if allowed else ""
                raise ConfigError(dotted(path), value, f"not available: {rule.text}{hint}")
            if not is_inert and rule.otherwise == "keep":
                continue
            if not is_inert:
                logger.info("%s = %r has no effect: %s", dotted(path), value, rule.text)
            del parent[name]


def normalize_dataset_names(config: dict[str, Any]) -> None:
    """Rewrite NeMo-RL's `dataset_name: ResponseDataset`, or `openai_format`, to jsonl or huggingface by its data_path,
    and `NemoGymDataset` to nemo_gym; in place."""
    data = config.get("data")
    if not isinstance(data, dict):
        return
    default = data.get("default") if isinstance(data.get("default"), dict) else {}
    assert isinstance(default, dict)
    for one in (default, *(one for name in DATASET_KEYS for one in _as_list(data.get(name)))):
        if isinstance(one, dict) and one.get("dataset_name") == NEMO_GYM_DATASET:
            one["dataset_name"] = "nemo_gym"
    for name in DATASET_KEYS:
        for one in _as_list(data.get(name)):
            if isinstance(one, dict) and (one.get("dataset_name") or default.get("dataset_name")) in RESPONSE_DATASETS:
                path = str(one.get("data_path") or default.get("data_path"))
                one["dataset_name"] = "jsonl" if path.endswith((".jsonl", ".json")) else "huggingface"
    if default.get("dataset_name") in RESPONSE_DATASETS:
        del default["dataset_name"]


def normalize_metric_name(config: dict[str, Any]) -> None:
    """Rewrite NeMo-RL's `checkpointing.metric_name: val:val_loss` to val:loss; in place."""
    section = config.get("checkpointing")
    if isinstance(section, dict) and section.get("metric_name") == "val:val_loss":
        section["metric_name"] = "val:loss"


def _as_list(sets: object) -> list[object]:
    return sets if isinstance(sets, list) else [sets]


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _find(node: Any, parts: Path, path: tuple[str | int, ...] = ()) -> Iterator[tuple[dict[str, Any], str, Path]]:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _find(item, parts, (*path, index))
        return
    if not isinstance(node, Mapping):
        return
    for name in list(node) if parts[0] == "*" else [parts[0]]:
        if name not in node:
            continue
        if len(parts) == 1:
            yield node, name, (*path, name)  # pyright: ignore[reportReturnType]
        else:
            yield from _find(node[name], parts[1:], (*path, name))
