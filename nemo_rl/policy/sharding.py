"""FSDP2 around a model: sharded float32 weights, computation in the policy's precision."""

import atexit

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nemo_rl.config.policy import Policy
from nemo_rl.policy.hf_model import decoder_layers


def needs_sharding(config: Policy, device: torch.device) -> bool:
    """False for float32 on a CPU, where one rank has nothing to shard, move or cast, and the hooks only cost time."""
    return device.type == "cuda" or config.precision == "bfloat16"


def shard(module: nn.Module, config: Policy, device: torch.device) -> None:
    """Put each decoder layer, and the rest as one, under FSDP2. Weights and gradients stay float32.

    In bfloat16 the weights are cast when a layer gathers them and gradients are reduced in float32.
    """
    ensure_process_group(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    param_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if config.dtensor_cfg.cpu_offload and device.type == "cuda" else OffloadPolicy()
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)


def ensure_process_group(device: torch.device) -> None:
    """A group of this process alone, unless the process is in one already. Needs no port."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind a shard; no copy where one rank holds it all."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()
