"""The transport `cuda_ipc` over the CPU: what ranks hand over arrives, and one dead engine does not end the policy."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nemo_rl.distributed.tensor_transfer import receive_tensors
from nemo_rl.errors import WeightSyncError, WorkerError
from nemo_rl.weight_manifests import DeviceWeights
from nemo_rl.weight_sync import cuda_ipc
from nemo_rl.weight_sync.cuda_ipc import CudaIpc

WEIGHTS = [("a.weight", torch.arange(6.0).view(2, 3)), ("b.weight", torch.ones(5, dtype=torch.bfloat16))]


class ThreadedRanks:
    """A policy of one rank on a thread; `extra` are results of further ranks."""

    def __init__(self, *extra: str | None) -> None:
        self.extra = extra

    async def run_on_all_ranks(self, use: Callable[[Any], Any]) -> Sequence[Any]:
        use = pickle.loads(pickle.dumps(use))
        return [await asyncio.to_thread(use, iter(WEIGHTS)), *self.extra]


class Receiver:
    """An engine of one worker on the CPU."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.held: dict[str, torch.Tensor] = {}

    async def update_weights(self, manifest: DeviceWeights, weight_version: int) -> None:
        received = receive_tensors(manifest.token, device=torch.device("cpu"), timeout_s=manifest.timeout_s)
        self.held = await asyncio.to_thread(dict, received)
        if self.refuses:
            raise WeightSyncError("vLLM could not load the weights")


class Dead:
    """An engine that a router has removed: nothing receives."""

    async def update_weights(self, manifest: DeviceWeights, weight_version: int) -> None: ...


@pytest.fixture(autouse=True)
def none_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_ABSENT", set[torch.device]())


def delivered(policy: Any, engine: Any, *, timeout_s: float = 60.0) -> None:
    async def main() -> None:
        transport = CudaIpc(device="cpu", timeout_s=timeout_s, bucket_bytes=64)
        for version in (1, 2):
            staged = await transport.stage(policy)
            await transport.deliver(policy, engine, staged, version)
        transport.close()

    asyncio.run(main())


def test_engine_holds_exactly_the_policys_weights():
    engine = Receiver()
    delivered(ThreadedRanks(), engine)
    assert list(engine.held) == [name for name, _ in WEIGHTS]
    assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS)


def test_what_an_engine_refuses_is_its_own_error():
    with pytest.raises(WeightSyncError, match="vLLM could not load"):
        delivered(ThreadedRanks(), Receiver(refuses=True))


def test_refit_that_reaches_no_engine_is_an_error_of_every_rank():
    with pytest.raises(WeightSyncError, match=r"rank 0: .*0 of 1 engine workers came within 0\.1 s"):
        delivered(ThreadedRanks(), Dead(), timeout_s=0.1)


def test_rank_waits_less_for_an_engine_that_was_not_there_until_it_is_back(monkeypatch: pytest.MonkeyPatch):
    limits: list[float] = []
    is_there = iter([False, False, True, True])

    def send(*arguments: Any, timeout_s: float, **options: Any) -> None:
        limits.append(timeout_s)
        if not next(is_there):
            raise WorkerError("0 of 1 engine workers came")

    monkeypatch.setattr(cuda_ipc, "send_tensors", send)
    hand_over = cuda_ipc.HandOverWeights("token", 120.0, "cpu", num_receivers=1, bucket_bytes=64)
    problems = [hand_over(iter(WEIGHTS)) for _ in range(4)]
    assert limits == [120.0, 10.0, 10.0, 120.0]
    assert problems == ["0 of 1 engine workers came"] * 2 + [None] * 2


def test_rank_beside_a_dead_engine_is_a_warning(caplog: pytest.LogCaptureFixture):
    delivered(ThreadedRanks("its engine is gone"), Receiver())
    assert "a refit did not reach an engine: rank 1: its engine is gone" in caplog.text


def test_rank_beside_an_engine_that_has_left_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    """Ranks 0 and 1 are beside engine 0, rank 2 beside engine 1; this one is rank 2."""
    sent: list[int] = []
    monkeypatch.setattr(cuda_ipc, "send_tensors", lambda weights, *arguments, **options: sent.append(len([*weights])))
    monkeypatch.setattr(cuda_ipc.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_ipc.dist, "get_rank", lambda: 2)
    ranks_of_engines = {"engine 0": frozenset({0, 1}), "engine 1": frozenset({2})}
    gathered: list[str] = []

    async def deliver(*names: str) -> None:
        transport = CudaIpc(device="cpu", ranks_of_engines=ranks_of_engines)
        await transport.deliver(Ranks(), Named(*names), await transport.stage(Ranks()), 1)  # type: ignore[arg-type]

    class Ranks:
        async def run_on_all_ranks(self, use: Callable[[Any], Any]) -> Sequence[Any]:
            return [None, None, use((gathered.append(name) or name, tensor) for name, tensor in WEIGHTS)]

    class Named(Dead):
        def __init__(self, *names: str) -> None:
            self.replicas, self.replica_names = names, names

    asyncio.run(deliver("engine 0", "engine 1"))
    assert sent == [2]
    asyncio.run(deliver("engine 0"))
    assert sent == [2]
    assert gathered == ["a.weight", "b.weight"] * 2  # it takes part in the gathering
