"""The weight transports: under which layouts each works, how each is made, and which one `auto` chooses.

Loads neither torch nor Ray; a transport's own module is imported when it is made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import WEIGHT_TRANSPORTS
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.config.layout import Layout
    from nemo_rl.interfaces import Generation, Policy, Weights

KEY = "weight_sync.transport"
IN_DRIVER = "an engine in the driver's process copies the policy's tensors or maps a file"


class Transport(Protocol):
    """A way for weights. Tensors go straight from the policy's process to the engines'; the driver sees metadata."""

    async def stage(self, policy: "Policy") -> "Weights":
        """Make the policy's weights available, while the engines still work."""
        ...

    async def deliver(self, policy: "Policy", generation: "Generation", staged: "Weights", weight_version: int) -> None:
        """Load them into all engines, which are paused."""
        ...

    def close(self) -> None:
        """Free what is held; may be called twice."""
        ...


def works_everywhere(layout: "Layout") -> str | None:
    """Return no problem with any layout."""
    return None


@dataclass(frozen=True, slots=True)
class TransportEntry(Entry[WeightSyncConfig]):
    """A weight transport; `make` is called with the section and the layout."""

    find_problem: Callable[["Layout"], str | None] = field(default=works_everywhere)  # why not under a layout
    preference: int = 0  # `auto` chooses the highest of those that work; 0: only by name


def choose_transport(wanted: str, layout: "Layout") -> str:
    """Return the name of the transport for `wanted` under `layout`; raises ConfigError where it does not work.

    auto: on CUDA nccl for engines with devices of their own, cuda_ipc for engines on the policy's; else in_process for
    an engine in the policy's process, shared_memory where all engines are on the first policy worker's machine, or
    object_store.
    """
    entries = {name: _entry(name) for name in WEIGHT_TRANSPORTS.names}
    entries.setdefault(wanted, _entry(wanted))
    problems = {name: entry.find_problem(layout) for name, entry in entries.items()}
    allowed = [name for name, problem in problems.items() if problem is None]
    if wanted == "auto":
        return max(allowed, key=lambda name: entries[name].preference)
    if problem := problems[wanted]:
        raise ConfigError(KEY, wanted, f"{problem}; allowed: {', '.join(allowed)}")
    return wanted


def make_transport(section: WeightSyncConfig, layout: "Layout") -> Transport:
    """Return the transport that `choose_transport` names; raises as it does."""
    made: Transport = _entry(choose_transport(section.transport, layout)).make(section, layout)
    return made


def adapt_transport(key: str, path: str, target: Any) -> TransportEntry:
    """Return the entry of a user's class or function, which is called with `weight_sync.kwargs`."""
    if not callable(target):
        raise ConfigError(key, path, "must be a class of a transport, a function that returns one, or an Entry")
    return TransportEntry(CustomTransportConfig, make=lambda section, layout: target(**section.kwargs))


class CustomTransportConfig(WeightSyncConfig):
    """`weight_sync` with a user's transport, by dotted path."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class or function


def _entry(name: str) -> TransportEntry:
    entry = WEIGHT_TRANSPORTS.entry(name, key=KEY)
    if not isinstance(entry, TransportEntry):
        raise ConfigError(KEY, name, "must be a nemo_rl.weight_sync.transports:TransportEntry")
    return entry


def _make_chosen(section: WeightSyncConfig, layout: "Layout") -> Transport:
    return make_transport(section, layout)


AUTO = TransportEntry(WeightSyncConfig, make=_make_chosen)


def _in_process_problem(layout: "Layout") -> str | None:
    if layout.device == "cuda":
        return "all weights would be on the device once more where the policy keeps them elsewhere, or merges adapters"
    return None if layout.engine_with_policy else "policy and engine are in processes of their own"


def _make_in_process(section: WeightSyncConfig, layout: "Layout") -> Transport:
    from nemo_rl.weight_sync.refit import InProcess

    return InProcess()


IN_PROCESS = TransportEntry(WeightSyncConfig, make=_make_in_process, find_problem=_in_process_problem, preference=5)


def _shared_memory_problem(layout: "Layout") -> str | None:
    if layout.engine_nodes == (layout.ranks[0].node,):
        return None
    return "engines on other machines than the policy's first rank cannot map its file"


def _make_shared_memory(section: WeightSyncConfig, layout: "Layout") -> Transport:
    from nemo_rl.weight_sync.refit import SharedMemory

    return SharedMemory()


SHARED_MEMORY = TransportEntry(
    WeightSyncConfig, make=_make_shared_memory, find_problem=_shared_memory_problem, preference=2
)


def _object_store_problem(layout: "Layout") -> str | None:
    if layout.engine_in_driver:
        return IN_DRIVER
    return None if layout.needs_cluster else "a run in one process has no object store"


def _make_object_store(section: WeightSyncConfig, layout: "Layout") -> Transport:
    from nemo_rl.weight_sync.refit import ObjectStore

    return ObjectStore()


OBJECT_STORE = TransportEntry(
    WeightSyncConfig, make=_make_object_store, find_problem=_object_store_problem, preference=1
)


def _cuda_ipc_problem(layout: "Layout") -> str | None:
    if layout.device != "cuda":
        return "there is no CUDA device"
    if layout.is_split:
        return "policy and engines have devices of their own"
    if layout.engine_in_driver:
        return IN_DRIVER
    if len(layout.ranks) > 1 and not layout.ranks_gather_all:
        return "not every policy rank gathers all of the weights"
    if not {(e.node, gpu) for e in layout.engines for gpu in e.gpus} <= {(r.node, *r.gpus) for r in layout.ranks}:
        return "an engine has devices without a policy rank"
    return None


def _make_cuda_ipc(section: WeightSyncConfig, layout: "Layout") -> Transport:
    from nemo_rl.weight_sync.device_memory import CudaIpc

    return CudaIpc(ranks_of_engines=_ranks_of_engines(layout))


def _ranks_of_engines(layout: "Layout") -> dict[str, frozenset[int]]:
    """Return the policy ranks on the devices of each engine, by the engine's name."""
    return {
        f"engine {index}": frozenset(
            rank
            for rank, slot in enumerate(layout.ranks)
            if slot.node == engine.node and not set(slot.gpus).isdisjoint(engine.gpus)
        )
        for index, engine in enumerate(layout.engines)
    }


CUDA_IPC = TransportEntry(WeightSyncConfig, make=_make_cuda_ipc, find_problem=_cuda_ipc_problem, preference=3)


def _nccl_problem(layout: "Layout") -> str | None:
    if layout.device != "cuda":
        return "there is no CUDA device"
    if not layout.is_split:
        return "NCCL has one member a device, and policy and engines share theirs"
    return IN_DRIVER if layout.engine_in_driver else None


def _make_nccl(section: WeightSyncConfig, layout: "Layout") -> Transport:
    from nemo_rl.weight_sync.device_memory import Broadcast

    return Broadcast(backend="nccl", workers_per_engine=max(len(engine.gpus) for engine in layout.engines))


NCCL = TransportEntry(WeightSyncConfig, make=_make_nccl, find_problem=_nccl_problem, preference=4)
