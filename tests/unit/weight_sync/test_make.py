import pytest

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.errors import ConfigError
from nemo_rl.weight_sync.broadcast import Broadcast
from nemo_rl.weight_sync.make import choose_transport, make_transport
from nemo_rl.weight_sync.transport import SharedMemory


def cpu(*engine_nodes: int, ranks: int = 1, cluster: bool = True) -> Layout:
    nodes = max(engine_nodes) + 1
    device_slots = tuple(DeviceSlot(node) for node in engine_nodes)
    return Layout("cpu", nodes, 0, (DeviceSlot(0),) * ranks, device_slots, is_split=False, needs_cluster=cluster)


def cuda(*, ranks: int = 1, engines: int = 1, gpus: int = 1, split: bool = False) -> Layout:
    first = ranks if split else 0
    device_slots = tuple(DeviceSlot(0, tuple(range(first + gpus * i, first + gpus * (i + 1)))) for i in range(engines))
    rank_places = tuple(DeviceSlot(0, (i,)) for i in range(ranks))
    several = ranks > 1 or engines > 1 or split
    return Layout("cuda", 1, 8, rank_places, device_slots, is_split=split, needs_cluster=several)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (cpu(0, cluster=False), "shared_memory"),
        (cpu(0, 0, ranks=2), "shared_memory"),
        (cpu(0, 1), "object_store"),
        (cpu(1), "object_store"),
        (cuda(), "cuda_ipc"),
        (cuda(ranks=2, engines=2), "shared_memory"),
        (cuda(ranks=2, gpus=2), "shared_memory"),
        (cuda(split=True), "nccl"),
        (cuda(ranks=2, engines=3, split=True), "nccl"),
    ],
)
def test_auto_takes_the_nearest_way_that_there_is(layout, expected):
    assert choose_transport("auto", layout) == expected
    assert choose_transport(expected, layout) == expected


@pytest.mark.parametrize(
    ("wanted", "layout", "text"),
    [
        ("nccl", cpu(0), "no CUDA device; allowed: auto, shared_memory, object_store"),
        ("nccl", cuda(), "policy and engines share theirs; allowed: auto, shared_memory, cuda_ipc"),
        ("cuda_ipc", cpu(0, cluster=False), "no CUDA device; allowed: auto, shared_memory"),
        ("cuda_ipc", cuda(split=True), "devices of their own; allowed: auto, shared_memory, object_store, nccl"),
        ("cuda_ipc", cuda(ranks=2, engines=2), "needs one policy rank and one engine on one device"),
        ("shared_memory", cpu(0, 1), "engines on other machines"),
        ("object_store", cpu(0, cluster=False), "a run in one process has no object store"),
    ],
)
def test_a_way_that_there_is_not_is_refused_with_those_that_there_are(wanted, layout, text):
    with pytest.raises(ConfigError, match=text) as caught:
        choose_transport(wanted, layout)
    assert caught.value.key == "weight_sync.transport"


def test_transports_are_made_by_name():
    transport = make_transport("shared_memory", cpu(0))
    assert isinstance(transport, SharedMemory)
    transport.close()
    split = make_transport("auto", cuda(engines=2, gpus=2, split=True))
    assert isinstance(split, Broadcast)
    assert split._workers_per_engine == 2
