import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.interfaces import Weights
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_sync.refit import (
    LOW_PRECISION,
    PROBE_SAMPLING,
    InProcess,
    Tolerance,
    TransportWeightSync,
    compare_logprobs,
    default_tolerance,
    sample_probes,
    to_logprob_batch,
)
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


class Trainable:
    """A policy of one weight, and an engine that may write to it while it loads it."""

    def __init__(self, *, is_written: bool) -> None:
        self.weight = torch.ones(2, 2)
        self.loaded = torch.zeros(2, 2)
        self._is_written = is_written

    async def run_with_weights(self, use: Callable[[Any], Any]) -> Any:
        return use([("a.weight", self.weight.detach())])

    async def update_weights(self, weights: Weights, weight_version: int) -> None:
        for _, tensor in map_weights(weights):
            self.loaded.copy_(tensor.mul_(2.0) if self._is_written else tensor)


@pytest.mark.parametrize("is_written", [False, True])
def test_engine_that_writes_to_the_policys_own_tensors_is_refused(is_written: bool) -> None:
    async def main() -> None:
        both: Any = Trainable(is_written=is_written)
        transport = InProcess()
        await transport.deliver(both, both, await transport.stage(both), 1)
        assert torch.equal(both.loaded, both.weight)

    if is_written:
        with pytest.raises(WeightSyncError, match=r"written to the policy's own a\.weight while it loaded it"):
            asyncio.run(main())
    else:
        asyncio.run(main())


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


TIGHT = Tolerance(mean=0.005, largest=0.01)


def difference(policy: Any, generation: Any, tolerance: Tolerance = TIGHT) -> float:
    async def main() -> float:
        batch = await sample_probes(generation, [(1, 2, 3), (4,)], sampling=PROBE_SAMPLING, weight_version=5)
        return compare_logprobs(batch, await policy.logprobs(batch), tolerance, weight_version=5)

    return asyncio.run(main())


def test_mean_difference_is_returned():
    assert difference(Constant({(0, 3): -1.004, (1, 2): -2.001}), Echo()) == pytest.approx(0.005 / 4, abs=1e-6)


def test_a_difference_at_the_tolerance_is_allowed():
    assert difference(Constant({}), Echo(), Tolerance(mean=0.0, largest=0.0)) == 0.0
    assert Tolerance.of_mean(0.2) == Tolerance(mean=0.2, largest=3.0)


def test_difference_of_one_token_beyond_the_tolerance_names_probe_token_and_both_values():
    with pytest.raises(WeightSyncError) as caught:
        difference(Constant({(1, 2): -2.5}), Echo(), Tolerance(mean=0.2, largest=0.4))
    text = str(caught.value)
    assert "weights 5" in text
    assert "by 0.125 on average and by up to 0.5 (tolerance 0.2 and 0.4, over 4 tokens)" in text
    assert "probe 1, sampled token 1 (id 8), engine -2.00000, policy -2.50000" in text


def test_small_difference_of_all_tokens_is_found_by_its_mean():
    shifted = Constant({(0, 3): -1.05, (0, 4): -2.05, (1, 1): -1.05, (1, 2): -2.05})
    with pytest.raises(WeightSyncError, match=r"by 0\.05 on average"):
        difference(shifted, Echo(), Tolerance(mean=0.04, largest=1.0))
    assert difference(shifted, Echo(), Tolerance(mean=0.06, largest=1.0)) == pytest.approx(0.05, abs=1e-6)


def test_rounding_of_a_bfloat16_model_is_allowed_and_a_stale_output_layer_is_not():
    """The largest of correct refits of SmolLM2 was 0.53; a stale head differs by 2.3 (docs/weight_sync.md)."""
    assert difference(Constant({(1, 2): -2.24}), Echo(), LOW_PRECISION) == pytest.approx(0.06, abs=1e-6)
    with pytest.raises(WeightSyncError):
        difference(Constant({(1, 2): -4.3}), Echo(), LOW_PRECISION)


def test_bounds_depend_on_what_the_engine_computes_in():
    in_float32, on_cuda = default_tolerance("float32", "cpu"), default_tolerance("float32", "cuda")
    assert in_float32.mean < on_cuda.mean < default_tolerance("bfloat16", "cuda").mean
    assert default_tolerance("bfloat16", "cpu") == default_tolerance("bfloat16", "cuda") == LOW_PRECISION


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
