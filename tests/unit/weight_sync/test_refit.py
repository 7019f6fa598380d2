import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.fakes.generation import FakeGeneration


class RecordingPolicy:
    """Notes its calls beside those of the engine; its log-probs are the engine's, plus `off`."""

    def __init__(self, calls: list[str], off: float = 0.0) -> None:
        self.calls = calls
        self.off = off

    async def run_with_weights(self, use: Callable[[Any], Any]) -> Any:
        self.calls.append("run_with_weights")
        return use([("a.weight", torch.ones(2, 2))])

    async def logprobs(self, batch: Any) -> torch.Tensor:
        self.calls.append("logprobs")
        return batch["generation_logprobs"] + self.off


def publish(
    *versions: int,
    section: WeightSyncConfig,
    off: float = 0.0,
    probes: Any = ((1, 2),),
    keep_cache: bool = False,
    device: str = "cpu",
) -> list[str]:
    async def main() -> list[str]:
        engine = FakeGeneration()
        policy = RecordingPolicy(engine.calls, off)
        sync = TransportWeightSync(probes, section, "float32", keep_cache=keep_cache, device=device)
        try:
            for version in versions:
                await sync.publish(policy, engine, weight_version=version)  # type: ignore[arg-type]
        finally:
            sync.close()
        return engine.calls

    return asyncio.run(main())


def refit(version: int) -> list[str]:
    return ["run_with_weights", "pause", f"update_weights {version}", "resume"]


def test_weights_are_written_before_the_engine_pauses_and_the_first_refit_is_verified():
    assert publish(1, 2, section=WeightSyncConfig(), device="cuda") == [*refit(1), "logprobs", *refit(2)]


def test_on_a_cpu_the_second_refit_is_verified_too():
    calls = publish(1, 2, 3, section=WeightSyncConfig())
    assert calls == [*refit(1), "logprobs", *refit(2), "logprobs", *refit(3)]


def test_every_refit_is_verified_where_the_section_says_so():
    calls = publish(1, 2, 3, section=WeightSyncConfig(verify=True))
    assert calls == [*refit(1), "logprobs", *refit(2), "logprobs", *refit(3), "logprobs"]


def test_tolerance_is_the_sections():
    with pytest.raises(WeightSyncError):
        publish(1, section=WeightSyncConfig(), off=0.01)
    publish(1, section=WeightSyncConfig(verify_tolerance=0.1), off=0.01)


def test_without_probes_nothing_is_verified():
    assert publish(1, section=WeightSyncConfig(), probes=()) == refit(1)


def test_running_requests_keep_their_cache_where_that_is_asked_for():
    assert publish(1, section=WeightSyncConfig(), probes=(), keep_cache=True)[1] == "pause keep_cache"


class Turns:
    """Notes where the turns of a shared device begin and end."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    @asynccontextmanager
    async def delivery(self) -> AsyncIterator[None]:
        self.calls.append("delivery")
        yield
        self.calls.append("delivered")

    @asynccontextmanager
    async def policy_turn(self, *parts: str) -> AsyncIterator[None]:
        self.calls.append(f"turn {' '.join(parts)}")
        yield
        self.calls.append("turned")


def test_on_a_shared_device_the_engine_samples_the_probes_before_the_policy_scores_them():
    async def main() -> list[str]:
        engine = FakeGeneration()
        policy = RecordingPolicy(engine.calls)
        sync = TransportWeightSync(((1, 2),), WeightSyncConfig(), "float32")
        try:
            await sync.publish(policy, engine, weight_version=1, turns=Turns(engine.calls))  # type: ignore[arg-type]
        finally:
            sync.close()
        assert len(engine.requests) == 1
        return engine.calls

    assert asyncio.run(main()) == [
        *("delivery", "run_with_weights", "pause", "update_weights 1", "delivered", "resume"),
        *("turn weights", "logprobs", "turned"),
    ]


def test_the_first_refits_of_each_replica_are_verified():
    async def main() -> list[str]:
        engines = [FakeGeneration(), FakeGeneration()]
        router = ReplicatedGeneration(engines)
        policy = RecordingPolicy([])
        sync = TransportWeightSync(((1, 2),), WeightSyncConfig(), "float32")
        try:
            for version in (1, 2, 3):
                await sync.publish(policy, router, weight_version=version)  # type: ignore[arg-type]
        finally:
            sync.close()
        asked = [request.request_id for engine in engines for request in engine.requests]
        assert asked == ["verify-1-0", "verify-2-0"] * 2
        return policy.calls

    assert asyncio.run(main()) == [*["run_with_weights", "logprobs", "logprobs"] * 2, "run_with_weights"]
