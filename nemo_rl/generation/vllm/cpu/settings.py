"""Engine arguments and environment variables of vLLM on a CPU. Loads neither vLLM nor torch."""

import os
from collections.abc import Mapping
from typing import Any

from nemo_rl.distributed.machine import num_memory_nodes
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.entry import VllmConfig, check_speculation

WORKER_EXTENSION = "nemo_rl.generation.vllm.cpu.worker.CpuWeightLoadingExtension"  # imported by vLLM's worker
KV_CACHE_BYTES = 512 * 2**20
MAX_SEQS = 256
MIN_BATCHED_TOKENS = 8192
# Compiling takes longer than it saves, and an executor in the engine's own process is faster. A refit copies and packs
# every matrix: glibc keeps that memory instead of returning it to the kernel and requesting it page by page each time.
VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


def process_variables(num_replicas: int, num_workers: int, *, divides_cores: bool) -> dict[str, str]:
    """Return the environment variables of the engine's processes.

    Replicas on one CPU divide its cores among them, and none is bound to cores that another is bound to. The same holds
    for the workers of each, unless each can be bound to a memory node of its own, which vLLM then does.
    `divides_cores`: a trainer that computes at the same time has half of them. With more threads than cores each waits,
    in every product of matrices, for one that does not run.
    """
    if num_replicas == 1 and num_workers <= max(num_memory_nodes(), 1) and not divides_cores:
        return VARIABLES
    parts = num_replicas * num_workers * (2 if divides_cores else 1)
    num_threads = max(1, len(os.sched_getaffinity(0)) // parts)
    return {**VARIABLES, "OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def cpu_arguments(cfg: VllmConfig, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs that differ from those on CUDA."""
    return {
        "max_num_seqs": cfg.max_num_seqs or MAX_SEQS,
        "kv_cache_memory_bytes": cfg.kv_cache_memory_bytes or KV_CACHE_BYTES,
        "enforce_eager": cfg.enforce_eager is not False,
        "enable_sleep_mode": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "distributed_executor_backend": "uni" if cfg.tensor_parallel_size == 1 else "mp",
        "enable_chunked_prefill": False,  # a seeded request whose prompt is computed in parts kills vLLM 0.32's engine
        "max_num_batched_tokens": max(max_model_len, MIN_BATCHED_TOKENS),
    }


def check_cpu_arguments(cfg: VllmConfig, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of the user's that would kill vLLM's CPU engine, or spoil its samples."""
    check_speculation(arguments)
    if cfg.seeds_requests("cpu") and arguments["enable_chunked_prefill"]:
        key = "policy.generation.vllm_kwargs.enable_chunked_prefill"
        raise ConfigError(key, True, "kills vLLM's CPU engine with vllm_cfg.seed_requests; switch one of them off")
