"""Nodes and GPUs of a run, by their place in it; config/layout.py gives them out."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """Where one process stands."""

    node: int  # of the run's nodes
    gpus: tuple[int, ...] = ()  # of the GPUs that the run has on this node; empty on a CPU


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Nodes and the GPUs on each of them that one part of the run may use."""

    nodes: range
    gpus: range

    @property
    def num_gpus(self) -> int:
        return len(self.nodes) * len(self.gpus)


def spread_over_nodes(count: int, nodes: range) -> tuple[DeviceSlot, ...]:
    """As many on each node as on any other, or one more; neighbours stay together."""
    return tuple(DeviceSlot(nodes[index * len(nodes) // count]) for index in range(count))
