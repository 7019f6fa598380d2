"""What stands where, for devices that this machine need not have."""

from typing import Any

import pytest

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError

POLICY = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
ENGINES = "policy.generation"


def config(values: dict[str, Any]) -> GRPORunConfig:
    """The smallest recipe with `values` by dotted key."""
    raw: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
        "policy": {"model_name": "m", "train_global_batch_size": 32},
        "data": {"train": {"dataset_name": "jsonl", "data_path": "p"}},
    }
    for key, value in values.items():
        *sections, name = key.split(".")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return GRPORunConfig.model_validate(raw)


def layout(device: Any, values: dict[str, Any]) -> Layout:
    return make_layout(config(values), device)


def device_slots(*each: tuple[int, tuple[int, ...]]) -> tuple[DeviceSlot, ...]:
    return tuple(DeviceSlot(node, gpus) for node, gpus in each)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_rank_and_one_engine_need_no_cluster(device: str) -> None:
    plain = layout(device, {})
    assert (len(plain.ranks), len(plain.engines)) == (1, 1)
    assert not plain.needs_cluster
    assert not plain.is_split


def test_on_a_cpu_there_are_as_many_as_were_asked_for() -> None:
    asked = layout("cpu", {f"{POLICY}.data_parallel_size": 2, f"{POLICY}.tensor_parallel_size": 2,
                           f"{ENGINES}.num_replicas": 3, "cluster.gpus_per_node": 8})  # fmt: skip
    assert asked.ranks == device_slots(*[(0, ())] * 4)
    assert asked.engines == device_slots(*[(0, ())] * 3)
    assert asked.gpus_per_node == 0
    assert asked.needs_cluster


def test_devices_that_train_are_counted_once() -> None:
    assert layout("cuda", {"cluster.gpus_per_node": 8}).num_train_devices == 8
    assert layout("cpu", {f"{POLICY}.data_parallel_size": 4, "cluster.num_nodes": 2}).num_train_devices == 2


def test_ranks_that_share_micro_batches_do_not_share_samples() -> None:
    asked = layout("cuda", {f"{POLICY}.context_parallel_size": 2, f"{POLICY}.tensor_parallel_size": 2,
                            f"{POLICY}.expert_parallel_size": 4, "cluster.gpus_per_node": 8})  # fmt: skip
    assert len(asked.ranks) == 8  # 2 data parallel


def test_on_several_cpu_nodes_neighbours_stay_together() -> None:
    asked = layout("cpu", {f"{POLICY}.data_parallel_size": 4, f"{ENGINES}.num_replicas": 3, "cluster.num_nodes": 2})
    assert [place.node for place in asked.ranks] == [0, 0, 1, 1]
    assert [place.node for place in asked.engines] == [0, 0, 1]


@pytest.mark.parametrize(
    ("device", "values", "divides_cores"),
    [
        ("cpu", {}, False),
        ("cpu", {"grpo.async_grpo.enabled": True}, True),
        ("cpu", {"grpo.async_grpo.enabled": True, f"{POLICY}.data_parallel_size": 2}, True),
        ("cpu", {"grpo.async_grpo": {"enabled": True, "max_trajectory_age_steps": 0}}, False),
        ("cpu", {"grpo.val_overlap": True}, False),  # training's own rollouts take turns with the trainer
        ("cuda", {"grpo.async_grpo.enabled": True, f"{ENGINES}.vllm_cfg.enable_sleep_mode": False}, False),
        (
            "cpu",
            {
                "grpo.async_grpo.enabled": True,
                "cluster.num_nodes": 2,
                f"{ENGINES}.colocated": {"enabled": False, "resources": {"num_nodes": 1}},
            },
            False,
        ),
    ],
)
def test_engine_and_trainer_divide_cores_if_both_compute_at_once(
    device: str, values: dict[str, Any], divides_cores: bool
) -> None:
    assert layout(device, values).divides_cores is divides_cores


def test_colocated_engines_stand_on_the_policys_gpus() -> None:
    shared = layout("cuda", {"cluster.gpus_per_node": 4, f"{ENGINES}.vllm_cfg.tensor_parallel_size": 2})
    assert shared.ranks == device_slots((0, (0,)), (0, (1,)), (0, (2,)), (0, (3,)))
    assert shared.engines == device_slots((0, (0, 1)), (0, (2, 3)))
    assert not shared.is_split


def test_split_engines_take_the_last_gpus_of_each_node() -> None:
    split = layout("cuda", {"cluster.gpus_per_node": 4, "cluster.num_nodes": 2,
                            f"{ENGINES}.colocated.enabled": False, f"{ENGINES}.colocated.resources.gpus_per_node": 1,
                            f"{ENGINES}.num_replicas": 1, f"{POLICY}.data_parallel_size": 4})  # fmt: skip
    assert split.ranks == device_slots((0, (0,)), (0, (1,)), (0, (2,)), (1, (0,)))
    assert split.engines == device_slots((0, (3,)))
    assert split.is_split
    assert split.policy_nodes == (0, 1)


def test_split_engines_take_the_last_nodes() -> None:
    split = layout("cuda", {"cluster.gpus_per_node": 2, "cluster.num_nodes": 2,
                            f"{ENGINES}.colocated.enabled": False,
                            f"{ENGINES}.colocated.resources.num_nodes": 1})  # fmt: skip
    assert split.ranks == device_slots((0, (0,)), (0, (1,)))
    assert split.engines == device_slots((1, (0,)), (1, (1,)))
    assert split.engine_nodes == (1,)


def test_split_on_the_gpus_of_one_node_needs_a_cluster_for_two_processes() -> None:
    split = layout("cuda", {"cluster.gpus_per_node": 2, f"{ENGINES}.colocated.enabled": False,
                            f"{ENGINES}.colocated.resources.gpus_per_node": 1,
                            f"{ENGINES}.colocated.resources.num_nodes": 1})  # fmt: skip
    assert (split.ranks, split.engines) == (device_slots((0, (0,))), device_slots((0, (1,))))
    assert split.needs_cluster


def test_ranks_of_megatron_are_tensor_x_pipeline_x_data_parallel() -> None:
    sizes = {f"{MEGATRON}.enabled": True, f"{MEGATRON}.tensor_model_parallel_size": 2,
             f"{MEGATRON}.pipeline_model_parallel_size": 2}  # fmt: skip
    assert len(layout("cpu", sizes).ranks) == 4
    assert len(layout("cpu", {**sizes, f"{MEGATRON}.data_parallel_size": 2}).ranks) == 8
    gpus = {**sizes, "cluster.gpus_per_node": 2, "cluster.num_nodes": 4}
    assert len(layout("cuda", gpus).ranks) == 8  # two copies of the model
    assert layout("cuda", {**gpus, f"{MEGATRON}.data_parallel_size": 1}).ranks == device_slots(
        (0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))
    )
    ignored = {f"{MEGATRON}.enabled": False, f"{MEGATRON}.tensor_model_parallel_size": 2}
    assert len(layout("cpu", ignored).ranks) == 1


def test_megatron_has_a_process_of_its_own() -> None:
    assert layout("cpu", {f"{MEGATRON}.enabled": True}).needs_cluster


def test_an_address_asks_for_a_cluster() -> None:
    assert layout("cpu", {"cluster.address": "auto"}).needs_cluster


@pytest.mark.parametrize(
    ("device", "values", "key", "problem"),
    [
        ("cuda", {"cluster.gpus_per_node": 0}, "cluster.gpus_per_node", "policy.device=cpu"),
        ("cuda", {f"{POLICY}.data_parallel_size": 2}, f"{POLICY}.data_parallel_size", "at most 1"),
        ("cuda", {"cluster.gpus_per_node": 4, f"{POLICY}.tensor_parallel_size": 2, f"{POLICY}.data_parallel_size": 4},
         f"{POLICY}.data_parallel_size", "8 ranks.* at most 2"),
        ("cuda", {"cluster.gpus_per_node": 4, f"{POLICY}.tensor_parallel_size": 3},
         f"{POLICY}.tensor_parallel_size", "divide the 4 GPUs"),
        ("cuda", {f"{MEGATRON}.enabled": True, f"{MEGATRON}.tensor_model_parallel_size": 2},
         f"{MEGATRON}.tensor_model_parallel_size", "divide the 1 GPUs"),
        ("cuda", {f"{MEGATRON}.enabled": True, f"{MEGATRON}.pipeline_model_parallel_size": 4,
                  f"{MEGATRON}.tensor_model_parallel_size": 2, "cluster.gpus_per_node": 4},
         f"{MEGATRON}.pipeline_model_parallel_size", "8 ranks.* at most 2"),
        ("cuda", {f"{MEGATRON}.enabled": True, f"{MEGATRON}.pipeline_model_parallel_size": 2,
                  f"{MEGATRON}.data_parallel_size": 4, "cluster.gpus_per_node": 4},
         f"{MEGATRON}.data_parallel_size", "8 ranks.* at most 2"),
        ("cuda", {f"{ENGINES}.vllm_cfg.tensor_parallel_size": 2}, f"{ENGINES}.vllm_cfg.tensor_parallel_size", "1 GPUs"),
        ("cuda", {f"{ENGINES}.num_replicas": 2}, f"{ENGINES}.num_replicas", "at most 1"),
        ("cuda", {f"{ENGINES}.colocated.enabled": False}, f"{ENGINES}.colocated.resources.gpus_per_node", "at least 2"),
        ("cuda", {f"{ENGINES}.colocated.enabled": False, "cluster.gpus_per_node": 8},
         f"{ENGINES}.colocated.resources.gpus_per_node", "1 to 7"),
        ("cuda", {f"{ENGINES}.colocated.enabled": False, "cluster.num_nodes": 2,
                  f"{ENGINES}.colocated.resources.num_nodes": 1, f"{ENGINES}.colocated.resources.gpus_per_node": 2},
         f"{ENGINES}.colocated.resources.gpus_per_node", "at most cluster.gpus_per_node = 1"),
        ("cpu", {f"{ENGINES}.colocated.enabled": False, "cluster.num_nodes": 2,
                 f"{ENGINES}.colocated.resources.num_nodes": 2}, f"{ENGINES}.colocated.resources.num_nodes", "no node"),
        ("cuda", {"grpo.async_grpo.enabled": True}, f"{ENGINES}.vllm_cfg.enable_sleep_mode", "allowed: false"),
        ("cpu", {f"{ENGINES}.backend": "hf", f"{ENGINES}.num_replicas": 2}, f"{ENGINES}.num_replicas", "one engine"),
        ("cuda", {f"{ENGINES}.backend": "hf", "cluster.gpus_per_node": 2}, f"{ENGINES}.num_replicas", "one engine"),
        ("cuda", {f"{ENGINES}.backend": "hf", f"{ENGINES}.num_replicas": 1, "cluster.gpus_per_node": 2},
         f"{ENGINES}.backend", "vllm"),
        ("cpu", {f"{POLICY}.data_parallel_size": 3}, "policy.train_global_batch_size", "multiple of the 3"),
        ("cuda", {f"{POLICY}.context_parallel_size": 4, "cluster.gpus_per_node": 2}, f"{POLICY}.context_parallel_size",
         "these are 4 ranks, one GPU each; the policy has 2 .* at most 2"),
        ("cuda", {f"{POLICY}.context_parallel_size": 2, f"{POLICY}.data_parallel_size": 2, "cluster.gpus_per_node": 2},
         f"{POLICY}.data_parallel_size", "context_parallel_size = 2 these are 4 ranks.*at most 1"),
        ("cpu", {f"{POLICY}.context_parallel_size": 2, f"{POLICY}.expert_parallel_size": 4},
         f"{POLICY}.expert_parallel_size", "divide the 2 data and context parallel ranks"),
        ("cpu", {f"{POLICY}.expert_parallel_size": 2}, f"{POLICY}.expert_parallel_size", "divide the 1 data parallel"),
        ("cuda", {f"{POLICY}.expert_parallel_size": 4, f"{POLICY}.tensor_parallel_size": 4, "cluster.gpus_per_node": 8},
         f"{POLICY}.expert_parallel_size", "divide the 2 data parallel ranks"),
        ("cpu", {f"{MEGATRON}.enabled": True, f"{MEGATRON}.tensor_model_parallel_size": 2,
                 f"{MEGATRON}.expert_model_parallel_size": 2, f"{MEGATRON}.expert_tensor_parallel_size": 2},
         f"{MEGATRON}.expert_model_parallel_size", "= 2, 4 ranks.* must divide the 2 ranks of a stage"),
    ],
)  # fmt: skip
def test_what_cannot_stand_is_refused_with_what_is_allowed(
    device: str, values: dict[str, Any], key: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        layout(device, values)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("device", "values"),
    [
        ("cpu", {"grpo.async_grpo.enabled": True}),
        ("cuda", {"grpo.async_grpo.enabled": True, f"{ENGINES}.vllm_cfg.enable_sleep_mode": False}),
        ("cpu", {f"{ENGINES}.colocated.enabled": False}),
        ("cpu", {f"{ENGINES}.backend": "hf", f"{POLICY}.data_parallel_size": 2}),
        ("cuda", {f"{POLICY}.expert_parallel_size": 4, "cluster.gpus_per_node": 8}),
        (
            "cuda",
            {
                f"{MEGATRON}.enabled": True,
                f"{MEGATRON}.tensor_model_parallel_size": 4,
                f"{MEGATRON}.expert_model_parallel_size": 8,
                "cluster.gpus_per_node": 8,
            },
        ),
    ],
)
def test_what_can_stand_is_accepted(device: str, values: dict[str, Any]) -> None:
    layout(device, values)
