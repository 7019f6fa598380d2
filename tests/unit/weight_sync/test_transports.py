from dataclasses import replace

import pytest

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config
from nemo_rl.config.registries import ENGINES, WEIGHT_TRANSPORTS
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed import machine
from nemo_rl.distributed.devices import Device
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe
from nemo_rl.weight_sync.cuda_ipc import CudaIpc
from nemo_rl.weight_sync.nccl import Broadcast
from nemo_rl.weight_sync.shared_memory import SharedMemory
from nemo_rl.weight_sync.transports import choose_transport, make_transport


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
        (replace(cpu(0, cluster=False), engine_with_policy=True), "in_process"),
        (replace(cuda(), engine_in_driver=True, engine_with_policy=True), "shared_memory"),
        (cpu(0, 0, ranks=2), "shared_memory"),
        (cpu(0, 1), "object_store"),
        (cpu(1), "object_store"),
        (cuda(), "cuda_ipc"),
        (cuda(ranks=2, engines=2), "cuda_ipc"),
        (cuda(ranks=2, gpus=2), "cuda_ipc"),
        (replace(cuda(ranks=2, gpus=2), ranks_gather_all=False), "shared_memory"),
        (cuda(ranks=1, engines=2), "shared_memory"),
        (replace(cuda(), engine_in_driver=True), "shared_memory"),
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
        ("cuda_ipc", cuda(ranks=1, engines=2), "an engine has devices without a policy rank"),
        ("cuda_ipc", replace(cuda(ranks=2), ranks_gather_all=False), "not every policy rank gathers all"),
        (
            "object_store",
            replace(cpu(0), engine_in_driver=True),
            "an engine in the driver's process copies",
        ),
        ("nccl", replace(cuda(split=True), engine_in_driver=True), "an engine in the driver's process copies"),
        ("cuda_ipc", replace(cuda(), engine_in_driver=True), "an engine in the driver's process copies"),
        ("shared_memory", cpu(0, 1), "engines on other machines"),
        ("in_process", cpu(0), "policy and engine are in processes of their own; allowed: auto, shared_memory"),
        ("in_process", replace(cuda(), engine_with_policy=True), "would hold a second copy of the weights on the GPU"),
        ("object_store", cpu(0, cluster=False), "a run in one process has no object store"),
    ],
)
def test_a_way_that_there_is_not_is_refused_with_those_that_there_are(wanted, layout, text):
    with pytest.raises(ConfigError, match=text) as caught:
        choose_transport(wanted, layout)
    assert caught.value.key == "weight_sync.transport"


def test_transports_are_made_by_name():
    transport = make_transport(WeightSyncConfig(transport="shared_memory"), cpu(0))
    assert isinstance(transport, SharedMemory)
    transport.close()
    split = make_transport(WeightSyncConfig(), cuda(engines=2, gpus=2, split=True))
    assert isinstance(split, Broadcast)
    assert split._workers_per_engine == 2


READS = {  # which transports each engine can read: vllm/worker.py and hf.py
    "vllm": {"in_process", "shared_memory", "object_store", "cuda_ipc", "nccl"},
    "hf": {"in_process", "shared_memory"},
}
LAYOUTS = {
    "one": [],
    "two colocated": ["++cluster.gpus_per_node=2", "++policy.generation.num_replicas=1"],
    "tensor parallel": ["++cluster.gpus_per_node=2", "++policy.generation.vllm_cfg.tensor_parallel_size=2"],
    "two nodes": ["++cluster.gpus_per_node=2", "++cluster.num_nodes=2"],
    "split": [
        *("++cluster.gpus_per_node=2", "++policy.generation.colocated.enabled=false"),
        "++policy.generation.colocated.resources.gpus_per_node=1",
    ],
    "cpu offload": ["++policy.dtensor_cfg.cpu_offload=true"],
    "megatron": [
        "++cluster.gpus_per_node=2",
        "++policy.megatron_cfg.enabled=true",
        "++policy.dtensor_cfg.enabled=false",
    ],
}
EXPECTED = {
    ("vllm", "cuda"): {
        "one": "cuda_ipc",
        "two colocated": "cuda_ipc",
        "tensor parallel": "cuda_ipc",
        "two nodes": "cuda_ipc",
        "split": "nccl",
        "cpu offload": "cuda_ipc",
        "megatron": "cuda_ipc",
    },
    ("vllm", "cpu"): {
        "one": "in_process",
        "two colocated": "in_process",  # a CPU is not divided
        "tensor parallel": "shared_memory",  # vLLM's workers are processes
        "two nodes": "shared_memory",
        "split": "in_process",
        "cpu offload": "in_process",
        "megatron": "shared_memory",  # the policy's rank is a process of its own
    },
    ("hf", "cpu"): {
        "one": "in_process",
        "two colocated": "in_process",
        "tensor parallel": "in_process",
        "split": "in_process",
        "cpu offload": "in_process",
        "megatron": "shared_memory",
    },
    ("hf", "cuda"): {"one": "shared_memory", "cpu offload": "shared_memory"},  # others need vllm
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ENGINES.names)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_reads_what_auto_sends_it_under_every_layout(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: Device, layout: str
) -> None:
    monkeypatch.setattr(machine, "num_memory_nodes", lambda: 1)  # with several vLLM keeps a process for each
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    overrides = [f"++policy.generation.backend={backend}", *LAYOUTS[layout]]
    expected = EXPECTED[backend, device].get(layout)
    config = load_config(find_recipe("quickstart"), overrides)
    if expected is None:
        with pytest.raises(ConfigError):
            make_layout(config, device)
        return
    chosen = choose_transport("auto", make_layout(config, device))
    assert chosen == expected
    assert chosen in READS[backend]


@pytest.mark.parametrize(
    ("overrides", "memory_nodes", "expected"),
    [
        (["++policy.generation.in_actor=true"], 1, "shared_memory"),
        (["++policy.generation.vllm_cfg.in_process=false"], 1, "shared_memory"),
        (["++policy.generation.num_replicas=2"], 1, "shared_memory"),
        (["++grpo.val_overlap=true"], 1, "shared_memory"),
        (["++grpo.val_overlap=true", "++policy.generation.vllm_cfg.in_process=true"], 1, "in_process"),
        ([], 2, "shared_memory"),
        (["policy.generation.backend=hf", "++policy.dtensor_cfg.data_parallel_size=2"], 1, "shared_memory"),
        (["policy.generation.backend=hf", "++grpo.val_overlap=true"], 1, "in_process"),
    ],
)
def test_policys_tensors_go_only_to_an_engine_in_its_process(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], memory_nodes: int, expected: str
) -> None:
    monkeypatch.setattr(machine, "num_memory_nodes", lambda: memory_nodes)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    layout = make_layout(load_config(find_recipe("quickstart"), overrides), "cpu")
    assert choose_transport("auto", layout) == expected


def test_engine_of_a_user_gets_a_file() -> None:
    config = load_config(find_recipe("quickstart"), [f"policy.generation.backend={__name__}:Pigeon"])
    assert choose_transport("auto", make_layout(config, "cpu")) == "shared_memory"


class Pigeon:
    """A user's transport."""

    def __init__(self, speed: float) -> None:
        self.speed = speed


def test_transport_of_a_user_is_made_by_its_dotted_path_and_never_chosen_by_auto():
    section = WEIGHT_TRANSPORTS.read({"transport": f"{__name__}:Pigeon", "kwargs": {"speed": 20.0}})
    made = make_transport(section, cpu(0, 1))
    assert isinstance(made, Pigeon)
    assert made.speed == 20.0
    assert choose_transport("auto", cpu(0, 1)) == "object_store"


def test_unknown_transport_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean nccl"):
        WEIGHT_TRANSPORTS.read({"transport": "ncl"})


def test_ranks_know_the_engine_on_their_device():
    transport = make_transport(WeightSyncConfig(), cuda(ranks=5, engines=2, gpus=2))
    assert isinstance(transport, CudaIpc)
    assert transport._ranks_of_engines == {"engine 0": frozenset({0, 1}), "engine 1": frozenset({2, 3})}
