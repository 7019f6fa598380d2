"""Processes that are the ranks of a policy, kept for a whole test session.

Importing torch and transformers takes seconds, so one process imports them and forks all ranks; each then waits for
jobs. A job is a function of a layout, called on all of its ranks at once. As in a run, a process has one layout: no
process group is ever given back, and with hundreds of them a process has a thousand threads and files.
"""

import faulthandler
import pickle
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nemo_rl.policy.ranks import RankLayout

JOB_TIMEOUT_S = 240.0
COLLECTIVE_TIMEOUT_S = 200.0

Job = Callable[..., Any]


@dataclass(frozen=True)
class Mesh:
    """Sizes of a layout; its processes are those of its number of ranks."""

    data_parallel_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    backend: str = "fsdp2"
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def config(self) -> dict[str, Any]:
        """Return the result for `policy`."""
        if self.backend == "fsdp2":
            return {"dtensor_cfg": {"expert_parallel_size": self.expert_parallel_size}}
        sizes = {
            "tensor_model_parallel_size": self.tensor_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_parallel_size,
            "expert_model_parallel_size": self.expert_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_parallel_size,
        }
        return {"megatron_cfg": {"enabled": True, **sizes}}


class RankPool:
    """A group of ranks for each mesh, all forked together and used in turn."""

    def __init__(self, directory: Path, meshes: Iterable[Mesh]) -> None:
        self._directory = directory
        context = get_context("spawn")
        pipes = {mesh: [context.Pipe() for _ in range(mesh.world_size)] for mesh in meshes}
        self._connections = {mesh: [ours for ours, _ in pairs] for mesh, pairs in pipes.items()}
        theirs = [connection for pairs in pipes.values() for _, connection in pairs]
        self._parent = context.Process(target=_fork_ranks, args=(theirs,))
        self._parent.start()
        for connection in theirs:
            connection.close()

    def run(self, mesh: Mesh, job: Job, **arguments: Any) -> list[Any]:
        """Return the job's result on each rank; raise what its first failing rank raised, and drop the group."""
        connections = self._connections[mesh]
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps((job, self._layout(mesh, rank), arguments)))
        return [self._answer(mesh, connection) for connection in connections]

    def close(self) -> None:
        for connection in (c for group in self._connections.values() for c in group):
            connection.close()
        self._parent.join(timeout=60)
        self._parent.kill()

    def _layout(self, mesh: Mesh, rank: int) -> RankLayout:
        return RankLayout(
            rank=rank,
            data_parallel_size=mesh.data_parallel_size,
            tensor_parallel_size=mesh.tensor_parallel_size,
            pipeline_parallel_size=mesh.pipeline_parallel_size,
            expert_parallel_size=mesh.expert_parallel_size if mesh.backend == "fsdp2" else 1,
            init_method=f"file://{self._directory}/group-{list(self._connections).index(mesh)}",
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )

    def _answer(self, mesh: Mesh, connection: Connection) -> Any:
        if not connection.poll(JOB_TIMEOUT_S):
            raise TimeoutError(f"a rank of {mesh} did not answer in {JOB_TIMEOUT_S} s")
        try:
            is_good, value = pickle.loads(connection.recv_bytes())
        except EOFError:
            is_good, value = False, "it has ended; where is written to standard error"
        if not is_good:
            for one in self._connections[mesh]:
                one.close()
            raise RuntimeError(f"on a rank of {mesh}:\n{value}")
        return value


def _fork_ranks(connections: list[Connection]) -> None:
    """Return the process that has imported everything, by importing this module and the jobs' modules."""
    import tests.contracts.policies  # noqa: F401  the jobs, and with them transformers
    from nemo_rl.policy.megatron.start import import_megatron

    import_megatron()

    context = get_context("fork")
    ranks = [context.Process(target=_serve, args=(connection, connections)) for connection in connections]
    for rank in ranks:
        rank.start()
    for connection in connections:
        connection.close()
    for rank in ranks:
        rank.join()


def _serve(own: Connection, all_connections: list[Connection]) -> None:
    for connection in all_connections:
        if connection is not own:
            connection.close()
    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            job, layout, arguments = pickle.loads(own.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, job(layout, **arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        own.send_bytes(pickle.dumps(answer))
