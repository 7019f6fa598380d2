"""The planner's engine against times by hand."""

import asyncio

import pytest

from nemo_rl.trace.planned_engine import PlannedEngine, TrainerState
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.trace.workload import EngineCurve
from nemo_rl.types import Completion, GenerationRequest, SamplingParams


def request(num_tokens: int) -> GenerationRequest:
    return GenerationRequest(str(num_tokens), (0,), SamplingParams(max_new_tokens=100), seed=0, session_id="s")


def ends(curve: EngineCurve, sizes: list[int], max_num_seqs: int = 10, *, training: float = 0.0) -> list[float]:
    """Return when each request ends; all begin at 0, and the policy computes until `training`."""

    async def main() -> list[float]:
        trainer = TrainerState()
        engine = PlannedEngine(curve, max_num_seqs, lambda each: (int(each.request_id), 7), trainer)
        loop, trainer.is_training = asyncio.get_running_loop(), training > 0
        loop.call_later(training, trainer.set, False)

        async def end(size: int) -> float:
            async for completion in engine.generate([request(size)]):
                assert isinstance(completion, Completion)
                assert completion.token_ids == (7,)
            return loop.time()

        return list(await asyncio.gather(*map(end, sizes)))

    return run_in_virtual_time(main())


def test_a_step_takes_longer_the_more_sequences_run() -> None:
    """Steps of 3 s while both run: 10 steps; then 10 of 2 s."""
    assert ends(EngineCurve(1.0, 1.0), [10, 20]) == pytest.approx([30.0, 50.0])


def test_requests_beyond_the_limit_wait_in_their_order() -> None:
    assert ends(EngineCurve(1.0, 0.0), [3, 5, 2], max_num_seqs=1) == pytest.approx([3.0, 8.0, 10.0])
    assert ends(EngineCurve(1.0, 0.0), [3, 5, 2], max_num_seqs=2) == pytest.approx([3.0, 5.0, 5.0])


def test_each_request_has_a_cost_of_its_own() -> None:
    assert ends(EngineCurve(1.0, 0.0, request_s=0.5), [4]) == pytest.approx([4.5])


def test_a_request_takes_its_place_before_its_first_token() -> None:
    curve = EngineCurve(1.0, 0.0, request_s=0.5)
    assert ends(curve, [4, 2], max_num_seqs=1) == pytest.approx([4.5, 7.0])
    assert ends(curve, [4, 2], max_num_seqs=2) == pytest.approx([4.5, 2.5])


def test_an_engine_that_shares_the_trainers_device_is_slower_meanwhile() -> None:
    """4 s at half speed are 2 tokens; the other 8 take 8 s."""
    assert ends(EngineCurve(1.0, 0.0, beside_training_s=1.0), [10], training=4.0) == pytest.approx([12.0])


def test_a_pause_stops_what_runs() -> None:
    async def main() -> float:
        engine = PlannedEngine(EngineCurve(1.0, 0.0), 1, lambda _: (10, 0), TrainerState())
        loop = asyncio.get_running_loop()

        async def pause() -> None:
            await asyncio.sleep(3.0)
            await engine.pause()
            await asyncio.sleep(5.0)
            await engine.resume()

        pausing = asyncio.ensure_future(pause())
        async for _ in engine.generate([request(10)]):
            await pausing
        return loop.time()

    assert run_in_virtual_time(main()) == pytest.approx(15.0)
