"""A refit by broadcast that an engine replica hangs in: it ends with the cause, and the policy's processes live on."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed.cluster import connect, reserve
from nemo_rl.distributed.tensor_transfer import TensorStream, member_name
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.policy.driver import PolicyWorkerGroup
from nemo_rl.weight_manifests import WeightStream
from nemo_rl.weight_sync.nccl import Broadcast
from tests.contracts.test_policy_group import DEADLINE_S, LENGTHS, TWO_RANKS, NormsIn, settings
from tests.unit.policy.tiny import make_batch, saved_model

LIMIT_S = 5.0


class Receiver:
    """The part of an engine that receives weights, on a thread of this process in place of one of its own."""

    is_async = True

    def __init__(self) -> None:
        self.hangs = False
        self.may_end = threading.Event()
        self.norms: dict[str, float] = {}
        self._stream: TensorStream | None = None

    async def update_weights(self, manifest: WeightStream, weight_version: int) -> None:
        await asyncio.to_thread(self._receive, manifest)

    def _receive(self, manifest: WeightStream) -> None:
        if self._stream is None or self._stream.group != manifest.group:
            self._stream = TensorStream(
                manifest.host, manifest.port, group=manifest.group, members=manifest.members,
                name=member_name(manifest.engine, 0), backend="gloo", timeout_s=manifest.timeout_s,
                device=torch.device("cpu"),
            )  # fmt: skip
        if self.hangs:
            self.may_end.wait(DEADLINE_S)
            return
        self.norms = {name: float(tensor.norm()) for name, tensor in self._stream.receive()}


@pytest.mark.slow  # waits for deadlines of two engines
def test_a_replica_that_hangs_ends_the_refit_with_its_name_and_the_policy_trains_on(tmp_path: Path) -> None:
    connect(num_cpus=2)
    config, arguments = settings(saved_model("qwen2", tmp_path))
    engines: list[Any] = [Receiver(), Receiver()]

    async def main() -> None:
        reservation = await reserve(TWO_RANKS, timeout_s=DEADLINE_S)
        slots = [reservation.slot(device_slot) for device_slot in TWO_RANKS.ranks]
        policy = await PolicyWorkerGroup.create(config, slots=slots, timeout_s=DEADLINE_S, **arguments)
        generation, transport = ReplicatedGeneration(engines), Broadcast(backend="gloo", timeout_s=LIMIT_S)

        async def refit(weight_version: int) -> None:
            await transport.deliver(policy, generation, await transport.stage(policy), weight_version)

        try:
            pids, (_, norms) = await policy.pids(), await policy.run_with_weights(NormsIn(1.0))
            await refit(1)
            assert engines[0].norms == engines[1].norms == pytest.approx(norms)
            before = await policy.logprobs(make_batch(LENGTHS))
            engines[1].hangs = True
            cause = "the refit to weights 2 has failed: engine 1 worker 0 took no part in a broadcast within 5 s"
            with pytest.raises(WeightSyncError, match=cause):
                await refit(2)
            assert await policy.pids() == pids
            torch.testing.assert_close(await policy.logprobs(make_batch(LENGTHS)), before, rtol=0, atol=0)
            engines[1].hangs = False
            engines[1].may_end.set()
            engines[0].norms = engines[1].norms = {}
            await refit(3)  # in a group of its own
            assert engines[0].norms == engines[1].norms == pytest.approx(norms)
        finally:
            engines[1].may_end.set()
            await policy.close()
            reservation.release()

    asyncio.run(main())
