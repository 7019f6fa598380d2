"""The planner's engine against times by hand."""

import asyncio

import pytest

from nemo_rl.trace.planned_engine import Driver, PlannedEngine, TrainerState
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.trace.workload import EngineCurve
from nemo_rl.types import Completion, GenerationRequest, SamplingParams


def request(num_tokens: int) -> GenerationRequest:
    return GenerationRequest(str(num_tokens), (0,), SamplingParams(max_new_tokens=100), seed=0, session_id="s")


def ends(
    curve: EngineCurve, sizes: list[int], max_num_seqs: int = 10, *, training: float = 0.0, driver_s: float = 0.0
) -> list[float]:
    """Return when each request ends; all begin at 0, and the policy computes until `training`."""

    async def main() -> list[float]:
        trainer = TrainerState()
        engine = PlannedEngine(curve, max_num_seqs, lambda each: (int(each.request_id), 7), trainer, Driver(driver_s))
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


def test_prefills_come_one_after_another_and_hold_up_the_steps_of_others() -> None:
    """The last: two prefills until 1 and a step; then the third has its prefill, and its steps with the second."""
    curve = EngineCurve(1.0, 0.0, prefill_s=0.5)
    assert ends(curve, [4, 2], max_num_seqs=1) == pytest.approx([4.5, 7.0])
    assert ends(curve, [4, 2]) == pytest.approx([5.0, 3.0])
    assert ends(curve, [1, 4, 2], max_num_seqs=2) == pytest.approx([2.0, 5.5, 4.5])


def test_the_driver_works_for_one_request_at_a_time_before_and_after_the_engine() -> None:
    assert ends(EngineCurve(1.0, 0.0), [2, 2], driver_s=1.0) == pytest.approx([3.0, 3.5])


def test_an_engine_that_shares_the_trainers_device_is_slower_meanwhile() -> None:
    """4 s at half speed are 2 tokens, or a prefill and one token; the others take 1 s each."""
    assert ends(EngineCurve(1.0, 0.0, beside_training=2.0), [10], training=4.0) == pytest.approx([12.0])
    curve = EngineCurve(1.0, 0.0, prefill_s=1.0, beside_training=2.0)
    assert ends(curve, [10], training=4.0) == pytest.approx([13.0])


def test_a_pause_stops_what_runs() -> None:
    async def main() -> float:
        engine = PlannedEngine(EngineCurve(1.0, 0.0), 1, lambda _: (10, 0), TrainerState(), Driver(0.0))
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
