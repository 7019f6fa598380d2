"""Expert parallelism: each rank of a group holds some experts of a layer, and computes the group's tokens for them.

E experts of a layer, R ranks of the group with E / R experts each, N tokens of this rank, k experts per token, H hidden
size. A token's hidden state travels once per chosen expert, by an all-to-all of uneven parts that autograd reverses; a
rank that receives nothing takes part too. The router is replicated, and chooses among all experts as before.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from nemo_rl.errors import ConfigError
from nemo_rl.policy.exchanges import exchange_rows
from nemo_rl.policy.fsdp2.shards import gather_full_tensor

GATHERED_BYTES = 2**26  # weights of experts that are gathered at a time
FSDP_DIM = 1  # rows of stacked weights [E, rows, columns]: the ranks that copy whole experts shard them by rows


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each layer's stacked experts: weights [E, rows, columns], and biases [E, rows], in one
    module."""
    for name, module in model.named_modules():
        own = [p.ndim for p in module.parameters(recurse=False)]
        if name.endswith(".experts") and 3 in own and {*own} <= {2, 3}:
            yield name, module


def split_experts(model: nn.Module, mesh: DeviceMesh, *, key: str) -> None:
    """Keep this rank's experts of every layer, as shards on the dimension "ep" of the mesh, and exchange tokens.

    `key` is the section's, for errors. Raises ConfigError if copies of the experts cannot be sharded evenly.
    """
    for name, experts in find_experts(model):
        for own_name, parameter in list(experts.named_parameters(recurse=False)):
            _check_rows(f"{name}.{own_name}", parameter.shape[FSDP_DIM], mesh, key)
            setattr(experts, own_name, _own_experts(parameter, mesh["ep"]))
        experts.forward = partial(_dispatch, experts, mesh["ep"].get_group())


def gather_experts(weights: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (expert, matrix [rows, columns]) of stacked weights, in an order that is the same on every rank.

    Of a shard, a few experts of each rank are gathered at a time, GATHERED_BYTES together or one of each.
    """
    ranks = _ranks_of_experts(weights)
    if ranks is None:
        yield from enumerate(gather_full_tensor(weights))
        return
    assert isinstance(weights, DTensor)
    local, own = weights.to_local(), len(weights) // ranks
    together = max(1, GATHERED_BYTES // (ranks * weights[0].numel() * weights.element_size()))
    for start in range(0, own, together):
        block = local[start : start + together].to(weights.device_mesh.device_type)  # an offloaded shard is on the CPU
        sharded = DTensor.from_local(block, weights.device_mesh, weights.placements, run_check=False)
        for rank, experts in enumerate(gather_full_tensor(sharded).unflatten(0, (ranks, -1))):
            yield from ((rank * own + start + index, matrix.clone()) for index, matrix in enumerate(experts))


def _ranks_of_experts(weights: torch.Tensor) -> int | None:
    """Return the number of ranks that hold different experts; None if none do, or not as many each."""
    if not isinstance(weights, DTensor) or weights.device_mesh.size() == 1:
        return None
    sizes = zip(weights.placements, weights.device_mesh.shape, strict=True)
    ranks = math.prod(size for placement, size in sizes if placement == Shard(0))
    return None if len(weights) % ranks else ranks


def _check_rows(name: str, num_rows: int, mesh: DeviceMesh, key: str) -> None:
    copies = mesh["edp"].size()
    if num_rows % copies:
        problem = f"leaves {copies} ranks with the same experts, which must divide the {num_rows} rows of {name}"
        raise ConfigError(f"{key}.expert_parallel_size", mesh["ep"].size(), problem)


def _own_experts(parameter: nn.Parameter, ranks: DeviceMesh) -> nn.Parameter:
    size = parameter.shape[0] // ranks.size()
    own = parameter.detach().narrow(0, ranks.get_local_rank() * size, size)
    sharded = DTensor.from_local(own, ranks, [Shard(0)], run_check=False)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _dispatch(
    experts: nn.Module, group: dist.ProcessGroup, hidden: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Return sum_k scores * expert(hidden) [N, H] of tokens [N, H] and their experts' ids and scores [N, k]."""
    num_ranks, num_experts = group.size(), cast(int, experts.num_experts)
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # by expert, hence by rank
    sent = torch.bincount(flat, minlength=num_experts).view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    num_received, num_sent = received.sum(1).tolist(), sent.sum(1).tolist()
    tokens = exchange_rows(hidden.index_select(0, order // ids.shape[1]), num_received, num_sent, group)
    local_ids = torch.arange(sent.shape[1], device=ids.device).repeat(num_ranks).repeat_interleave(received.flatten())
    computed = _compute(experts, tokens, local_ids).to(tokens.dtype)  # on a CPU experts return float32
    results = exchange_rows(computed, num_sent, num_received, group)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    by_choice = results.index_select(0, back).unflatten(0, ids.shape)
    return (by_choice * scores.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _compute(experts: nn.Module, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts' results [M, H] of received tokens [M, H] and local ids [M]."""
    local = _LocalExperts(experts)
    if len(tokens) == 0:  # the weights have zero gradients all the same, in step with their copies on other ranks
        return tokens + 0 * sum(weight.sum().to(tokens.dtype) for weight in local.weights.values())
    ones = tokens.new_ones(len(tokens), 1)
    return cast(Any, type(experts)).forward(local, tokens, ids.unsqueeze(1), ones)


class _LocalExperts:
    """An experts module as transformers' forward sees it, with this rank's experts alone.

    FSDP2 gathers a weight as a DTensor over the ranks with other experts; its local part has all copies' rows.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts
        self.weights = {
            name: weight.to_local(grad_placements=weight.placements) if isinstance(weight, DTensor) else weight
            for name, weight in experts.named_parameters(recurse=False)
        }
        self.num_experts = len(next(iter(self.weights.values())))

    def __getattr__(self, name: str) -> Any:
        weights = self.__dict__["weights"]
        return weights[name] if name in weights else getattr(self._experts, name)
