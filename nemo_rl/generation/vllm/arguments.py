"""Arguments of vLLM's engine, from the section and the model."""

import secrets
from pathlib import Path
from typing import Any

from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.adapters import adapter_arguments
from nemo_rl.generation.vllm.cpu.settings import check_cpu_arguments, cpu_arguments
from nemo_rl.generation.vllm.entry import VllmGenerationConfig
from nemo_rl.generation.vllm.images import vision_arguments
from nemo_rl.token_columns import MAX_SET_SIZE

WORKER_EXTENSION = "nemo_rl.generation.vllm.worker.WeightLoadingExtension"  # imported by vLLM's worker
ENGINE_SEED_BITS = 31


def engine_arguments(section: VllmGenerationConfig, model: EngineModel) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs; `vllm_kwargs` override all others."""
    cfg, on_cpu = section.vllm_cfg, model.device == "cpu"
    length = cfg.max_model_len or model.max_model_len
    dtype = section.dtype(model.dtype)
    arguments: dict[str, Any] = {
        "model": model.model_path,
        "dtype": dtype,
        "max_model_len": length,
        "max_num_seqs": cfg.max_num_seqs,
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "kv_cache_memory_bytes": cfg.kv_cache_memory_bytes,
        "enforce_eager": cfg.enforce_eager or False,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "enable_sleep_mode": section.colocated.enabled if cfg.enable_sleep_mode is None else cfg.enable_sleep_mode,
        "skip_tokenizer_init": not has_tokenizer(model.model_path),
        "generation_config": "vllm",  # ignore the sampling defaults of the model
        "logprobs_mode": "processed_logprobs",  # log_softmax(logits / temperature)
        "max_logprobs": MAX_SET_SIZE + 1,  # likeliest tokens, from which the set that a token was drawn from is read
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "otlp_traces_endpoint": model.trace.otlp_endpoint if sends_spans(section, model) else None,
    }
    if model.records_routes and not on_cpu:  # a CPU engine's worker records them itself (cpu/routes.py)
        arguments["enable_return_routed_experts"] = True
    arguments |= _profile_arguments(section, model)
    if model.adapters is not None:
        arguments |= adapter_arguments(model.adapters)
    if model.vision_type is not None:
        arguments |= vision_arguments(model.vision_type)
    if on_cpu:
        arguments |= cpu_arguments(cfg, length)
    elif cfg.tensor_parallel_size > 1:
        # In a placement group vLLM would choose its Ray executor, which refuses a bundle of several GPUs.
        arguments["distributed_executor_backend"] = "mp"
    if dtype != "float32":
        # As in the policy: logits near 20 rounded to bfloat16 are off by up to 0.06.
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if not cfg.seeds_requests(model.device):
        # vLLM's own default is one constant: replicas with the same prompts would sample the same responses.
        arguments["seed"] = secrets.randbits(ENGINE_SEED_BITS)
    overrides = {**arguments.get("hf_overrides", {}), **section.vllm_kwargs.get("hf_overrides", {})}
    arguments |= section.vllm_kwargs
    if overrides:
        arguments["hf_overrides"] = overrides
    if on_cpu:
        check_cpu_arguments(cfg, arguments)
    return arguments


def sends_spans(section: VllmGenerationConfig, model: EngineModel) -> bool:
    """Return whether vLLM sends spans of its own to the run's collector; a core in this process has none."""
    return model.trace.enabled and model.trace.otlp_endpoint is not None and not section.vllm_cfg.in_process


def _profile_arguments(section: VllmGenerationConfig, model: EngineModel) -> dict[str, Any]:
    """Return the arguments that let vLLM's workers write profiles; a core in this process is part of the policy's."""
    if model.profile_dir is None or section.vllm_cfg.in_process:
        return {}
    profiler = {"profiler": "torch", "torch_profiler_dir": str(model.profile_dir.absolute())}
    return {"profiler_config": {**profiler, "torch_profiler_with_stack": False, "ignore_frontend": True}}


def has_tokenizer(model_path: str) -> bool:
    """Return whether the model comes with a tokenizer; only requests with stop strings need one."""
    directory = Path(model_path)
    return not directory.is_dir() or any(directory.glob("tokenizer*")) or (directory / "vocab.json").exists()
