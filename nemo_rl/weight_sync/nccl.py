"""The transport `nccl`: a broadcast from the policy's first rank to the workers of all engines (gloo on a CPU)."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from nemo_rl.config.layout import Layout
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.cluster import node_ip
from nemo_rl.distributed.tensor_transfer import (
    REPORT_S,
    TIMEOUT_S,
    Rendezvous,
    StreamBroken,
    TensorStream,
    member_name,
)
from nemo_rl.errors import WeightSyncError, WorkerError
from nemo_rl.interfaces import WeightSource, WeightTarget
from nemo_rl.weight_manifests import Weights, WeightStream
from nemo_rl.weight_sync.transports import engine_names, engine_replicas

SENDER = "the policy's first rank"

_STREAMS: dict[tuple[str, int], TensorStream] = {}  # joined in the policy's process, by host and port


class Broadcast:
    """Broadcasts the weights to `workers_per_engine` workers of each engine.

    The group is created again if the set of engines has changed since the last refit.
    """

    def __init__(self, *, backend: str, workers_per_engine: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self._backend = backend
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = None
        self._members: tuple[object, ...] = ()
        self._group = 0

    async def stage(self, policy: WeightSource) -> WeightStream:
        """Return the address where the members meet; sending starts in `deliver`, once the engines receive."""
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(node_ip())
        return WeightStream(
            self._rendezvous.host, self._rendezvous.port, self._group, (), "", self._backend, self._timeout_s
        )

    async def deliver(
        self, policy: WeightSource, generation: WeightTarget, staged: Weights, weight_version: int
    ) -> None:
        assert isinstance(staged, WeightStream)
        members = tuple(engine_replicas(generation))
        if members != self._members:
            self._group += 1
        self._members = members
        engines = engine_names(generation)
        names = (SENDER, *(member_name(e, worker) for e in engines for worker in range(self._workers_per_engine)))
        stream = replace(staged, group=self._group, members=names, engine=engines[0])
        receiving = asyncio.ensure_future(generation.update_weights(stream, weight_version))
        try:
            problem = await policy.run_with_weights(SendWeights(stream))  # ends at the deadline of its broadcasts
            if problem is not None:
                self._members = ()  # the next refit needs a group of its own
                ended, _ = await asyncio.wait((receiving,), timeout=REPORT_S)
                cause = receiving.exception() if ended else None
                raise WeightSyncError(f"the refit to weights {weight_version} has failed: {problem}") from cause
            await receiving
        except WorkerError as error:
            raise WeightSyncError(f"the policy could not send its weights: {error}") from error
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def close(self) -> None:
        """Drop the rendezvous; process groups end with their processes."""
        self._rendezvous = None


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Sends the weights as the first member of `stream`, joining it if necessary. Picklable.

    Returns why the other members could not be reached, else None: an error would end the policy's processes.
    """

    stream: WeightStream

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        address = (self.stream.host, self.stream.port)
        try:
            joined = _STREAMS.get(address)
            if joined is None or joined.group != self.stream.group:
                joined = _STREAMS[address] = self._join()
            joined.send(weights)
        except StreamBroken as error:
            _STREAMS.pop(address, None)
            return str(error)
        return None

    def _join(self) -> TensorStream:
        device = f"cuda:{torch.cuda.current_device()}" if self.stream.backend == "nccl" else "cpu"
        return TensorStream(
            self.stream.host,
            self.stream.port,
            group=self.stream.group,
            members=self.stream.members,
            name=SENDER,
            backend=self.stream.backend,
            timeout_s=self.stream.timeout_s,
            device=torch.device(device),
        )


def make_nccl(section: WeightSyncConfig, layout: Layout) -> Broadcast:
    return Broadcast(backend="nccl", workers_per_engine=max(len(engine.gpus) for engine in layout.engines))
