import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_sync.refit import TransportWeightSync, to_logprob_batch, verify_weights
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


class Echo:
    """Answers each probe with two tokens of known log-probs; the second probe fails where told."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in reversed(requests):
            if self.fails and request.seed == 1:
                yield FailedRequest(request.request_id, "too long")
            else:
                yield Completion(request.request_id, (7, 8), (-1.0, -2.0), "length")


class Constant:
    """A policy that gives every token one log-prob, but for those of `others`."""

    def __init__(self, others: dict[tuple[int, int], float]) -> None:
        self.others = others

    async def logprobs(self, batch: TensorDict) -> torch.Tensor:
        logprobs = batch["generation_logprobs"].clone()
        for place, value in self.others.items():
            logprobs[place] = value
        return logprobs


def difference(policy: Any, generation: Any, tolerance: float = 0.01) -> float:
    return asyncio.run(
        verify_weights(
            policy,
            generation,
            probes=[(1, 2, 3), (4,)],
            temperature=1.0,
            tolerance=tolerance,
            weight_version=5,
        )
    )


def test_largest_difference_is_told():
    assert difference(Constant({(0, 3): -1.004, (1, 2): -2.001}), Echo()) == pytest.approx(0.004, abs=1e-6)


def test_difference_beyond_the_tolerance_names_probe_token_and_both_values():
    with pytest.raises(WeightSyncError) as caught:
        difference(Constant({(1, 2): -2.5}), Echo())
    text = str(caught.value)
    assert "weights 5" in text
    assert "0.5, tolerance 0.01" in text
    assert "probe 1, sampled token 1 (id 8), engine -2.00000, policy -2.50000" in text


def test_tokens_of_the_prompt_do_not_count():
    assert difference(Constant({(0, 1): -30.0, (1, 4): -30.0}), Echo()) == 0.0


def test_log_probs_that_are_not_numbers_fail():
    with pytest.raises(WeightSyncError):
        difference(Constant({(0, 3): float("nan")}), Echo())


def test_unanswered_probe_fails():
    with pytest.raises(WeightSyncError, match="too long"):
        difference(Constant({}), Echo(fails=True))


def test_batch_holds_prompts_and_completions_side_by_side():
    requests = [GenerationRequest("a", (1, 2, 3), None, 0, "s"), GenerationRequest("b", (4,), None, 0, "s")]  # type: ignore[arg-type]
    completions = [Completion("a", (7,), (-1.0,), "stop"), Completion("b", (8, 9), (-2.0, -3.0), "length")]
    batch = to_logprob_batch(requests, completions)
    assert batch["token_ids"].tolist() == [[1, 2, 3, 7], [4, 8, 9, 0]]
    assert batch["token_mask"].tolist() == [[0, 0, 0, 1], [0, 1, 1, 0]]
    assert batch["generation_logprobs"].tolist() == [[0, 0, 0, -1], [0, -2, -3, 0]]
    assert batch["lengths"].tolist() == [4, 3]
