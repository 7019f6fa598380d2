"""NeMo-RL's keys of `megatron_cfg` that config/megatron.py does not have; which backend a recipe asks for."""

from typing import Any

from nemo_rl.config.rules import Rule, dropped, ignored, rejected

_KEY = "megatron_cfg"  # of `policy`, and of each teacher
_NO_EXPERTS = "models with experts are not mapped to Megatron"

MEGATRON_RULES: tuple[Rule, ...] = (
    rejected(
        f"{_KEY}.sequence_parallel", "layers have torch's norms, which Megatron gives whole sequences only", False
    ),
    rejected(f"{_KEY}.context_parallel_size", "sequences are not split over ranks", 1),
    rejected(f"{_KEY}.expert_model_parallel_size", _NO_EXPERTS, 1),
    rejected(f"{_KEY}.expert_tensor_parallel_size", _NO_EXPERTS, 1),
    rejected(f"{_KEY}.peft.enabled", "all weights are trained", False),
    dropped(f"{_KEY}.peft"),
    rejected(f"{_KEY}.fp8_cfg.enabled", "layers compute in float32 or bfloat16", False),
    dropped(f"{_KEY}.fp8_cfg"),
    rejected(f"{_KEY}.mtp_num_layers", "one token is predicted at a time", 0),
    rejected(f"{_KEY}.env_vars", "set them in the environment of the command", {}),
    dropped(f"{_KEY}.converter_type"),  # the mapping follows from the model
    dropped(f"{_KEY}.force_reconvert_from_hf"),  # weights are read from Hugging Face's files each time
    dropped(f"{_KEY}.empty_unused_memory_level"),
    dropped(f"{_KEY}.defer_fp32_logits"),  # logits are made a chunk at a time
    dropped(f"{_KEY}.freeze_moe_router"),
    dropped(f"{_KEY}.track_moe_metrics"),
    *(
        dropped(f"{_KEY}.moe_{name}")
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
        ignored(f"{_KEY}.{name}", "layers are made of torch's own kernels", None, True, False)
        for name in ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
    ),
    dropped(f"{_KEY}.optimizer.bf16"),
    dropped(f"{_KEY}.optimizer.params_dtype"),
    rejected(f"{_KEY}.optimizer.fp16", "layers compute in float32 or bfloat16", False),
    dropped(f"{_KEY}.optimizer.clip_grad"),  # policy.max_grad_norm, which NeMo-RL's recipes refer to
    ignored(
        f"{_KEY}.optimizer.use_distributed_optimizer",
        "each data parallel rank keeps the whole state of the optimizer",
        None,
        False,
    ),
    ignored(f"{_KEY}.optimizer.use_precision_aware_optimizer", "the optimizer's state is float32", None, False),
    rejected(f"{_KEY}.optimizer.optimizer_cpu_offload", "the optimizer's state stays where the weights are", False),
    dropped(f"{_KEY}.optimizer.optimizer_offload_fraction"),
    rejected(f"{_KEY}.scheduler.weight_decay_incr_style", "the weight decay stays", "constant"),
    dropped(f"{_KEY}.scheduler.start_weight_decay"),
    dropped(f"{_KEY}.scheduler.end_weight_decay"),
    ignored(f"{_KEY}.distributed_data_parallel_config.overlap_param_gather", "weights are not gathered", None, False),
    dropped(f"{_KEY}.distributed_data_parallel_config.average_in_collective"),
    dropped(f"{_KEY}.distributed_data_parallel_config.use_distributed_optimizer"),
    rejected(f"{_KEY}.distributed_data_parallel_config.use_custom_fsdp", "policy.dtensor_cfg is FSDP2", False),
    dropped(f"{_KEY}.distributed_data_parallel_config.data_parallel_sharding_strategy"),
)


def choose_backend(config: dict[str, Any]) -> None:
    """Take out, in place, what belongs to the backend that is off; NeMo-RL's recipes have both sections.

    With `megatron_cfg.enabled` it is Megatron, whatever `dtensor_cfg.enabled` says.
    """
    teachers = config.get("teachers")
    task_teachers = teachers.values() if isinstance(teachers, dict) else ()
    for model in (config.get("policy"), config.get("teacher"), *task_teachers):
        if not isinstance(model, dict):
            continue
        megatron, dtensor = model.get("megatron_cfg"), model.get("dtensor_cfg")
        if not isinstance(megatron, dict) or not megatron.get("enabled"):
            model.pop("megatron_cfg", None)
        elif isinstance(dtensor, dict):
            dtensor.pop("enabled", None)
