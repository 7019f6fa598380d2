"""The ranks of a model on the nodes and GPUs that it has."""

from nemo_rl.config.parallel import ParallelModelConfig
from nemo_rl.config.places import Device, DevicePool, DeviceSlot, spread_over_nodes
from nemo_rl.errors import ConfigError


def assign_ranks(pool: DevicePool, model: ParallelModelConfig, device: Device, *, key: str) -> tuple[DeviceSlot, ...]:
    """A rank a GPU; on a CPU as many as the section `key` asks for. The tensor parallel ones are neighbours on a node.

    Raises:
        ConfigError: they do not fit.
    """
    data, copy = model.data_parallel_size, model.model_parallel_size
    if device == "cpu":
        return spread_over_nodes((data or 1) * copy, pool.nodes)
    _check_gpus(pool, model, key)
    gpus = [DeviceSlot(node, (gpu,)) for node in pool.nodes for gpu in pool.gpus]
    return tuple(gpus[: (data or pool.num_gpus // copy) * copy])


def _check_gpus(pool: DevicePool, model: ParallelModelConfig, key: str) -> None:
    """Every rank has a GPU, and the ranks that share a layer are on one node."""
    owner = "the policy" if key == "policy" else "the teacher"
    section = f"{key}.megatron_cfg" if model.megatron_cfg.enabled else f"{key}.dtensor_cfg"
    tensor_key = (
        f"{section}.tensor_model_parallel_size" if model.megatron_cfg.enabled else f"{section}.tensor_parallel_size"
    )
    pipeline_key = f"{section}.pipeline_model_parallel_size"
    data, tensor, stages = model.data_parallel_size, model.tensor_parallel_size, model.pipeline_parallel_size
    if len(pool.gpus) % tensor:
        raise ConfigError(tensor_key, tensor, f"must divide the {len(pool.gpus)} GPUs that {owner} has on a node")
    has = f"{owner} has {pool.num_gpus} (cluster.num_nodes, cluster.gpus_per_node)"
    if model.model_parallel_size > pool.num_gpus:
        raise ConfigError(
            pipeline_key,
            stages,
            f"with {tensor_key} = {tensor} these are {model.model_parallel_size} ranks, one GPU each; {has}; allowed: "
            f"at most {pool.num_gpus // tensor}",
        )
    if data is not None and data * model.model_parallel_size > pool.num_gpus:
        sizes = f"{tensor_key} = {tensor}" + (f" and {pipeline_key} = {stages}" if model.megatron_cfg.enabled else "")
        raise ConfigError(
            f"{section}.data_parallel_size",
            data,
            f"with {sizes} these are {data * model.model_parallel_size} ranks, one GPU each; {has}; allowed: "
            f"at most {pool.num_gpus // model.model_parallel_size}",
        )
