"""The weight transports: the layouts under which each works, how each is made, and which one `auto` chooses.

Loads neither torch nor Ray; the module of a transport is imported when the transport is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import Field

from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.registries import WEIGHT_TRANSPORTS
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import HasReplicas

if TYPE_CHECKING:
    from nemo_rl.config.layout import Layout
    from nemo_rl.interfaces import Generation, WeightSource, WeightTarget
    from nemo_rl.weight_manifests import Weights

TargetT = TypeVar("TargetT", bound="WeightTarget")

KEY = "weight_sync.transport"
NO_CUDA = "there is no CUDA device"
IN_DRIVER = "an engine in the driver's process copies the policy's tensors or maps a file"
ONLY_ENGINE = "engine 0"  # name of an engine without a router


class Transport(Protocol):
    """A way for weights. Tensors go straight from the policy's process to the engines'; the driver sees metadata."""

    async def stage(self, policy: "WeightSource") -> "Weights":
        """Make the policy's weights available, while the engines still work."""
        ...

    async def deliver(
        self, policy: "WeightSource", generation: "WeightTarget", staged: "Weights", weight_version: int
    ) -> None:
        """Load the staged weights into all engines, which are paused unless they get an adapter."""
        ...

    def close(self) -> None:
        """Free all resources; may be called twice."""
        ...


def works_everywhere(layout: "Layout") -> str | None:
    """Return None: no layout is a problem."""
    return None


@dataclass(frozen=True, slots=True)
class TransportEntry(Entry[WeightSyncConfig]):
    """A weight transport; `make` is called with the section and the layout."""

    find_problem: Callable[["Layout"], str | None] = field(default=works_everywhere)  # why a layout is unsupported
    preference: int = 0  # `auto` chooses the highest among those that work; 0: only by name


class CustomTransportConfig(WeightSyncConfig):
    """`weight_sync` with a user's transport, by dotted path."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class or function


def choose_transport(wanted: str, layout: "Layout") -> str:
    """Return the name of the transport for `wanted` under `layout`; raises ConfigError if it does not work there.

    auto: on CUDA nccl for engines with devices of their own, cuda_ipc for engines on the policy's; else in_process for
    an engine in the policy's process, shared_memory if all engines are on the first policy worker's machine, or
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


def _entry(name: str) -> TransportEntry:
    entry = WEIGHT_TRANSPORTS.entry(name, key=KEY)
    if not isinstance(entry, TransportEntry):
        raise ConfigError(KEY, name, "must be a nemo_rl.weight_sync.transports:TransportEntry")
    return entry


def _in_process_problem(layout: "Layout") -> str | None:
    if layout.device == "cuda":
        return "would hold a second copy of the weights on the GPU if the policy offloads them or merges adapters"
    return None if layout.engine_with_policy else "policy and engine are in processes of their own"


def _shared_memory_problem(layout: "Layout") -> str | None:
    if layout.engine_nodes == (layout.ranks[0].node,):
        return None
    return "engines on other machines than the policy's first rank cannot map its file"


def _object_store_problem(layout: "Layout") -> str | None:
    if layout.engine_in_driver:
        return IN_DRIVER
    return None if layout.needs_cluster else "a run in one process has no object store"


def _cuda_ipc_problem(layout: "Layout") -> str | None:
    if layout.device != "cuda":
        return NO_CUDA
    if layout.is_split:
        return "policy and engines have devices of their own"
    if layout.engine_in_driver:
        return IN_DRIVER
    if len(layout.ranks) > 1 and not layout.ranks_gather_all:
        return "not every policy rank gathers all of the weights"
    if not {(e.node, gpu) for e in layout.engines for gpu in e.gpus} <= {(r.node, *r.gpus) for r in layout.ranks}:
        return "an engine has devices without a policy rank"
    return None


def _nccl_problem(layout: "Layout") -> str | None:
    if layout.device != "cuda":
        return NO_CUDA
    if not layout.is_split:
        return "NCCL needs one rank per device, and policy and engines share theirs"
    return IN_DRIVER if layout.engine_in_driver else None


def engine_replicas(generation: TargetT) -> Sequence["Generation | TargetT"]:
    """Return the engines that hold weights of their own: the replicas of a router, else the engine itself."""
    return generation.replicas if isinstance(generation, HasReplicas) else (generation,)


def engine_names(generation: "WeightTarget") -> Sequence[str]:
    """Return the names of `engine_replicas`, in their order."""
    return generation.replica_names if isinstance(generation, HasReplicas) else (ONLY_ENGINE,)


AUTO = TransportEntry(WeightSyncConfig, make=make_transport)
IN_PROCESS = TransportEntry(
    WeightSyncConfig,
    make=factory_at("nemo_rl.weight_sync.in_process:make_in_process"),
    find_problem=_in_process_problem,
    preference=5,
)
NCCL = TransportEntry(
    WeightSyncConfig,
    make=factory_at("nemo_rl.weight_sync.nccl:make_nccl"),
    find_problem=_nccl_problem,
    preference=4,
)
CUDA_IPC = TransportEntry(
    WeightSyncConfig,
    make=factory_at("nemo_rl.weight_sync.cuda_ipc:make_cuda_ipc"),
    find_problem=_cuda_ipc_problem,
    preference=3,
)
SHARED_MEMORY = TransportEntry(
    WeightSyncConfig,
    make=factory_at("nemo_rl.weight_sync.shared_memory:make_shared_memory"),
    find_problem=_shared_memory_problem,
    preference=2,
)
OBJECT_STORE = TransportEntry(
    WeightSyncConfig,
    make=factory_at("nemo_rl.weight_sync.object_store:make_object_store"),
    find_problem=_object_store_problem,
    preference=1,
)
