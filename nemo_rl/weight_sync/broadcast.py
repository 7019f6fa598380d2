"""Weights broadcast from the policy's first rank to all engine workers: NCCL between devices, gloo on a CPU."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from nemo_rl.distributed.cluster import node_ip
from nemo_rl.distributed.tensor_stream import Rendezvous, TensorStream
from nemo_rl.errors import WeightSyncError, WorkerError
from nemo_rl.interfaces import Generation, Policy, Weights, WeightStream, engine_replicas

# For all members to meet, and for one broadcast; below that of the ranks' own collectives, which wait.
TIMEOUT_S = 120.0

_STREAMS: dict[tuple[str, int], TensorStream] = {}  # in the policy's process, by host and port


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Sends the weights as the first member of `stream`, joining it where that has not been done. Picklable."""

    stream: WeightStream

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        address = (self.stream.host, self.stream.port)
        joined = _STREAMS.get(address)
        if joined is None or joined.group != self.stream.group:
            joined = _STREAMS[address] = TensorStream(
                self.stream.host,
                self.stream.port,
                group=self.stream.group,
                size=self.stream.size,
                backend=self.stream.backend,
                timeout_s=self.stream.timeout_s,
                device=device_for_backend(self.stream.backend),
                is_sender=True,
            )
        joined.send(weights)


def device_for_backend(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


class Broadcast:
    """The transport `nccl`: a broadcast to `workers_per_engine` workers of each engine.

    The group is created again when other engines are alive than at the last refit.
    """

    def __init__(self, *, backend: str, workers_per_engine: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self._backend = backend
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = None
        self._members: tuple[Generation, ...] = ()
        self._group = 0

    async def stage(self, policy: Policy) -> WeightStream:
        """Return the address where the members meet: nothing can be sent before the engines receive."""
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(node_ip())
        return WeightStream(
            self._rendezvous.host, self._rendezvous.port, self._group, 0, self._backend, self._timeout_s
        )

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        assert isinstance(staged, WeightStream)
        members = tuple(engine_replicas(generation))
        if members != self._members:
            self._group += 1
        self._members = members
        stream = replace(staged, group=self._group, size=1 + len(members) * self._workers_per_engine)
        outcomes = await asyncio.gather(
            generation.update_weights(stream, weight_version),
            policy.run_with_weights(SendWeights(stream)),
            return_exceptions=True,  # both end, by themselves or at the deadline of the broadcasts
        )
        for outcome in outcomes:
            if isinstance(outcome, WorkerError):
                raise WeightSyncError(f"the policy could not send its weights: {outcome}") from outcome
            if isinstance(outcome, BaseException):
                raise outcome

    def close(self) -> None:
        """Drop the rendezvous; groups end with their processes."""
        self._rendezvous = None
