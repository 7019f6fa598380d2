import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.errors import WeightSyncError
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams
from nemo_rl.weight_sync.verification import (
    Probe,
    Tolerance,
    compare_logprobs,
    default_tolerance,
    sample_probes,
    to_logprob_batch,
)

SAMPLING = SamplingParams(32)
TIGHT = Tolerance(mean=0.005, largest=0.01)
BFLOAT16 = default_tolerance("bfloat16", "cpu")


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


def difference(policy: Any, generation: Any, tolerance: Tolerance = TIGHT) -> float:
    async def main() -> float:
        batch = await sample_probes(generation, [Probe((1, 2, 3)), Probe((4,))], sampling=SAMPLING, weight_version=5)
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
    assert difference(Constant({(1, 2): -2.24}), Echo(), BFLOAT16) == pytest.approx(0.06, abs=1e-6)
    with pytest.raises(WeightSyncError):
        difference(Constant({(1, 2): -4.3}), Echo(), BFLOAT16)


def test_bounds_depend_on_what_the_engine_computes_in():
    in_float32, on_cuda = default_tolerance("float32", "cpu"), default_tolerance("float32", "cuda")
    assert in_float32.mean < on_cuda.mean < default_tolerance("bfloat16", "cuda").mean
    assert BFLOAT16 == default_tolerance("bfloat16", "cuda") == Tolerance.of_mean(0.1)


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
