"""The layout of a run, as data: which processes there are, and the node and GPUs of each.

config/layout_planner.py makes it from a configuration. A layout counts nodes and GPUs from 0; distributed/cluster.py
maps them to real ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The node and GPUs of one process."""

    node: int  # index among the run's nodes
    gpus: tuple[int, ...] = ()  # indices among the run's GPUs on this node; empty on a CPU


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Nodes, and the GPUs on each of them, that one part of the run may use."""

    nodes: range
    gpus: range

    @property
    def num_gpus(self) -> int:
        return len(self.nodes) * len(self.gpus)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The way in which the ranks of a stage hold the experts of each layer."""

    parallel: int = 1  # divide the experts among them
    tensor: int = 1  # share each expert
    copies: int = 1  # copies of all experts

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that together hold one copy of the experts."""
        return self.parallel * self.tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a run with their devices."""

    device: Device
    num_nodes: int
    gpus_per_node: int  # 0 on a CPU
    ranks: tuple[DeviceSlot, ...]  # the policy's, by rank; tensor-parallel ranks are neighbours
    engines: tuple[DeviceSlot, ...]
    is_split: bool  # policy and engines have separate GPUs or nodes
    needs_cluster: bool  # policy ranks and engines are Ray actors, processes of their own
    teachers: Mapping[str, tuple[DeviceSlot, ...]] = field(
        default_factory=dict
    )  # ranks by key; served teachers have none
    engine_in_driver: bool = False  # the one engine is in the driver's process, beside the policy or its workers
    engine_with_policy: bool = False  # the policy's one rank and the one engine are in the driver's process
    ranks_gather_all: bool = True  # a refit may gather all weights on every policy rank
    divides_cores: bool = False  # on a CPU, engines sample while models are trained and score: each side has half

    @property
    def num_devices(self) -> int:
        """Return the GPUs that train, sample or score; on a CPU the nodes."""
        teachers = (slot for ranks in self.teachers.values() for slot in ranks)
        return _count_gpus([*self.ranks, *self.engines, *teachers]) or self.num_nodes

    @property
    def num_train_devices(self) -> int:
        """Return the GPUs that train; on a CPU the nodes."""
        return _count_gpus(self.ranks) or len(self.policy_nodes)

    @property
    def policy_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({slot.node for slot in self.ranks}))

    @property
    def engine_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({slot.node for slot in self.engines}))


def _count_gpus(slots: Iterable[DeviceSlot]) -> int:
    return len({(slot.node, gpu) for slot in slots for gpu in slot.gpus})
