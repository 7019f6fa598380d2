"""Which way weights go: from what is asked for and what runs where to a transport."""

from nemo_rl.config.layout import Layout
from nemo_rl.errors import ConfigError
from nemo_rl.weight_sync.transport import SharedMemory, Transport

KEY = "weight_sync.transport"


def choose_transport(wanted: str, layout: Layout) -> str:
    """The name of the transport that `wanted` means under `layout`; raises ConfigError where it cannot be had.

    auto: on CUDA nccl for engines with devices of their own, cuda_ipc for one rank and one engine on one device; else
    shared_memory where all engines stand on the first rank's machine, or object_store.
    """
    problems = {
        "shared_memory": _shared_memory_problem(layout),
        "object_store": _object_store_problem(layout),
        "cuda_ipc": _cuda_ipc_problem(layout),
        "nccl": _nccl_problem(layout),
    }
    allowed = [name for name, problem in problems.items() if problem is None]
    if wanted == "auto":
        preferred = ("nccl", "cuda_ipc", "shared_memory", "object_store")
        return next(name for name in preferred if name in allowed)
    if problem := problems[wanted]:
        raise ConfigError(KEY, wanted, f"{problem}; allowed: {', '.join(['auto', *allowed])}")
    return wanted


def make_transport(wanted: str, layout: Layout) -> Transport:
    """The transport that `choose_transport` names."""
    name = choose_transport(wanted, layout)
    if name == "shared_memory":
        return SharedMemory()
    # Imported here: Ray takes a second that a run in one process need not wait.
    if name == "object_store":
        from nemo_rl.weight_sync.object_store import ObjectStore

        return ObjectStore()
    if name == "cuda_ipc":
        from nemo_rl.weight_sync.cuda_ipc import CudaIpc

        return CudaIpc()
    from nemo_rl.weight_sync.broadcast import Broadcast

    return Broadcast(backend="nccl", workers_per_engine=max(len(engine.gpus) for engine in layout.engines))


def _shared_memory_problem(layout: Layout) -> str | None:
    if layout.engine_nodes == (layout.ranks[0].node,):
        return None
    return "engines on other machines than the policy's first rank cannot map its file"


def _object_store_problem(layout: Layout) -> str | None:
    return None if layout.needs_cluster else "a run in one process has no object store"


def _cuda_ipc_problem(layout: Layout) -> str | None:
    if layout.device != "cuda":
        return "there is no CUDA device"
    if layout.is_split:
        return "policy and engines have devices of their own"
    if len(layout.ranks) > 1 or len(layout.engines) > 1 or any(len(engine.gpus) > 1 for engine in layout.engines):
        return "needs one policy rank and one engine on one device"
    return None


def _nccl_problem(layout: Layout) -> str | None:
    if layout.device != "cuda":
        return "there is no CUDA device"
    if not layout.is_split:
        return "NCCL has one member a device, and policy and engines share theirs"
    return None
