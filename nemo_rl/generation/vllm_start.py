"""How a vLLM engine is started: its arguments from the configuration, and its process' environment."""

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl.config.generation import GenerationConfig
from nemo_rl.errors import ConfigError, GenerationError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WORKER_EXTENSION = "nemo_rl.generation.vllm_loading.WeightFileLoading"  # by name: vLLM's worker imports it
CPU_KV_CACHE_BYTES = 512 * 2**20
MIN_CPU_BATCHED_TOKENS = 8192

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",  # of vLLM's imports in the engine's process
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",  # errors only
}
# On a CPU, compiling takes longer than it saves, and the executor in the engine's own process is the quicker one.
# A refit copies and packs every matrix: glibc keeps that memory, instead of giving it back to the kernel and asking for
# it page by page each time.
CPU_ONLY = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


def environment(device: str, num_replicas: int = 1) -> dict[str, str]:
    """What the engine's process wants to see, without what the user has set.

    Several replicas on one CPU divide its cores among them, and none is bound to cores that another is bound to.
    """
    wanted = {**QUIET, **(CPU_ONLY if device == "cpu" else {})}
    if device == "cpu" and num_replicas > 1:
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_replicas)
        wanted |= {"OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def importing_vllm(device: str) -> Iterator[None]:
    """The environment for importing vLLM and spawning its engine; what the user has set stays.

    Environment and global random states are put back at the end: vLLM seeds them.
    """
    added = environment(device)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ.update(added)
    for logger in ("vllm", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def start_engine(
    section: GenerationConfig, *, model_path: str, dtype: str, max_model_len: int, device: str
) -> "AsyncLLM":
    """A running engine; raises ConfigError for arguments that vLLM refuses, GenerationError if it does not start."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(section, model_path, dtype, max_model_len, device)
    try:
        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config()
    except Exception as error:  # vLLM's checks raise TypeError, ValueError, AssertionError and others
        key = "policy.generation.vllm_kwargs" if section.vllm_kwargs else "policy.generation.vllm_cfg"
        raise ConfigError(
            key, section.vllm_kwargs or section.vllm_cfg.model_dump(), f"vLLM refuses: {error}"
        ) from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except Exception as error:
        raise GenerationError(f"vLLM did not start with {model_path}: {error}") from error


def engine_arguments(
    section: GenerationConfig, model_path: str, dtype: str, max_model_len: int, device: str
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs; `vllm_kwargs` come last and win."""
    cfg, on_cpu = section.vllm_cfg, device == "cpu"
    length = cfg.max_model_len or max_model_len
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype if cfg.precision == "auto" else cfg.precision,
        "max_model_len": length,
        "max_num_seqs": cfg.max_num_seqs or 256,
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        "kv_cache_memory_bytes": cfg.kv_cache_memory_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        "enforce_eager": on_cpu if cfg.enforce_eager is None else cfg.enforce_eager,
        "enable_prefix_caching": cfg.enable_prefix_caching,
        "enable_sleep_mode": needs_sleep(section, on_cpu),
        "skip_tokenizer_init": not has_tokenizer(model_path),
        "generation_config": "vllm",  # the model's own defaults must not change how it is sampled
        "logprobs_mode": "processed_logprobs",  # log_softmax(logits / temperature)
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments |= {
            "distributed_executor_backend": "uni" if cfg.tensor_parallel_size == 1 else "mp",
            # A seeded request whose prompt is computed in parts kills vLLM 0.32's CPU engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(length, MIN_CPU_BATCHED_TOKENS),
        }
    arguments |= section.vllm_kwargs
    if on_cpu and cfg.seed_requests and arguments["enable_chunked_prefill"]:
        key = "policy.generation.vllm_kwargs.enable_chunked_prefill"
        raise ConfigError(key, True, "kills vLLM's CPU engine with vllm_cfg.seed_requests; switch one of them off")
    return arguments


def needs_sleep(section: GenerationConfig, on_cpu: bool) -> bool:
    wanted = section.vllm_cfg.enable_sleep_mode
    return not on_cpu and (section.colocated.enabled if wanted is None else wanted)


def has_tokenizer(model_path: str) -> bool:
    """Whether the model comes with a tokenizer; only requests with stop strings need one."""
    folder = Path(model_path)
    return not folder.is_dir() or any(folder.glob("tokenizer*")) or (folder / "vocab.json").exists()
