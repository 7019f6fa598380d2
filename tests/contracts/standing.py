"""Objects for actors that are quick to start."""

import os

import ray


class Standing:
    """Names the node of Ray that it is on, and the variables of its process."""

    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Rank:
    """A rank in a process group of all ranks."""

    def __init__(self, *, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        import torch  # not for `Standing`

        from nemo_rl.policy.ranks import RankLayout, join

        address = f"tcp://{master_address}:{master_port}"
        self._layout = RankLayout(rank=rank, data_parallel_size=world_size, init_method=address)
        join(self._layout, torch.device("cpu"))

    def sum_of_ranks(self) -> float:
        import torch

        return float(self._layout.all_reduce_sum(torch.tensor(float(self._layout.rank))))
