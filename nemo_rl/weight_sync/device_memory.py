"""Weights that stay in the memory of devices: `cuda_ipc`, from each policy rank to the engine's workers on its device;
`nccl`, a broadcast from the policy's first rank to the workers of all engines (gloo on a CPU)."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.distributed.cluster import node_ip
from nemo_rl.distributed.tensor_transfer import (
    BUCKET_BYTES,
    Rendezvous,
    TensorStream,
    member_name,
    new_token,
    send_tensors,
)
from nemo_rl.errors import WeightSyncError, WorkerError
from nemo_rl.interfaces import DeviceWeights, Generation, Policy, Weights, WeightStream
from nemo_rl.weight_sync.refit import engine_names, engine_replicas

logger = logging.getLogger(__name__)

# For all members of a broadcast to meet, and for one tensor or bucket to be taken; below the limit of the ranks' own
# collectives, which wait meanwhile.
TIMEOUT_S = 120.0
ABSENT_TIMEOUT_S = 10.0  # for the worker of an engine that was not there at the last refit: it may have come back
SENDER = "the policy's first rank"

_STREAMS: dict[tuple[str, int], TensorStream] = {}  # in the policy's process, by host and port
_ABSENT: set[torch.device] = set()  # in a rank's process: devices whose engine did not take the last weights


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
                members=self.stream.members,
                name=SENDER,
                backend=self.stream.backend,
                timeout_s=self.stream.timeout_s,
                device=device_for_backend(self.stream.backend),
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
            self._rendezvous.host, self._rendezvous.port, self._group, (), "", self._backend, self._timeout_s
        )

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        assert isinstance(staged, WeightStream)
        members = tuple(engine_replicas(generation))
        if members != self._members:
            self._group += 1
        self._members = members
        engines = engine_names(generation)
        names = (SENDER, *(member_name(e, worker) for e in engines for worker in range(self._workers_per_engine)))
        stream = replace(staged, group=self._group, members=names, engine=engines[0])
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


@dataclass(frozen=True, slots=True)
class HandOverWeights:
    """Hands the weights to the engine's workers on this rank's device; returns what went wrong. Picklable.

    All ranks wait for the slowest, so a dead engine costs `timeout_s` once, and ABSENT_TIMEOUT_S at later refits.
    A rank beside no engine takes part in gathering the weights, and hands over nothing.
    """

    token: str
    timeout_s: float
    device_type: str
    num_receivers: int
    bucket_bytes: int
    ranks: frozenset[int] | None = None  # those with an engine's worker on their device; None: all

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        if self.ranks is not None and (dist.get_rank() if dist.is_initialized() else 0) not in self.ranks:
            for _ in weights:
                pass
            return None
        is_cuda = self.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        try:
            send_tensors(
                weights,
                self.token,
                device=device,
                num_receivers=self.num_receivers,
                timeout_s=min(self.timeout_s, ABSENT_TIMEOUT_S) if device in _ABSENT else self.timeout_s,
                bucket_bytes=self.bucket_bytes,
            )
            _ABSENT.discard(device)
        except WorkerError as error:  # an engine that has died is no reason to end the policy
            _ABSENT.add(device)
            return str(error)
        finally:
            if is_cuda:
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()  # the engine may need it
        return None


class CudaIpc:
    """The transport `cuda_ipc`: each policy rank hands the weights to the engine's worker on its own device.

    `ranks_of_engines` are the ranks that share an engine's devices, by its name: no rank waits for an engine that has
    left. None: every rank has one. On a CPU (for tests) the one rank hands them to all `num_receivers` workers.
    """

    def __init__(
        self,
        *,
        device: str = "cuda",
        num_receivers: int = 1,
        timeout_s: float = TIMEOUT_S,
        bucket_bytes: int = BUCKET_BYTES,
        ranks_of_engines: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        self._hand_over = HandOverWeights("", timeout_s, device, num_receivers, bucket_bytes)
        self._ranks_of_engines = ranks_of_engines

    async def stage(self, policy: Policy) -> DeviceWeights:
        """Return where ranks and workers meet: nothing can be sent before the engines receive."""
        self._hand_over = replace(self._hand_over, token=new_token())
        return DeviceWeights(self._hand_over.token, self._hand_over.timeout_s)

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        ranks = self._ranks_beside(engine_names(generation))
        received, sent = await asyncio.gather(
            generation.update_weights(staged, weight_version),
            policy.run_on_all_ranks(replace(self._hand_over, ranks=ranks)),
            return_exceptions=True,  # both end, by themselves or at the deadline
        )
        if isinstance(sent, WorkerError):
            raise WeightSyncError(f"the policy could not send its weights: {sent}") from sent
        if isinstance(sent, BaseException):
            raise sent
        if isinstance(received, BaseException):
            raise received
        problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(sent) if problem is not None]
        if len(problems) == (len(sent) if ranks is None else len(ranks)):
            raise WeightSyncError("; ".join(problems))
        for problem in problems:  # of an engine that has died; the router has removed it
            logger.warning("a refit did not reach an engine: %s", problem)

    def _ranks_beside(self, engines: Sequence[str]) -> frozenset[int] | None:
        known = self._ranks_of_engines
        if known is None or not known.keys() >= set(engines):
            return None
        return frozenset[int]().union(*(known[name] for name in engines))

    def close(self) -> None:
        """Do nothing: nothing is held between refits."""
