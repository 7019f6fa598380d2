"""NeMo-RL's recipe keys that this project does not have: the one table of what happens to them.

A key is *inert* with values that ask for nothing we do not do anyway: those are taken out silently. With another
value it is ignored with a note, refused with the reason, or left for the schema.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl.config.keys import Path, dotted
from nemo_rl.config.lora_keys import LORA_RULES
from nemo_rl.config.megatron_keys import MEGATRON_RULES, choose_backend
from nemo_rl.config.rules import Rule, defaulted, ignored, refused, silent
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

# NeMo-RL has these beside `adv_estimator` and inside it. They are moved in every layer, so that a later one wins.
MOVED_KEYS = {
    "grpo.normalize_rewards": "grpo.adv_estimator.normalize_rewards",
    "grpo.use_leave_one_out_baseline": "grpo.adv_estimator.use_leave_one_out_baseline",
}


SET_NAMES = ("train", "validation", "input")
RESPONSE_DATASETS, NEMO_GYM_DATASET = ("ResponseDataset", "openai_format"), "NemoGymDataset"
NO_TP = "the policy is parallel over data and tensors alone"
NO_FP8 = "engines run in bfloat16 or float32"
ONE_ENGINE = "an engine is parallel over tensors alone"

# NeMo-RL writes a whole policy section under `teacher`: what only training or sampling reads has no meaning there.
TEACHER_RULES = (
    *map(silent, (
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
    refused("dtensor_cfg.enabled", "without megatron_cfg.enabled it is the teacher's backend", True),
    *(refused(f"dtensor_cfg.{key}", NO_TP, *inert) for key, *inert in (
        ("sequence_parallel", False), ("context_parallel_size", 1), ("expert_parallel_size", 1),
        ("custom_parallel_plan",),
    )),
    refused("dtensor_cfg.env_vars", "set them in the environment of the command"),
    *MEGATRON_RULES,
    refused("reward_model_cfg.enabled", "a teacher gives log-probs of tokens", False),
    silent("reward_model_cfg"),
    refused("is_vlm", "only text is trained on", False),
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
    refused("grpo.reward_shaping.stop_properly_penalty_coef", "use grpo.overlong_filtering or the overlong penalty"),
    refused("grpo.stop_at_validation_metric", "end a run with grpo.max_num_steps"),
    silent("grpo.stop_at_validation_threshold"),
    refused("grpo.algorithm", "only grpo and its estimators", "grpo"),
    defaulted("grpo.val_batch_size", None),
    defaulted("distillation.val_batch_size", None),
    defaulted("grpo.reward_shaping", None),
    defaulted("grpo.reward_scaling", None),
    defaulted("grpo.adv_estimator", None),
    defaulted("reward_penalties", None),
    defaulted("reward_penalties.token_ids", None),
    defaulted("reward_penalties.token_ids.unwanted", None),
    # policy
    defaulted("policy.tokenizer.chat_template", "default"),
    defaulted("policy.tokenizer.chat_template_kwargs", None),
    defaulted("policy.hf_config_overrides", None),
    defaulted("policy.optimizer", None),
    ignored("policy.generation_batch_size", "the hf engine takes what it is asked for", 32, None),
    ignored("policy.offload_optimizer_for_logprob", "the optimizer's state stays where it is", None, False),
    ignored("policy.refit_buffer_size_gb", "weights go tensor by tensor, or in chunks of 64 MiB", None),
    silent("policy.make_sequence_length_divisible_by"),
    refused("policy.dtensor_cfg.enabled", "without policy.megatron_cfg.enabled it is the training backend", True),
    silent("policy.dtensor_cfg._v2"),
    refused("policy.dtensor_cfg.sequence_parallel", NO_TP, False),
    refused("policy.dtensor_cfg.context_parallel_size", NO_TP, 1),
    refused("policy.dtensor_cfg.expert_parallel_size", NO_TP, 1),
    refused("policy.dtensor_cfg.custom_parallel_plan", NO_TP),
    ignored("policy.dtensor_cfg.clear_cache_every_n_steps", "the allocator's cache is left alone", None),
    refused("policy.dtensor_cfg.env_vars", "set them in the environment of the command"),
    refused("policy.dtensor_cfg.automodel_kwargs", "models are those of transformers", {}),
    *LORA_RULES,
    silent("policy.sequence_packing.sequence_length_round"),  # a pack has no padding
    defaulted("policy.sequence_packing", None),
    defaulted("policy.dynamic_batching", None),
    refused("policy.reward_model_cfg.enabled", "examples/run_rm.py trains reward models", False),
    silent("policy.reward_model_cfg"),
    refused("policy.draft.enabled", "no draft model is trained", False),
    silent("policy.draft"),
    refused("policy.router_replay.enabled", "experts are routed anew in training", False),
    silent("policy.router_replay"),
    refused("policy.is_vlm", "only text is trained on", False),
    *(replace(rule, key=f"policy.{rule.key}") for rule in MEGATRON_RULES),
    # policy.generation
    silent("policy.generation.model_name"),
    silent("policy.generation._pad_token_id"),
    silent("policy.generation.mcore_generation_config"),
    silent("policy.generation.sglang_cfg"),
    refused("policy.generation.min_p", "the trainer cannot reproduce it", 0),
    defaulted("policy.generation.top_k", -1),
    defaulted("policy.generation.vllm_kwargs", None),
    ignored("policy.generation.vllm_cfg.async_engine", "the engine is always asynchronous", None, True, False),
    refused("policy.generation.vllm_cfg.pipeline_parallel_size", ONE_ENGINE, 1),
    refused("policy.generation.vllm_cfg.expert_parallel_size", ONE_ENGINE, 1),
    refused("policy.generation.vllm_cfg.enable_expert_parallel", ONE_ENGINE, False),
    refused("policy.generation.vllm_cfg.kv_cache_dtype", NO_FP8, "auto"),
    ignored("policy.generation.vllm_cfg.load_format", "the engine starts from the policy's files", None, "auto"),
    refused("policy.generation.vllm_cfg.is_mx", NO_FP8, False),
    silent("policy.generation.vllm_cfg.use_deep_gemm"),
    silent("policy.generation.vllm_cfg.num_last_layers_in_bf16"),
    silent("policy.generation.vllm_cfg.num_first_layers_in_bf16"),
    silent("policy.generation.vllm_cfg.quantization_ignored_layer_kws"),
    silent("policy.generation.vllm_cfg.use_activation_pow2_scale"),
    silent("policy.generation.vllm_cfg.pow2_weight_scaling_factors"),
    silent("policy.generation.vllm_cfg.skip_tokenizer_init"),
    silent("policy.generation.vllm_cfg.use_tqdm"),
    silent("policy.generation.vllm_cfg.enable_vllm_metrics_logger"),
    silent("policy.generation.vllm_cfg.vllm_metrics_logger_interval"),
    refused("policy.generation.vllm_cfg.expose_http_server", "rollouts call the engine themselves", False),
    silent("policy.generation.vllm_cfg.http_server_serving_chat_kwargs"),
    refused("policy.generation.vllm_cfg.logprobs_mode", "log-probs are those of the sampled distribution",
            "processed_logprobs"),
    # data
    ignored("data.num_workers", "rows are prepared once, in the trainer's process", None, 0, 1),
    refused("data.use_multiple_dataloader", "the data sets of data.train are blended into one", False),
    silent("data.num_prompts_per_dataloader"),
    refused("data.dataset_name", "data sets are described in data.train and data.validation"),
    refused("data.train_data_path", "write data.train.data_path"),
    refused("data.val_data_path", "write data.validation.data_path"),
    refused("data.prompt_file", "write data.default.prompt_file"),
    refused("data.system_prompt_file", "write data.default.system_prompt_file"),
    refused("data.*.split_validation_size", "describe the validation set in data.validation; data.disjoint keeps its "
            "prompts out of training", 0),
    defaulted("data.*.processor", "math_hf_data_processor", "math_data_processor", "nemo_gym_data_processor"),
    refused("data.train_jsonl_fpath", "write data.train.data_path, with dataset_name: nemo_gym"),
    refused("data.validation_jsonl_fpath", "write data.validation.data_path, with dataset_name: nemo_gym"),
    refused("data.agent_name", "write data.default.agent_name"),
    defaulted("data.default", None),
    # env
    silent("env.should_use_nemo_gym"),  # an entry of type nemo_gym says so
    silent("env.should_log_nemo_gym_responses"),
    refused("env.should_mask_flagged_samples", "mask_sample of NeMo Gym's replies is honoured", True),
    refused("env.*.math_verify_impl", "answers are compared by math-verify", "hf_math_verify"),
    refused("env.*.verifier_type", "write env.<name>.type", "math"),
    # checkpointing
    refused("checkpointing.model_save_format", "weights are saved as Hugging Face safetensors", "safetensors"),
    ignored("checkpointing.save_consolidated", "weights are saved as Hugging Face files", None, True, False),
    silent("checkpointing.model_cache_dir"),
    silent("checkpointing.model_repo_id"),
    # logger
    refused("logger.mlflow_enabled", "metrics go to metrics.jsonl, W&B and TensorBoard", False),
    refused("logger.swanlab_enabled", "metrics go to metrics.jsonl, W&B and TensorBoard", False),
    silent("logger.mlflow"),
    silent("logger.swanlab"),
    silent("logger.tensorboard"),
    ignored("logger.monitor_gpus", "W&B records the machine's own metrics", None, True, False),
    silent("logger.gpu_monitoring"),
    # cluster
    silent("cluster.master_port_range_low"),
    silent("cluster.master_port_range_high"),
    silent("cluster.segment_size"),
)  # fmt: skip


SFT_RULES: tuple[Rule, ...] = (
    ignored("policy.generation", "supervised training samples nothing", None),
    silent("data.add_bos"),  # the chat template's text is what is trained
    silent("data.add_eos"),
    silent("data.add_generation_prompt"),
    defaulted("data.*.chat_key", "messages"),
    defaulted("data.*.tool_key", "tools"),
    defaulted("data.*.system_key", None),
    defaulted("data.*.system_prompt", None),
    *RULES,
)


def current_key(key: str) -> str:
    """The key that now holds what NeMo-RL calls `key`."""
    return MOVED_KEYS.get(key, key)


def move_keys(layer: dict[str, Any]) -> None:
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


def take_out(config: dict[str, Any], rules: Sequence[Rule] = RULES) -> None:
    """Take the table's keys out of a resolved configuration, in place; raises ConfigError for what is refused."""
    choose_backend(config)
    for rule in rules:
        for parent, name, path in list(_find(config, rule.key.split("."))):
            value = parent[name]
            is_inert = rule.inert is None or value in rule.inert
            if not is_inert and rule.otherwise == "refuse":
                allowed = ", ".join(_text(v) for v in (rule.inert or ()) if v is not None)
                hint = f"; only {allowed} is accepted" if allowed else ""
                raise ConfigError(dotted(path), value, f"not available: {rule.text}{hint}")
            if not is_inert and rule.otherwise == "keep":
                continue
            if not is_inert:
                logger.info("%s = %r has no effect: %s", dotted(path), value, rule.text)
            del parent[name]


def name_datasets(config: dict[str, Any]) -> None:
    """Write NeMo-RL's `dataset_name: ResponseDataset`, or `openai_format`, as jsonl or huggingface, by its data_path,
    and `NemoGymDataset` as nemo_gym; in place."""
    data = config.get("data")
    if not isinstance(data, dict):
        return
    default = data.get("default") if isinstance(data.get("default"), dict) else {}
    assert isinstance(default, dict)
    for one in (default, *(one for name in SET_NAMES for one in _listed(data.get(name)))):
        if isinstance(one, dict) and one.get("dataset_name") == NEMO_GYM_DATASET:
            one["dataset_name"] = "nemo_gym"
    for name in SET_NAMES:
        for one in _listed(data.get(name)):
            if isinstance(one, dict) and (one.get("dataset_name") or default.get("dataset_name")) in RESPONSE_DATASETS:
                path = str(one.get("data_path") or default.get("data_path"))
                one["dataset_name"] = "jsonl" if path.endswith((".jsonl", ".json")) else "huggingface"
    if default.get("dataset_name") in RESPONSE_DATASETS:
        del default["dataset_name"]


def name_metric(config: dict[str, Any]) -> None:
    """Write NeMo-RL's `checkpointing.metric_name: val:val_loss` as val:loss; in place."""
    section = config.get("checkpointing")
    if isinstance(section, dict) and section.get("metric_name") == "val:val_loss":
        section["metric_name"] = "val:loss"


def _listed(sets: object) -> list[object]:
    return sets if isinstance(sets, list) else [sets]


def _text(value: object) -> str:
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
