import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import FlatLogprobs

from nemo_rl.distributed.processes import Activity
from nemo_rl.errors import GenerationError
from nemo_rl.generation.requests import generate_by_deadline
from nemo_rl.generation.vllm import engine
from nemo_rl.generation.vllm.engine import VllmGeneration, to_completion
from nemo_rl.generation.vllm.entry import VllmGenerationConfig
from nemo_rl.generation.vllm.process_environment import importing_vllm
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Completion, FailedRequest, SamplingParams, WeightSpan
from nemo_rl.weight_manifests import DeviceWeights, WeightManifest
from tests.contracts.engines import answers, request


def output(*, finish_reason: str, spans: Any = None) -> Any:
    logprobs = SimpleNamespace(logprobs=[-0.5, -1.5])
    sampled = SimpleNamespace(token_ids=[4, 5], logprobs=logprobs, finish_reason=finish_reason, weight_versions=spans)
    return SimpleNamespace(outputs=[sampled], metrics=None)


@pytest.mark.parametrize(
    ("top_p", "top_k", "width"), [(1.0, -1, 0), (0.9, 3, 4), (0.9, 512, 513), (0.9, -1, 0), (1.0, 513, 0)]
)
def test_sets_that_may_be_too_large_are_not_recorded_with_one_warning(
    top_p: float, top_k: int, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine._warn_that_sets_are_missing.cache_clear()
    sampling = SamplingParams(8, top_p=top_p, top_k=top_k, return_sampling_mask=True)
    for each in (sampling, replace(sampling, max_new_tokens=7)):
        assert engine.recorded_width(each, vocab_size=1000, limit=513) == width
    is_lost = sampling.needs_sampling_mask and not width
    assert [record.message.split(":")[0] for record in caplog.records] == ["policy.generation"] * is_lost


def test_sets_are_the_likeliest_tokens_that_have_a_probability():
    """Of top-2 with three asked for: the second token's third has one too, so its ties may go on: missing."""
    inf = float("inf")
    flat = FlatLogprobs(
        start_indices=[0, 4],
        end_indices=[4, 8],
        token_ids=[7, 9, 7, 1, 3, 8, 3, 5],
        logprobs=[-1.0, -0.5, -1.0, -inf, -1.1, -1.1, -1.1, -1.1],
    )
    sampled = SimpleNamespace(token_ids=[7, 3], logprobs=flat, finish_reason="stop", weight_versions=None)
    answer: Any = SimpleNamespace(outputs=[sampled], prompt_token_ids=[4], metrics=None)
    completion = to_completion("a", answer, version=0, num_likeliest=3)
    assert isinstance(completion, Completion)
    assert completion.logprobs == (-1.0, -1.1)
    assert completion.columns["sampling_mask"].tolist() == [[-1, -1], [9, 7], [-1, -1]]


def span(version: int, start: int, end: int) -> Any:
    return SimpleNamespace(version=str(version), start=start, end=end)


def test_weight_versions_are_those_of_the_spans():
    spans = [span(3, 0, 1), span(5, 1, 2)]
    completion = to_completion("a", output(finish_reason="stop", spans=spans), version=9)
    kept = (WeightSpan(3, 0, 1), WeightSpan(5, 1, 2))
    assert completion == Completion("a", (4, 5), (-0.5, -1.5), "stop", (3, 5), kept)


def test_completion_under_one_version_has_no_spans():
    completion = to_completion("a", output(finish_reason="stop", spans=[span(7, 0, 2)]), version=6)
    assert completion == Completion("a", (4, 5), (-0.5, -1.5), "stop", (7, 7))


def test_without_spans_the_version_is_that_of_the_start():
    completion = to_completion("a", output(finish_reason="length"), version=9)
    assert completion == Completion("a", (4, 5), (-0.5, -1.5), "length", (9, 9))


def test_aborted_request_has_failed():
    assert isinstance(to_completion("a", output(finish_reason="abort"), version=0), FailedRequest)


def dying_engine() -> Any:
    """AsyncLLM as far as it is needed here: dies on the third request."""
    with importing_vllm("cpu"):
        from vllm.v1.engine.exceptions import EngineDeadError

    config = SimpleNamespace(enable_sleep_mode=False, get_vocab_size=lambda: 64, max_model_len=100, max_logprobs=0)
    died = asyncio.Event()

    async def generate(prompt: Any, params: Any, request_id: str) -> Any:
        if request_id == "2":
            died.set()
        await died.wait()
        raise EngineDeadError
        yield

    return SimpleNamespace(vllm_config=SimpleNamespace(model_config=config), generate=generate)


@pytest.mark.timeout(120)
def test_death_of_the_engine_ends_all_requests():
    async def main():
        engine = VllmGeneration(dying_engine(), VllmGenerationConfig(), device="cpu")
        with pytest.raises(GenerationError, match="died"):
            await answers(engine, [request(str(i)) for i in range(5)])
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_engine_keeps_no_deadline_that_fires_before_that_of_the_request():
    """Background collection gives a request `policy.generation.timeout_s` times A + 1 (docs/rollouts.md)."""
    engine = dying_engine()

    async def generate(prompt: Any, params: Any, request_id: str) -> Any:
        await asyncio.sleep(900.0)
        yield output(finish_reason="stop")

    engine.generate = generate

    async def main():
        generation = VllmGeneration(engine, VllmGenerationConfig(timeout_s=600.0), device="cpu")
        requests = [replace(request("a"), timeout_s=1200.0)]
        return [result async for result in generate_by_deadline(generation, requests)]

    assert run_in_virtual_time(main()) == [Completion("a", (4, 5), (-0.5, -1.5), "stop")]


CONTROLS = {
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "update": lambda engine: engine.update_weights(WeightManifest("", ()), 1),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake(),
}


def controlled(answer: Any, *, control_s: float) -> VllmGeneration:
    """An engine with a request under way, all of whose control calls do what `answer` does."""
    engine = dying_engine()
    for name in ("resume_generation", "collective_rpc", "sleep", "update_weight_version", "wake_up"):
        setattr(engine, name, answer)
    engine.engine_core = SimpleNamespace(pause_scheduler_async=answer)
    generation = VllmGeneration(engine, VllmGenerationConfig(), device="cpu", control_s=control_s)
    generation._num_running, generation._paused_engine, generation._can_sleep = 1, True, True
    return generation


@pytest.mark.parametrize("control", CONTROLS)
def test_control_of_an_engine_that_has_died_or_stands_still_is_an_error(control: str):
    async def dies(*args: Any, **kwargs: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        raise EngineDeadError

    async def stands_still(*args: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    async def main():
        with pytest.raises(GenerationError, match="has died"):
            await CONTROLS[control](controlled(dies, control_s=600))
        with pytest.raises(GenerationError, match=r"did not .* within 0\.01 s"):
            await CONTROLS[control](controlled(stands_still, control_s=0.01))

    asyncio.run(main())


def watched(monkeypatch: pytest.MonkeyPatch, activity: Callable[[int], Activity], num_polls: int) -> VllmGeneration:
    """An engine in processes of its own, which answers after so many polls of its activity."""
    polls, is_done = itertools.count(), asyncio.Event()

    def poll(pids: Any) -> Activity:
        if (count := next(polls)) == num_polls:
            is_done.set()
        return activity(count)

    async def answer(*args: Any, **kwargs: Any) -> None:
        await is_done.wait()

    monkeypatch.setattr("nemo_rl.distributed.processes.read_activity", poll)
    engine = controlled(answer, control_s=600)
    engine._pids = frozenset({2**30})  # of no process
    engine._stall_timeout_s = 0.04  # four polls
    return engine


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("activity", [Activity(7, 0), Activity(7, 1)])
def test_control_of_an_engine_whose_processes_do_nothing_ends_early(
    control: str, activity: Activity, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        engine = watched(monkeypatch, lambda poll: activity, num_polls=10**9)
        with pytest.raises(GenerationError, match=r"did nothing for 0\.04 s \(policy\.generation\.vllm_cfg\.stall_"):
            await CONTROLS[control](engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("weights", "activity"),
    [
        (WeightManifest("", ()), lambda poll: Activity(poll // 3, 0)),  # works now and then
        (DeviceWeights("", 600.0), lambda poll: Activity(7, 0)),  # waits for the ranks that send
    ],
)
def test_a_slow_refit_is_waited_for(weights: Any, activity: Any, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        await watched(monkeypatch, activity, num_polls=20).update_weights(weights, 1)

    asyncio.run(main())


def test_request_that_waits_out_one_pause_is_held_by_the_next():
    async def main():
        engine = VllmGeneration(dying_engine(), VllmGenerationConfig(), device="cpu")
        await engine.pause()
        waiting = asyncio.create_task(answers(engine, [request("0")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.resume()
        await engine.pause()
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine._num_running == 0
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(main())


def test_engine_keeps_its_weights_asleep_unless_a_refit_follows_and_wakes_in_parts():
    calls: list[Any] = []

    async def record(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    async def main():
        engine = controlled(record, control_s=600)
        await engine.sleep()
        await engine.wake()
        await engine.sleep(discards_weights=True)
        await engine.wake("weights")
        await engine.wake("kv_cache")

    asyncio.run(main())
    assert calls == [
        ((), {"level": 1}),
        ((None,), {}),
        ((), {"level": 2}),
        ((["weights"],), {}),
        ((["kv_cache"],), {}),
    ]
