"""Processes that are the ranks of a policy, kept while tests use them.

Importing torch and transformers takes seconds, so one process imports them and forks all ranks; each is stopped until
there is a job. A job is a function of a layout, called on all of its ranks at once. As in a run, a process has one
layout: no process group is ever given back, and with hundreds of them a process has a thousand threads and files.
"""

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nemo_rl.policy.ranks import RankLayout

JOB_TIMEOUT_S = 240.0
COLLECTIVE_TIMEOUT_S = 200.0
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
MAX_RANKS = 28  # processes at once; each keeps some 100 MB that it does not share

_FORKED = get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.contracts.rank_imports"])

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
    context_parallel_size: int = 1
    divides_only_long: bool = False  # `context_parallel_size: auto`, which the batching must come to
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        ranks = self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size
        return ranks * self.context_parallel_size

    @property
    def config(self) -> dict[str, Any]:
        """Return the result for `policy`."""
        if self.backend == "fsdp2":
            sizes = {"expert_parallel_size": self.expert_parallel_size}
            context = "auto" if self.divides_only_long else self.context_parallel_size
            sizes |= {"context_parallel_size": context, "sequence_parallel": self.sequence_parallel}
            return {"dtensor_cfg": sizes}
        sizes = {
            "tensor_model_parallel_size": self.tensor_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_parallel_size,
            "expert_model_parallel_size": self.expert_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "sequence_parallel": self.sequence_parallel,
        }
        return {"megatron_cfg": {"enabled": True, **sizes}}


class _Group:
    """The ranks of a mesh, which are processes."""

    def __init__(self, mesh: Mesh, meeting_point: str) -> None:
        self._mesh, self._meeting_point = mesh, meeting_point
        pipes = [_FORKED.Pipe() for _ in range(mesh.world_size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [_FORKED.Process(target=_serve, args=(theirs,)) for _, theirs in pipes]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, job: Job, arguments: dict[str, Any]) -> list[Any]:
        self._signal(signal.SIGCONT)
        for rank, connection in enumerate(self._connections):
            connection.send_bytes(pickle.dumps((job, self._layout(rank), arguments)))
        results = [self._answer(connection) for connection in self._connections]
        self._signal(signal.SIGSTOP)  # each thread of gloo, several dozen in a rank, wakes 100 times a second
        return results

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def _layout(self, rank: int) -> RankLayout:
        mesh = self._mesh
        return RankLayout(
            rank=rank,
            data_parallel_size=mesh.data_parallel_size,
            tensor_parallel_size=mesh.tensor_parallel_size,
            pipeline_parallel_size=mesh.pipeline_parallel_size,
            expert_parallel_size=mesh.expert_parallel_size if mesh.backend == "fsdp2" else 1,
            context_parallel_size=mesh.context_parallel_size,
            divides_only_long=mesh.divides_only_long,
            init_method=f"file://{self._meeting_point}",
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(JOB_TIMEOUT_S):
            raise TimeoutError(f"a rank of {self._mesh} did not answer in {JOB_TIMEOUT_S} s")
        try:
            is_good, value = pickle.loads(connection.recv_bytes())
        except EOFError:
            is_good, value = False, "it has ended; where is written to standard error"
        if not is_good:
            raise RuntimeError(f"on a rank of {self._mesh}:\n{value}")
        return value


class RankPool:
    """Groups of ranks by mesh, begun when first asked for; the longest unused end when there are too many."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._groups: dict[Mesh, _Group] = {}  # the last used last
        self._num_begun = 0

    def run(self, mesh: Mesh, job: Job, **arguments: Any) -> list[Any]:
        """Return the job's result on each rank; raise what its first failing rank raised, and end the group."""
        group = self._groups.pop(mesh, None) or self._begin(mesh)
        try:
            results = group.run(job, arguments)
        except BaseException:
            group.close()
            raise
        self._groups[mesh] = group
        return results

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def _begin(self, mesh: Mesh) -> _Group:
        while sum(each.world_size for each in self._groups) + mesh.world_size > MAX_RANKS:
            self._groups.pop(next(iter(self._groups))).close()
        self._num_begun += 1
        return _Group(mesh, f"{self._directory}/group-{self._num_begun}")


def _serve(connection: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.freeze()  # what the imports left is not looked at again
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would not see that the tests have ended
    while True:
        try:
            job, layout, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, job(layout, **arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        del arguments
        gc.collect()
        libc.malloc_trim(0)  # some jobs need gigabytes, which the C library keeps
        connection.send_bytes(answer)
