import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl.config.run import WeightSyncConfig
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
    *versions: int, section: WeightSyncConfig, off: float = 0.0, probes: Any = ((1, 2),), keep_cache: bool = False
) -> list[str]:
    async def main() -> list[str]:
        engine = FakeGeneration()
        policy = RecordingPolicy(engine.calls, off)
        sync = TransportWeightSync(probes, section, "float32", keep_cache=keep_cache)
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
    assert publish(1, 2, section=WeightSyncConfig()) == [*refit(1), "logprobs", *refit(2)]


def test_every_refit_is_verified_where_the_section_says_so():
    assert publish(1, 2, section=WeightSyncConfig(verify=True)) == [*refit(1), "logprobs", *refit(2), "logprobs"]


def test_tolerance_is_the_sections():
    with pytest.raises(WeightSyncError):
        publish(1, section=WeightSyncConfig(), off=0.01)
    publish(1, section=WeightSyncConfig(verify_tolerance=0.1), off=0.01)


def test_without_probes_nothing_is_verified():
    assert publish(1, section=WeightSyncConfig(), probes=()) == refit(1)


def test_running_requests_keep_their_cache_where_that_is_asked_for():
    assert publish(1, section=WeightSyncConfig(), probes=(), keep_cache=True)[1] == "pause keep_cache"


def test_the_first_refit_of_each_replica_is_verified():
    async def main() -> list[str]:
        engines = [FakeGeneration(), FakeGeneration()]
        router = ReplicatedGeneration(engines)
        policy = RecordingPolicy([])
        sync = TransportWeightSync(((1, 2),), WeightSyncConfig(), "float32")
        try:
            for version in (1, 2):
                await sync.publish(policy, router, weight_version=version)  # type: ignore[arg-type]
        finally:
            sync.close()
        asked = [request.request_id for engine in engines for request in engine.requests]
        assert [len(engine.requests) for engine in engines] == [1, 1]
        assert asked == ["verify-1-0", "verify-1-0"]
        return policy.calls

    assert asyncio.run(main()) == ["run_with_weights", "logprobs", "logprobs", "run_with_weights"]
