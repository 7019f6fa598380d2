"""Recipes of NeMo-RL mean the same here: `nemo_rl_meaning.py CHECKOUT [--seed N] [--count N] [-v]`.

CHECKOUT is a working tree of NeMo-RL, or any directory with its recipes. Of the recipes drawn by the seed (all with
--count 0), each is read twice: by OmegaConf, as NeMo-RL reads it, and by this project's loader, without
--allow-unsupported if that suffices; a missing data file is no obstacle. Every value of the first reading must be in
the second, at the same key or as RENAMED and SPECIAL say, unless a note names its key, or it is INERT: it cannot change
what is learnt. What NeMo-RL assumes where a recipe is silent is in ASSUMED. What remains is a silent difference; the
exit code is 1 if there is one.
"""

import argparse
import functools
import logging
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_rl.compat.tables import load_table
from nemo_rl.config import data, loading
from nemo_rl.config.data import DatasetConfig, resolve_dataset
from nemo_rl.data import row_sources
from nemo_rl.errors import CombinedConfigError, ConfigError

LOADERS = {
    "grpo": loading.load_config,
    "distillation": loading.load_distillation_config,
    "sft": loading.load_sft_config,
    "dpo": loading.load_dpo_config,
    "rm": loading.load_reward_model_config,
    "eval": loading.load_eval_config,
}
RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max,
}  # fmt: skip
ABSENT = object()
GYM = "env.nemo_gym."
SERVED_CHAT = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


@dataclass(slots=True)
class Finding:
    """The outcome of one recipe."""

    path: Path
    family: str
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


# --- NeMo-RL's reading ----------------------------------------------------------------------------------------------


def read_theirs(path: Path) -> dict[str, Any]:
    """Return a recipe resolved as NeMo-RL does: files of `defaults:` below it, `_override_` sections replace."""
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    plain = OmegaConf.to_container(OmegaConf.create(_merged(path)), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _merged(path: Path) -> dict[str, Any]:
    layer = OmegaConf.load(path)
    assert isinstance(layer, DictConfig)
    own: Any = OmegaConf.to_container(layer, resolve=False)
    names = own.get("defaults") or []
    below: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        below = _merge(below, _merged((path.parent / name).resolve()))
    return _merge(below, own)


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if above.get("_override_"):
        return {key: value for key, value in above.items() if key != "_override_"}
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _merge(below[key], value) if key in below else value
    return {key: value for key, value in merged.items() if key not in ("_override_", "defaults")}


def find_family(recipe: Mapping[str, Any]) -> str | None:
    return next((name for name in LOADERS if name in recipe), None)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key; lists and empty mappings are values."""
    if isinstance(value, dict) and value and ".".join(path) not in WHOLE:
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    else:
        yield ".".join(path), value


def at(value: Any, key: str) -> Any:
    for name in key.split("."):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            return ABSENT
    return value


# --- What the keys mean ---------------------------------------------------------------------------------------------

# Their key -> ours, for the same value under another name; {family} is grpo or distillation.
RENAMED = {
    "grpo.num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    "eval.pass_k_value": "eval.k_value",
    "eval.save_path": "eval.output_dir",
    "generation.model_name": "policy.model_name",
    "generation.temperature": "policy.generation.temperature",
    "generation.top_p": "policy.generation.top_p",
    "generation.top_k": "policy.generation.top_k",
    "generation.max_new_tokens": "policy.generation.max_new_tokens",
    "generation.stop_strings": "policy.generation.stop_strings",
    "generation.stop_token_ids": "policy.generation.stop_token_ids",
    "generation.vllm_cfg.max_model_len": "server.max_model_len",
    "generation.vllm_cfg.tensor_parallel_size": "server.tensor_parallel_size",
    "generation.vllm_cfg.gpu_memory_utilization": "server.gpu_memory_utilization",
    "generation.vllm_cfg.enforce_eager": "server.enforce_eager",
    "generation.vllm_cfg.precision": "policy.precision",
    "tokenizer.name": "policy.tokenizer.name",
    "tokenizer.chat_template": "policy.tokenizer.chat_template",
    "tokenizer.chat_template_kwargs": "policy.tokenizer.chat_template_kwargs",
    "env.nemo_gym.thinking_tags": "reward_penalties.thinking_tags",
    "env.nemo_gym.invalid_tool_call_patterns": "reward_penalties.invalid_tool_call_patterns",
}
METRICS = {"val:val_loss": "val:loss", "val_loss": "val:loss", "val_reward": "val:reward",
           "val:val_reward": "val:reward", "val:total_reward/mean": "val:reward"}  # fmt: skip
# Keys by whose values nothing is learnt otherwise: where things run and are written, kernels, ports, displays, caches;
# what only other backends or engines read; or nothing reads in any release.
INERT = (
    "*.generation_batch_size", "*.make_sequence_length_divisible_by", "*._v2", "*.sequence_length_round",
    "*.use_fastokens", "*.model_save_format", "*.save_consolidated", "*.async_save", "*.ckpt_assume_constant_structure",
    "*.empty_unused_memory_level", "*.force_reconvert_from_hf", "*.converter_type", "*.defer_fp32_logits",
    "*.cuda_graph_*", "*.offload_modules", "*.recompute_*", "*.use_gloo_process_groups", "*.track_moe_metrics",
    "*.moe_permute_fusion", "*.moe_per_layer_logging", "*.moe_enable_deepep", "*.moe_token_dispatcher_type",
    "*.moe_shared_expert_overlap", "*.moe_grouped_gemm", "*.moe_flex_dispatcher_backend", "*.moe_hybridep_num_sms",
    "*.optimizer.bf16", "*.optimizer_offload_fraction", "*.overlap_cpu_optimizer_d2h_h2d", "*.overlap_param_gather",
    "*.average_in_collective", "*.data_parallel_sharding_strategy", "*.train_iters", "*.override_opt_param_scheduler",
    "*.fused_linear_logprobs_chunk_size", "*.linear_ce_fusion_chunk_size", "*.clear_memory_caches_before_refit",
    "*.lora_cfg.dropout_position", "*.automodel_kwargs.force_hf", "*.apply_rope_fusion", "*.bias_activation_fusion",
    "*.gradient_accumulation_fusion", "*.use_precision_aware_optimizer",
    "policy.generation.port_range_*", "policy.generation.refit_cfg.*", "policy.generation.refit_cfg",
    "policy.generation.mcore_generation_config.*", "policy.generation.real_quant_export_cpu_offload",
    "policy.generation.*.num_last_layers_in_bf16", "policy.generation.*.num_first_layers_in_bf16",
    "policy.generation.*.use_deep_gemm", "policy.generation.*.use_tqdm", "policy.generation.*.*metrics_logger*",
    "policy.generation.*.http_refit_*", "policy.generation.*.zmq_refit_*", "policy.generation.*.skip_tokenizer_init",
    "policy.generation.vllm_cfg.expose_http_server", "policy.generation.*.reset_encoder_cache_after_weight_update",
    "policy.generation.sglang_cfg.*", "policy.generation.trtllm_*", "policy.generation.dynamo_cfg.*",
    "policy.generation._pad_token_id", "policy.generation.model_name", "policy.generation.num_prompts_per_step",
    "data.num_workers", "data.use_preserving_dataset", "*.download_dir", "env.*.num_workers",
    "env.should_use_nemo_gym", "env.should_log_nemo_gym_responses", "logger.swanlab.*", "logger.mlflow.*",
    "logger.gpu_monitoring.*", "logger.tensorboard", "logger.wandb.log_nemo_gym_full_result_tables",
    "cluster.*port_range*", "checkpointing.ft_keep_latest_k", "grpo.deduplicate_multimodal_data",
    "grpo.debug_payload_metrics", "grpo.stop_at_validation_threshold", "*.quant_*", "*.disable_modelopt_layer_spec",
    "generation.num_prompts_per_step", "generation.colocated.*", "generation.vllm_cfg.*", "generation.vllm_kwargs*",
    "data.num_prompts_per_dataloader", "data.add_system_prompt", "grpo.best_at_k_*", "grpo.combined_training_*",
    "rm.val_at_end",  # the last step is always followed by a validation
    "env.reward_model.*",  # a scorer, which a test compares
    "*.async_engine", "*.quantization_ignored_layer_kws", "*.lora_cfg.use_triton", "generation.val_*",
    "teacher.megatron_cfg.distributed_data_parallel_config.*", "data.processor", "data.file_format",
    "grpo.skip_reference_policy_logprobs_calculation", "env.math_multi_reward.*",
    f"{SERVED_CHAT}.enable_auto_tools",
    "policy.generation.vllm_cfg.tool_parser_plugin", "policy.generation.vllm_cfg.reasoning_parser_plugin",
)  # fmt: skip
# Values that ask for nothing, of keys that this project does not have.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "*.expert_*parallel_size": (1,), "*.context_parallel_size": (1,), "*.pipeline_parallel_size": (1,),
    "*.dp_replicate_size": (1,), "*.kv_cache_dtype": ("auto",), "*.logprobs_mode": ("processed_logprobs",),
    "*.microbatch_order": ("packer",), "*.load_format": ("auto", "dummy"), "*.optimizer.params_dtype": ("float32",),
    "*.main_*_dtype": ("float32", "fp32"), "*.exp_avg*_dtype": ("float32", "fp32"), "*.attention_backend": ("auto",),
    "*.weight_decay_incr_style": ("constant",), "dpo.preference_loss": ("dpo",), "grpo.algorithm": ("grpo",),
    "*.checkpointing.model_save_format": ("safetensors",), "*.lora_cfg.dropout": (0, 0.0), "*.min_p": (0,),
    "grpo.dynamic_sampling_oversample_ratio": (1.0,), "*.distributed_executor_backend": ("ray", "mp"),
    "env.should_mask_flagged_samples": (True,), f"{GYM}num_gpu_nodes": (0,),
    "grpo.val_batch_size": (None,), "*.dtensor_cfg.enabled": (True,),
}  # fmt: skip
# Of a model that FSDP2 trains here in place of Megatron: its optimizer, at our key; its layout is told in one note.
SWITCHED_OPTIMIZER = {
    "lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps", "adam_beta1": "betas.0", "adam_beta2": "betas.1",
}  # fmt: skip
# Options of experts: a dense model has none, and for others megatron_models.py refuses or notes what they change.
EXPERTS = ("freeze_moe_router", "moe_router_*", "moe_aux_loss_coeff", "moe_pad_experts*", "mtp_*")
# Sections that nothing reads if they are off.
SWITCHED = (
    "policy.draft", "policy.router_replay", "data_plane", "policy.*.fp8_cfg", "policy.*.peft",
    "policy.dtensor_cfg.lora_cfg", "policy.dynamic_batching", "policy.sequence_packing", "policy.reward_model_cfg",
    "grpo.reward_shaping", "grpo.reward_scaling", "grpo.async_grpo", "on_policy_distillation",
)  # fmt: skip
ENV_VARS = ("policy.dtensor_cfg", "policy.megatron_cfg", "policy.generation.vllm_cfg")
WHOLE = ("async_rl.sampler", *(f"{section}.env_vars" for section in ENV_VARS))  # compared as one value
# Of a reward model, which is one process and always saved: the values that its schema does not have.
ONE_PROCESS: dict[str, tuple[Any, ...]] = {
    "policy.reward_model_cfg": (True, "bradley_terry"), "policy.dtensor_cfg": (1, True, False, None), "cluster": (1,),
    "checkpointing.enabled": (True,), "checkpointing.save_optimizer": (True,),
}  # fmt: skip
TRAINING = ("policy.optimizer", "policy.scheduler")
# Values that NeMo-RL's code or its base recipes of every release assume, at our key.
ASSUMED: dict[str, tuple[tuple[str, ...], Any]] = {
    "data.disjoint": (("grpo", "distillation", "sft", "dpo", "rm"), False),
    "data.overlong": (("grpo", "distillation", "sft", "dpo", "rm"), "mask"),
    "grpo.adv_estimator.min_std_share": (("grpo",), 0.0),
}


class Meaning:
    """One recipe in both readings, and what the loader said of it."""

    def __init__(self, theirs: dict[str, Any], config: Any, told: str, family: str) -> None:
        self.theirs, self.config, self.told, self.family = theirs, config, told, family
        self.ours = config.model_dump()
        megatron = at(theirs, "policy.megatron_cfg.enabled") is True
        self.off = "policy.dtensor_cfg" if megatron else "policy.megatron_cfg"
        self.is_megatron = megatron
        self.is_switched = "policy: Megatron does not map" in told

    def judge(self, key: str, value: Any) -> str:
        """Return what becomes of one of their values: equal, told, inert; or silent."""
        if self._is_off(key, value):
            return "off"
        if any(fnmatchcase(key, pattern) for pattern in INERT) or self._is_option_of_experts(key):
            return "inert"
        if self._is_equal(key, value):
            return "equal"
        return "told" if self.is_told(key) else "silent"

    def _is_off(self, key: str, value: Any) -> bool:
        if key.startswith(f"{self.off}.") and not key.endswith("lora_cfg.enabled"):
            return True
        if self.is_megatron and key.startswith(TRAINING) and at(self.theirs, "policy.megatron_cfg.optimizer"):
            return True
        teacher = key.partition(".")[0] == "teacher"
        if teacher and not re.match(r"teacher\.(model_name|tokenizer|precision|\w+_cfg\.\w*parallel)", key):
            return True
        if teacher:
            on = at(self.theirs, "teacher.megatron_cfg.enabled") is True
            if key.startswith(f"teacher.{'dtensor_cfg' if on else 'megatron_cfg'}."):
                return True
        for pattern in SWITCHED:
            parts = key.split(".")[: pattern.count(".") + 1]
            section = ".".join(parts)
            if fnmatchcase(section, pattern) and at(self.theirs, f"{section}.enabled") in (ABSENT, None, False):
                return not key.endswith(".enabled") or at(self.ours, f"{section}.enabled") in (ABSENT, False)
        if self.family == "rm" and any(key.startswith(name) and value in given for name, given in ONE_PROCESS.items()):
            return True
        return self.family in ("sft", "dpo", "rm") and key.startswith("policy.generation")

    def _is_option_of_experts(self, key: str) -> bool:
        prefix, _, name = key.rpartition(".")
        return prefix.endswith("megatron_cfg") and any(fnmatchcase(name, pattern) for pattern in EXPERTS)

    def _is_equal(self, key: str, value: Any) -> bool:
        special = SPECIAL.get(key)
        if special is not None:
            return special(self, value)
        if any(fnmatchcase(key, pattern) and value in values for pattern, values in NEUTRAL.items()):
            return at(self.ours, key) in (ABSENT, value) or value is None
        if self.is_switched and key.startswith("policy.megatron_cfg."):
            return self._is_equal_after_switch(key.removeprefix("policy.megatron_cfg."), value)
        ours = at(self.ours, RENAMED.get(key, key))
        if ours is ABSENT and key.startswith(GYM):  # a key of Gym's own configuration
            ours = at(self.ours, f"{GYM}overrides.{key.removeprefix(GYM)}")
        return is_same(value, ours)

    def _is_equal_after_switch(self, name: str, value: Any) -> bool:
        section, _, option = name.rpartition(".")
        if section == "optimizer" and option in SWITCHED_OPTIMIZER:
            ours, _, index = SWITCHED_OPTIMIZER[option].partition(".")
            found = at(self.ours, f"policy.optimizer.kwargs.{ours}")
            return is_same(value, found[int(index)] if index else found)
        if section == "scheduler" and option == "lr_warmup_iters":
            stages = at(self.ours, "policy.scheduler")
            return not value or (isinstance(stages, list) and stages[-1]["milestones"][0] == value)
        # a test compares the whole curve; the rest is the layout, which the note tells
        return section in ("optimizer", "scheduler", "distributed_data_parallel_config", "")

    def is_told(self, key: str) -> bool:
        """Return whether a note names the key, or a section that holds it."""
        parts = key.split(".")
        names = [".".join(parts[:n]) for n in range(2, len(parts) + 1)]
        names += ["data.train"] if key.startswith("data.") else []  # a flat section is one dataset
        switches = (".".join((*parts[:n], "enabled")) for n in range(1, len(parts)))  # of a section that is left out
        return any(re.search(rf"\b{re.escape(name)}\b(?!\.\w)", self.told) for name in (*names, *switches))


def is_same(value: Any, ours: Any) -> bool:
    """Return whether two values mean the same: null, an empty section and "default" are the key's absence."""
    if value in (None, {}, [], "default", "None", -1) and not isinstance(value, bool):
        return ours in (None, {}, [], ABSENT) or ours == value or _is_empty(ours)
    if value is False and ours is ABSENT:
        return True
    if isinstance(value, bool) or isinstance(ours, bool):
        return value is ours
    if isinstance(value, int | float) and isinstance(ours, int | float):
        return float(value) == float(ours)
    if isinstance(value, list) and isinstance(ours, list | tuple):
        return len(value) == len(ours) and all(map(is_same, value, ours))
    if isinstance(value, dict) and isinstance(ours, dict):
        return all(is_same(item, ours.get(name, ABSENT)) for name, item in value.items())
    return value == ours


def _is_empty(ours: Any) -> bool:
    """Return whether a section of ours has nothing but empty values, or leaves the choice to the program."""
    return all(map(_is_empty, ours.values())) if isinstance(ours, dict) else ours in (None, [], "auto")


def _metric(meaning: Meaning, value: Any) -> bool:
    ours = at(meaning.ours, "checkpointing.metric_name")
    if isinstance(value, str) and (match := re.fullmatch(r"(?:val:)?validation-(.+)", value)):
        return isinstance(ours, str) and ours.startswith("val:") and match[1].endswith(re.split("[:/]", ours)[-1])
    if meaning.family == "rm" and value == "val:accuracy":
        return ours == "val:pair_accuracy"
    if meaning.family in ("grpo", "distillation") and value == "val:accuracy":
        return ours == "val:reward"
    return ours == METRICS.get(value, value)


def _clip(meaning: Meaning, value: Any) -> bool:
    if meaning.is_megatron and at(meaning.theirs, "policy.megatron_cfg.optimizer.clip_grad") not in (ABSENT, None):
        value = at(meaning.theirs, "policy.megatron_cfg.optimizer.clip_grad")
    return (value or None) == at(meaning.ours, "policy.max_grad_norm")


def _loss_switch(name: str) -> Callable[[Meaning, Any], bool]:
    return lambda meaning, value: bool(value) == (at(meaning.ours, "loss_fn.type") == name)


def _prompt_limit(meaning: Meaning, value: Any) -> bool:
    total = at(meaning.theirs, "policy.max_total_sequence_length")
    expected = value if total is ABSENT or value is None else min(value, total)
    return at(meaning.ours, "data.max_input_seq_length") == expected


def _verifier(meaning: Meaning, value: Any) -> bool:
    names = {"hf_math_verify": "math_verify", "dapo_math_verify": "last_answer", "math": "math_verify",
             "mcqa": "choice", "multichoice": "choice", "english_multichoice": "choice",
             "multilingual_multichoice": "choice"}  # fmt: skip
    return any(
        getattr(section, "verifier", "math_verify") == names.get(value) for section in meaning.config.env.values()
    ) or any(getattr(section, "type", None) not in (None, "math") for section in meaning.config.env.values())


def _parser(name: str) -> Callable[[Meaning, Any], bool]:
    names = load_table("releases")[f"{name}s"]
    return lambda meaning, value: at(meaning.ours, f"gateway.{name}") == names.get(value, value)


def _period(key: str) -> Callable[[Meaning, Any], bool]:
    return lambda meaning, value: at(meaning.ours, key) == (value if value != -1 else 0)


def _steps(meaning: Meaning, value: Any) -> bool:
    ours = at(meaning.ours, f"{meaning.family}.max_num_steps")
    return ours == value or (value == -1 and ours >= 1_000_000)


def _val_sampling(name: str) -> Callable[[Meaning, Any], bool]:
    def check(meaning: Meaning, value: Any) -> bool:
        ours = at(meaning.ours, f"{meaning.family}.val_{name}")
        ours = at(meaning.ours, f"policy.generation.{name}") if ours in (None, ABSENT) else ours
        return ours == (None if value == -1 else value)

    return check


def _env_vars(meaning: Meaning, value: Any) -> bool:
    given = value if isinstance(value, dict) else {}
    ours = at(meaning.ours, "cluster.env_vars")
    return all(isinstance(ours, dict) and ours.get(name) == str(text) for name, text in given.items())


def _flat(name: str, field_name: str = "") -> Callable[[Meaning, Any], bool]:
    """Compare a key of a flat `data` section with the dataset that it became, by default the first."""

    def check(meaning: Meaning, value: Any) -> bool:
        if value is None or (not field_name and "train" in meaning.theirs["data"]):
            return value is None or meaning.is_told(f"data.{name}")
        data = meaning.config.data
        if name == "env_name" and meaning.family in ("sft", "dpo", "rm"):
            return True
        key, own = data.datasets_of(field_name or data.dataset_fields[0])[0]
        _, section = resolve_dataset(own, data.default, key=key, supervised=meaning.family in ("sft", "dpo", "rm"))
        found = getattr(section, name)
        if name == "dataset_name":
            return (
                found == DATASET_NAMES.get(value, value)
                or str(value).startswith("mmlu_")
                or str(value).endswith(".csv")
            )
        if name == "dataset_name" and value in FILE_DATASETS:
            return found in ("jsonl", "huggingface")
        return Path(str(found)).name == Path(str(value)).name if name.endswith("_file") else is_same(value, found)

    return check


def _outer(name: str) -> Callable[[Meaning, Any], bool]:
    """Compare an option of the estimator; that of `adv_estimator`, if set, is read in place of the outer one."""
    key = f"grpo.adv_estimator.{name}"
    return lambda meaning, value: at(meaning.theirs, key) is not ABSENT or at(meaning.ours, key) == value


def _sampler(meaning: Meaning, value: Any) -> bool:
    """Compare `async_rl.sampler` with `grpo.async_grpo`: its bound, and what becomes of a group that exceeds it."""
    bound = next((value[name] for name in value if name.startswith("max_")), 1)
    ours = at(meaning.ours, "grpo.async_grpo")
    if not bound:
        return not ours["enabled"]
    stale = "drop" if value.get("name") == "windowed" else "wait"
    return (ours["enabled"], ours["max_trajectory_age_steps"], ours["stale_groups"]) == (True, bound, stale)


def _truncation(meaning: Meaning, value: Any) -> bool:
    """A truncation without a bound truncates nothing."""
    unbounded = value == "tis" and not at(meaning.theirs, "loss_fn.truncated_importance_sampling_ratio")
    return at(meaning.ours, "loss_fn.truncated_importance_sampling_type") == (None if unbounded else value)


def _constant_decay(meaning: Meaning, value: Any) -> bool:
    return value == at(meaning.theirs, "policy.megatron_cfg.optimizer.weight_decay")


def _packing(name: str) -> Callable[[Meaning, Any], bool]:
    names = {"modified_ffd": "modified_first_fit_decreasing"}
    return lambda meaning, value: at(meaning.ours, f"policy.sequence_packing.{name}") == names.get(value, value)


DATASET_NAMES = {
    "DeepScaler": "DeepScaleR", "openmathinstruct2": "OpenMathInstruct-2", "GSM8K": "gsm8k", "aime2024": "AIME2024",
    "aime2025": "AIME2025", "math": "MATH-500", "math500": "MATH-500", "NemoGymDataset": "nemo_gym",
}  # fmt: skip
DATASET_FIELDS = ("split", "subset", "data_path", "input_key", "output_key", "chosen_key", "rejected_key", "env_name",
                  "repeat", "split_validation_size", "seed", "prompt_key", "agent_name")  # fmt: skip
FLAT = (
    "dataset_name", "split", "subset", "input_key", "output_key", "seed", "repeat", "prompt_file", "system_prompt_file",
    "env_name", "chosen_key", "rejected_key",
)  # fmt: skip
FILE_DATASETS = ("ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format")


def _datasets(field_name: str) -> Callable[[Meaning, Any], bool]:
    def check(meaning: Meaning, value: Any) -> bool:
        theirs = value if isinstance(value, list) else [value] if value else []
        ours = meaning.config.data.datasets_of(field_name)
        return len(theirs) == len(ours) and all(
            _is_same_dataset(meaning, given, key, own) for given, (key, own) in zip(theirs, ours, strict=True)
        )

    return check


def _is_same_dataset(meaning: Meaning, given: Mapping[str, Any], key: str, own: DatasetConfig) -> bool:
    default = at(meaning.theirs, "data.default")
    given = {**(default if isinstance(default, dict) else {}), **given}
    is_supervised = meaning.family in ("sft", "dpo", "rm")
    _, section = resolve_dataset(own, meaning.config.data.default, key=key, supervised=is_supervised)
    name = str(given.get("dataset_name"))
    expected = DATASET_NAMES.get(name, name)
    if name not in FILE_DATASETS and section.dataset_name != expected and not name.startswith("mmlu_"):
        return False
    unread = {"env_name"} if is_supervised else set[str]()
    values = {name: given[name] for name in DATASET_FIELDS if given.get(name) is not None and name not in unread}
    values["input_key"] = values.pop("prompt_key", values.get("input_key"))
    if "max_samples" in given:
        values["size"] = given["max_samples"]
    for prompt in ("prompt_file", "system_prompt_file"):
        if given.get(prompt) is not None and Path(str(getattr(section, prompt))).name != Path(given[prompt]).name:
            return False
    return all(value is None or is_same(value, getattr(section, name) or 0) for name, value in values.items())


SPECIAL: dict[str, Callable[[Meaning, Any], bool]] = {
    "checkpointing.metric_name": _metric,
    "policy.max_grad_norm": _clip,
    "policy.megatron_cfg.optimizer.clip_grad": _clip,
    "loss_fn.use_cispo": _loss_switch("cispo"),
    "loss_fn.disable_ppo_ratio": _loss_switch("reinforce"),
    "loss_fn.sequence_level_importance_ratios": _loss_switch("gspo"),
    "data.max_input_seq_length": _prompt_limit,
    "env.math.math_verify_impl": _verifier,
    "env.math.verifier_type": _verifier,
    "env.dapo.math_verify_impl": _verifier,
    "data.train": _datasets("train"),
    "data.validation": _datasets("validation"),
    **{f"{family}.val_period": _period(f"{family}.val_period") for family in LOADERS},
    **{f"policy.megatron_cfg.scheduler.{end}_weight_decay": _constant_decay for end in ("start", "end")},
    **{f"policy.sequence_packing.{name}": _packing(name) for name in ("algorithm",)},
    "rm.max_num_steps": _steps,
    "eval.save_path": lambda meaning, value: value in (None, at(meaning.ours, "eval.output_dir")),
    "generation.backend": lambda meaning, value: value == at(meaning.ours, "server.backend"),
    "async_rl.sampler": _sampler,
    **{f"{SERVED_CHAT}.{name}": _parser(name) for name in ("tool_parser", "reasoning_parser")},
    "loss_fn.truncated_importance_sampling_type": _truncation,
    **{f"{section}.env_vars": _env_vars for section in ENV_VARS},
    **{f"data.{name}": _flat(name) for name in FLAT},
    "data.problem_key": _flat("input_key"),
    "data.solution_key": _flat("output_key"),
    "data.train_data_path": _flat("data_path"),
    "data.val_data_path": _flat("data_path", "validation"),
    "data.train_split": _flat("split"),
    "data.val_split": _flat("split", "validation"),
    **{f"grpo.{name}": _outer(name) for name in ("normalize_rewards", "use_leave_one_out_baseline")},
    "policy.generation.val_temperature": _val_sampling("temperature"),
    "policy.generation.val_top_p": _val_sampling("top_p"),
    "policy.generation.val_top_k": _val_sampling("top_k"),
}


# --- The comparison -------------------------------------------------------------------------------------------------


def compare(path: Path, family: str) -> Finding:
    """Read one recipe twice and compare every value."""
    finding, told = Finding(path, family), _Told()
    logger = logging.getLogger("nemo_rl")
    logger.addHandler(told)
    try:
        config = _load_ours(path, family, finding)
    finally:
        logger.removeHandler(told)
    if config is None:
        return finding
    theirs = read_theirs(path)
    meaning = Meaning(theirs, config, told.text, family)
    for key, value in _compared(theirs):
        verdict = meaning.judge(key, value)
        finding.counts[verdict] += 1
        if verdict == "silent":
            ours = at(meaning.ours, RENAMED.get(key, key))
            shown = "absent" if ours is ABSENT else repr(ours)
            finding.silent.append(f"{key} = {value!r:.100}, here {shown:.100}")
    for key, (families, expected) in ASSUMED.items():
        if family in families and at(theirs, key) is ABSENT and at(meaning.ours, key) != expected:
            finding.silent.append(f"{key} is {at(meaning.ours, key)!r}; NeMo-RL assumes {expected!r}")
    return finding


def _load_ours(path: Path, family: str, finding: Finding) -> Any:
    for allow in (False, True):
        try:
            return LOADERS[family](path, (), allow_unsupported=allow)
        except CombinedConfigError as error:
            finding.refused = [str(one) for one in error.errors]
        except ConfigError as error:
            finding.refused = [str(error)]
    return None


def _compared(theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values to compare: datasets are compared whole, all others one by one."""
    yield from leaves({name: section for name, section in theirs.items() if name != "data"})
    data = theirs.get("data")
    if isinstance(data, dict):
        for name in ("train", "validation"):
            if "train" in data:
                yield f"data.{name}", data.get(name)
        others = {name: value for name, value in data.items() if name not in ("train", "validation", "default")}
        yield from leaves({"data": others})


class _Told(logging.Handler):
    """What the loader told, in one text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def draw(root: Path, *, seed: int, count: int) -> list[tuple[Path, str]]:
    """Return `count` recipes of a directory (0: all), drawn by a seed, each with its family."""
    found = []
    for path in sorted(root.rglob("*.yaml")):
        try:
            family = find_family(_merged(path))
        except (OSError, AssertionError):
            continue  # a file below it is not there
        if family is not None:
            found.append((path, family))
    return random.Random(seed).sample(found, min(count, len(found))) if count else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="0: all")
    parser.add_argument("-v", "--verbose", action="store_true", help="refused recipes and the counts of each recipe")
    parsed = parser.parse_args()
    root = parsed.checkout.resolve()
    for name in ("HF_HOME", "PERSISTENT_CACHE"):
        os.environ.setdefault(name, "/tmp")
    for module in (data, row_sources):
        vars(module)["check_file"] = lambda key, path: None
    examples = root / "examples" if (root / "examples").is_dir() else root
    os.chdir(root)
    findings = [compare(path, family) for path, family in draw(examples, seed=parsed.seed, count=parsed.count)]
    compared = [one for one in findings if one.counts]
    for one in findings:
        if parsed.verbose and not one.counts:
            print(f"refused {one.path.relative_to(root)}: {one.refused[0]:.160}")
        if parsed.verbose and one.counts:
            print(f"{one.path.relative_to(root)}: {dict(one.counts)}")
        for text in one.silent:
            print(f"SILENT {one.path.relative_to(root)}: {text}")
    totals = sum((one.counts for one in compared), Counter[str]())
    silent = sum(len(one.silent) for one in findings)
    print(f"{len(findings)} recipes, {len(compared)} loaded: {dict(totals)}; {silent} silent differences")
    sys.exit(silent > 0)


if __name__ == "__main__":
    main()
