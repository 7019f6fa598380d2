"""Environment variables of vLLM's processes, set while vLLM is imported or an engine starts and restored after it."""

import asyncio
import contextlib
import logging
import math
import os
import random
import threading
import warnings
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager

import numpy as np
import torch

from nemo_rl.generation.vllm.cpu.settings import process_variables

START_S = 600.0  # vLLM's own limit for loading the model
START_POLL_S = 0.05  # between checks whether another engine has started
QUIET_ENV = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",  # warnings of vLLM's imports in the engine's process
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",  # errors only
}
# Variables that vLLM 0.32 sets beside VLLM_..., at import and for the processes that it starts.
ENGINE_VARIABLES = frozenset({
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "NCCL_GRAPH_REGISTER",
    "NUMEXPR_MAX_THREADS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TILELANG_CLEANUP_TEMP_FILES",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "TRITON_CACHE_AUTOTUNING",
})  # fmt: skip

_STARTING = threading.Lock()  # held while an engine of this process starts


def environment(
    device: str,
    num_replicas: int = 1,
    *,
    num_workers: int = 1,
    start_timeout_s: float = START_S,
    divides_cores: bool = False,
) -> dict[str, str]:
    """Return the environment variables of the engine's processes, without those that the user has set.

    vLLM reads its limit for loading the model, 600 s without the variable, when it is imported.
    """
    wanted = {**QUIET_ENV, "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s))}
    if device == "cpu":
        wanted |= process_variables(num_replicas, num_workers, divides_cores=divides_cores)
    return {name: value for name, value in wanted.items() if name not in os.environ}


@asynccontextmanager
async def starting_engine(
    device: str, start_timeout_s: float = START_S, *, num_workers: int = 1, divides_cores: bool = False
) -> AsyncIterator[None]:
    """Do as `importing_vllm`, for one engine start at a time: two would restore each other's environment."""
    while not _STARTING.acquire(blocking=False):  # noqa: ASYNC110  another thread's event loop may hold it
        await asyncio.sleep(START_POLL_S)
    try:
        with importing_vllm(device, start_timeout_s, num_workers=num_workers, divides_cores=divides_cores):
            yield
    finally:
        _STARTING.release()


@contextlib.contextmanager
def importing_vllm(
    device: str, start_timeout_s: float = START_S, *, num_workers: int = 1, divides_cores: bool = False
) -> Iterator[None]:
    """Set the environment for importing vLLM and spawning its engine; variables set by the user stay.

    Restores environment and global random states at the end: vLLM seeds the generators, and sets variables for its own
    processes (LD_PRELOAD on a CPU) that processes started later by the trainer would inherit.
    """
    before = dict(os.environ)
    own = {"num_workers": num_workers, "start_timeout_s": start_timeout_s, "divides_cores": divides_cores}
    added = environment(device, **own)
    quiet = warnings.catch_warnings(action="ignore")  # as PYTHONWARNINGS does in the engine's process
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ.update(added)
    for logger in ("vllm", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    try:
        with quiet:
            yield
    finally:
        own = {name for name in before.keys() | os.environ.keys() if name.startswith("VLLM_")}
        restore_environment(before, ENGINE_VARIABLES | own | added.keys())
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def restore_environment(before: Mapping[str, str], names: Collection[str]) -> None:
    """Restore the values of the variables `names` from `before`."""
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)
