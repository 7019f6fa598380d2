"""The transport `cuda_ipc`: device memory of each policy rank, read by the engine's worker on the same device."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nemo_rl.config.layout import Layout
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.tensor_transfer import BUCKET_BYTES, TIMEOUT_S, new_token, send_tensors
from nemo_rl.errors import WeightSyncError, WorkerError
from nemo_rl.interfaces import WeightSource, WeightTarget
from nemo_rl.weight_manifests import DeviceWeights, Weights
from nemo_rl.weight_sync.transports import engine_names

logger = logging.getLogger(__name__)

ABSENT_TIMEOUT_S = 10.0  # limit for an engine that missed the last refit: it may be back

_ABSENT: set[torch.device] = set()  # per rank process: devices whose engine missed the last refit


class CudaIpc:
    """Lets each policy rank hand the weights to the engine worker on its own device.

    `ranks_of_engines` are the ranks that share the devices of an engine, by its name, so that no rank waits for an
    engine that has left; None: every rank shares its device with an engine. On a CPU (for tests) the one rank hands
    them to all `num_receivers` workers.
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

    async def stage(self, policy: WeightSource) -> DeviceWeights:
        """Return the token by which ranks and workers meet; sending starts in `deliver`, once the engines receive."""
        self._hand_over = replace(self._hand_over, token=new_token())
        return DeviceWeights(self._hand_over.token, self._hand_over.timeout_s)

    async def deliver(
        self, policy: WeightSource, generation: WeightTarget, staged: Weights, weight_version: int
    ) -> None:
        ranks = self._ranks_beside(engine_names(generation))
        received, sent = await asyncio.gather(
            generation.update_weights(staged, weight_version),
            policy.run_on_all_ranks(replace(self._hand_over, ranks=ranks)),
            return_exceptions=True,  # both end at the latest at the deadline
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
        for problem in problems:  # its engine has died, and the router has removed it
            logger.warning("a refit did not reach an engine: %s", problem)

    def _ranks_beside(self, engines: Sequence[str]) -> frozenset[int] | None:
        known = self._ranks_of_engines
        if known is None or not known.keys() >= set(engines):
            return None
        return frozenset[int]().union(*(known[name] for name in engines))

    def close(self) -> None:
        """Do nothing: no weights are held between refits."""


@dataclass(frozen=True, slots=True)
class HandOverWeights:
    """Hands the weights to the engine workers on this rank's device; returns an error text or None. Picklable.

    All ranks wait for the slowest, so a dead engine costs `timeout_s` once, and ABSENT_TIMEOUT_S at later refits.
    A rank that shares its device with no engine takes part in gathering the weights and hands over nothing.
    """

    token: str
    timeout_s: float
    device_type: str
    num_receivers: int
    bucket_bytes: int
    ranks: frozenset[int] | None = None  # ranks that share their device with an engine worker; None: all

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
        except WorkerError as error:  # the policy outlives an engine that has died
            _ABSENT.add(device)
            return str(error)
        finally:
            if is_cuda:
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()  # free memory for the engine
        return None


def make_cuda_ipc(section: WeightSyncConfig, layout: Layout) -> CudaIpc:
    """Return the transport, which knows the policy ranks on the devices of each engine."""
    ranks_of_engines = {
        f"engine {index}": frozenset(
            rank
            for rank, slot in enumerate(layout.ranks)
            if slot.node == engine.node and not set(slot.gpus).isdisjoint(engine.gpus)
        )
        for index, engine in enumerate(layout.engines)
    }
    return CudaIpc(ranks_of_engines=ranks_of_engines)
