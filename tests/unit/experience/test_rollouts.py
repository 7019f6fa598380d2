"""The three schedulers: equal trajectories, when each calls engine and environments, retries of the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.errors import ConfigError, GenerationError, RolloutError
from nemo_rl.experience.generation_retries import RetryPolicy, generate_with_retries
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.rollouts import (
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_multi_turn_rollout_async_generation,
)
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import (
    Completion,
    EnvStep,
    FailedRequest,
    Failure,
    FailureClass,
    GenerationRequest,
    SamplingParams,
    StopReason,
    Timings,
    Trajectory,
)
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.encoder import END, FakeEncoder
from tests.fakes.environments import FakeEnvironment, episodic, hang, never_done, reward_by_length
from tests.fakes.generation import FakeGeneration, draws_of
from tests.unit.experience.rollout_setup import LIMITS, OPTIONS, SAMPLING, VOCAB_SIZE, dependencies, jobs

SCHEDULERS = (run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation, run_multi_turn_rollout)
ENCODER = ChatEncoder(chat_tokenizer())


async def some_turns_of_the_loop(request: GenerationRequest) -> None:
    """Finish in an order of its own."""
    for _ in range(draws_of(request).randrange(5)):
        await asyncio.sleep(0)


def slowest_is_number_3(bounds_items: bool) -> tuple[Trajectory, ...]:
    """Validate four rollouts of 6 seconds more each, with a stall timeout of 10 seconds."""

    async def before(conversations) -> None:
        await asyncio.sleep(6.0 * (1 + max(int(c[0].content[-1]) for c in conversations)))

    environment = CheckedEnvironment(FakeEnvironment(before=before), None if bounds_items else 60.0)
    limits = replace(LIMITS, stall_timeout_s=10.0)
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": environment}, limits=limits)
    return run_in_virtual_time(run_multi_turn_rollout_async_generation(jobs(4), setup, OPTIONS))


def test_items_with_deadlines_of_their_own_do_not_stall_each_other() -> None:
    assert [t.failure for t in slowest_is_number_3(bounds_items=True)] == [None] * 4
    with pytest.raises(RolloutError, match="waiting for: environment game"):
        slowest_is_number_3(bounds_items=False)


def untimed(trajectories: tuple[Trajectory, ...]) -> list[Trajectory]:
    return [replace(t, timings=Timings()) for t in trajectories]


def rollouts_of_all(make_dependencies, the_jobs, options: RolloutOptions = OPTIONS) -> list[list[Trajectory]]:
    """What each scheduler makes of the same jobs, each with an engine and environments of its own."""

    async def main() -> list[list[Trajectory]]:
        return [untimed(await scheduler(the_jobs, make_dependencies(), options)) for scheduler in SCHEDULERS]

    return asyncio.run(main())


@settings(max_examples=60)
@given(
    salt=st.integers(0, 10**6),
    num_prompts=st.integers(1, 4),
    num_generations=st.integers(1, 3),
    max_turns=st.integers(1, 4),
    max_total_length=st.integers(30, 160),
    max_new_tokens=st.integers(1, 16),
    env_failing_share=st.sampled_from((0.0, 0.2)),
    generation_failing_share=st.sampled_from((0.0, 0.1)),
    fails_first=st.integers(0, 2),
    stop_strings=st.sampled_from(((), ("stop",))),
)
def test_schedulers_give_equal_trajectories(
    salt,
    num_prompts,
    num_generations,
    max_turns,
    max_total_length,
    max_new_tokens,
    env_failing_share,
    generation_failing_share,
    fails_first,
    stop_strings,
):
    def make_dependencies() -> RolloutDependencies:
        tasks = {"game": salt, "tools": salt + 1}
        return dependencies(
            FakeGeneration(
                vocab_size=VOCAB_SIZE,
                latency=some_turns_of_the_loop,
                failing_share=generation_failing_share,
                fails_first=fails_first,
            ),
            {name: FakeEnvironment(episodic(own, failing_share=env_failing_share)) for name, own in tasks.items()},
            limits=replace(LIMITS, max_turns=max_turns, max_total_length=max_total_length),
            encoder=ENCODER,
        )

    sampling = SamplingParams(max_new_tokens, stop_token_ids=ENCODER.stop_token_ids, stop_strings=stop_strings)
    options = RolloutOptions(sampling, seed=7)
    pipelined, batched_scoring, batched = rollouts_of_all(
        make_dependencies, jobs(num_prompts, num_generations, ("game", "tools")), options
    )
    assert pipelined == batched_scoring == batched


def test_random_episodes_end_in_every_way_and_take_several_turns():
    def make_dependencies() -> RolloutDependencies:
        generation = FakeGeneration(vocab_size=VOCAB_SIZE, failing_share=0.05)
        limits = replace(LIMITS, max_total_length=120)
        return dependencies(
            generation, {"game": FakeEnvironment(episodic(1, failing_share=0.05))}, limits=limits, encoder=ENCODER
        )

    pipelined, *others = rollouts_of_all(make_dependencies, jobs(60, 2))
    assert {t.stop_reason for t in pipelined} == set(StopReason)
    assert max(t.num_turns for t in pipelined) == 4
    assert all(other == pipelined for other in others)


@pytest.mark.parametrize("num_samples", [1, 8, 64])
def test_validation_calls_each_environment_once_a_turn(num_samples):
    for scheduler in SCHEDULERS[1:]:
        environments = {"game": FakeEnvironment(never_done), "tools": FakeEnvironment(never_done)}
        the_jobs = jobs(2 * num_samples, 1, ("game", "tools"))
        limits = replace(LIMITS, max_turns=3, max_total_length=1000)
        engine = FakeGeneration(vocab_size=2)  # token 0 or 1: every response ends within its limit
        options = RolloutOptions(replace(SAMPLING, max_new_tokens=200), seed=7)
        trajectories = asyncio.run(scheduler(the_jobs, dependencies(engine, environments, limits=limits), options))
        assert {t.num_turns for t in trajectories} == {3}
        for environment in environments.values():
            assert [len(conversations) for conversations, _ in environment.calls] == [num_samples] * 3


def test_plain_batched_asks_the_engine_once_a_turn():
    class Counting(FakeGeneration):
        num_calls = 0

        def generate(self, requests):
            self.num_calls += 1
            return super().generate(requests)

    engine = Counting(vocab_size=2, is_async=False)
    limits = replace(LIMITS, max_turns=3, max_total_length=1000)
    environment = FakeEnvironment(never_done)
    options = RolloutOptions(replace(SAMPLING, max_new_tokens=200), seed=7)
    asyncio.run(run_multi_turn_rollout(jobs(9), dependencies(engine, {"game": environment}, limits=limits), options))
    assert engine.num_calls == 3


def test_pipelined_sample_does_not_wait_for_a_slow_one():
    """The first sample's engine answers only after the second sample has ended."""
    ended = asyncio.Event()

    async def latency(request: GenerationRequest) -> None:
        if request.session_id == "0:p0:0":
            await asyncio.wait_for(ended.wait(), 60)

    async def main() -> tuple[Trajectory, ...]:
        def progress(trajectory: Trajectory) -> None:
            if trajectory.group_id == "0:p1":
                ended.set()

        engine = FakeGeneration(vocab_size=VOCAB_SIZE, latency=latency)
        setup = dependencies(engine, {"game": FakeEnvironment(episodic(3))})
        return await run_async_multi_turn_rollout(jobs(2), setup, replace(OPTIONS, progress=progress))

    assert [t.group_id for t in asyncio.run(main())] == ["0:p0", "0:p1"]


def test_prompt_is_encoded_once_for_its_group():
    for scheduler in SCHEDULERS:
        encoder = FakeEncoder()
        engine = FakeGeneration(vocab_size=VOCAB_SIZE)
        asyncio.run(scheduler(jobs(3, 4), dependencies(engine, {"game": FakeEnvironment()}, encoder=encoder), OPTIONS))
        assert encoder.num_prompts == 3


def test_progress_is_reported_once_a_rollout():
    for scheduler in SCHEDULERS:
        reported: list[Trajectory] = []
        engine = FakeGeneration(vocab_size=VOCAB_SIZE, failing_share=0.2)
        setup = dependencies(engine, {"game": FakeEnvironment(episodic(5))})
        trajectories = asyncio.run(scheduler(jobs(20), setup, replace(OPTIONS, progress=reported.append)))
        assert sorted(t.group_id for t in reported) == sorted(t.group_id for t in trajectories)


def test_no_jobs_are_no_trajectories():
    for scheduler in SCHEDULERS:
        assert asyncio.run(scheduler([], dependencies(FakeGeneration(), {}), OPTIONS)) == ()


def test_unknown_task_is_named_before_anything_runs():
    engine = FakeGeneration()
    setup = dependencies(engine, {"tools": FakeEnvironment()})
    with pytest.raises(ConfigError, match=r"env\.game = None: .*known: tools"):
        asyncio.run(run_async_multi_turn_rollout(jobs(1), setup, OPTIONS))
    assert engine.requests == []


def test_hanging_environment_trips_its_deadline_and_others_go_on():
    for scheduler in SCHEDULERS:
        hanging = CheckedEnvironment(FakeEnvironment(before=hang), timeout_s=0.01)
        environments = {"game": hanging, "tools": FakeEnvironment(reward_by_length)}
        setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), environments)
        trajectories = asyncio.run(scheduler(jobs(4, 1, ("game", "tools")), setup, OPTIONS))
        causes = [t.failure.cause if t.failure else None for t in trajectories]
        assert causes == ["TimeoutError: no answer in 0.01 s", None] * 2


def test_run_without_progress_is_stopped():
    limits = RolloutLimits(max_turns=1, max_total_length=80, stall_timeout_s=0.05)
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment(before=hang)}, limits=limits)
    for scheduler in SCHEDULERS:
        with pytest.raises(RolloutError, match=r"for 0\.05 s \(rollout\.stall_timeout_s\); waiting for: "):
            asyncio.run(scheduler(jobs(3), setup, OPTIONS))


def test_cancelled_run_leaves_no_task_behind():
    async def main(scheduler) -> None:
        called = asyncio.Event()

        async def note_and_hang(conversations) -> None:
            called.set()
            await hang(conversations)

        setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment(before=note_and_hang)})
        before = asyncio.all_tasks()
        run = asyncio.ensure_future(scheduler(jobs(8), setup, OPTIONS))
        await called.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    for scheduler in SCHEDULERS:
        asyncio.run(main(scheduler))


def test_error_of_the_progress_callback_ends_the_run_and_is_raised_as_it_is():
    def refuse(trajectory: Trajectory) -> None:
        raise RolloutError("enough")

    for scheduler in SCHEDULERS:
        setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment()})
        with pytest.raises(RolloutError, match="enough"):
            asyncio.run(scheduler(jobs(4), setup, replace(OPTIONS, progress=refuse)))


def test_timings_hold_what_each_part_took():
    async def slow(conversations) -> None:
        await asyncio.sleep(0.02)

    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment(before=slow)})
    (trajectory,) = asyncio.run(run_async_multi_turn_rollout(jobs(1), setup, OPTIONS))
    timings = trajectory.timings
    assert timings.environment_s >= 0.02 - 1e-3
    assert timings.total_s >= timings.environment_s + timings.generation_s


def test_stop_token_ends_the_sampled_tokens_of_a_turn():
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment(lambda c, s: EnvStep())})
    trajectories = asyncio.run(run_async_multi_turn_rollout(jobs(20), setup, OPTIONS))
    done = [t for t in trajectories if t.stop_reason is StopReason.DONE]
    assert len(done) > 5
    assert all(t.message_log[-1].token_ids[-1] == END for t in done)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), SamplingParams(max_new_tokens=4), seed=1, session_id=name)


def ask(generation, *names: str, max_retries: int = 2, timeout_s: float = 60.0) -> list[Completion | Failure]:
    async def main() -> list[Completion | Failure]:
        return await generate_with_retries(
            generation,
            [replace(request(name), timeout_s=timeout_s) for name in names],
            retries=RetryPolicy(max_retries, backoff_s=0.0),
            watchdog=StallWatchdog(60.0),
        )

    return asyncio.run(main())


class ScriptedEngine(FakeGeneration):
    """Runs one script a call; a script yields results, raises, or waits for ever."""

    def __init__(self, *scripts) -> None:
        super().__init__()
        self.scripts = list(scripts)
        self.asked: list[list[str]] = []
        self.num_closed = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        self.asked.append([r.request_id for r in requests])
        try:
            async for result in self.scripts.pop(0)(requests):
                yield result
        finally:
            self.num_closed += 1


async def answer_all(requests):
    for one in requests:
        yield Completion(one.request_id, (1,), (-1.0,), "stop")


async def answer_first_then_die(requests):
    yield Completion(requests[0].request_id, (1,), (-1.0,), "stop")
    raise GenerationError("engine core died\nwith a long trace")


async def refuse_all(requests):
    for one in requests:
        yield FailedRequest(one.request_id, "out of memory")


async def say_nothing(requests):
    return
    yield


async def wait_for_ever(requests):
    await asyncio.Event().wait()
    yield


def test_results_come_in_the_order_of_the_requests():
    async def last_first(requests):
        for one in reversed(requests):
            yield Completion(one.request_id, (1,), (-1.0,), "stop")

    results = ask(ScriptedEngine(last_first), "a", "b", "c")
    assert [r.request_id for r in results if isinstance(r, Completion)] == ["a", "b", "c"]


def test_only_what_failed_is_asked_again():
    engine = ScriptedEngine(answer_first_then_die, answer_all)
    assert all(isinstance(r, Completion) for r in ask(engine, "a", "b", "c"))
    assert engine.asked == [["a", "b", "c"], ["b", "c"]]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (refuse_all, "out of memory"),
        (say_nothing, "GenerationError: the engine gave no result"),
        (wait_for_ever, "no result in 0.01 s"),
    ],
)
def test_request_fails_as_infra_once_its_retries_are_used_up(script, cause):
    engine = ScriptedEngine(script, script, script)
    assert ask(engine, "a", timeout_s=0.01) == [Failure(FailureClass.INFRA, cause)]
    assert engine.asked == [["a"]] * 3
    assert engine.num_closed == 3


def test_error_of_an_engine_becomes_one_line_and_keeps_its_traceback():
    result = ask(ScriptedEngine(answer_first_then_die), "a", "b", max_retries=0)[1]
    assert isinstance(result, Failure)
    assert "with a long trace" in result.traceback
    assert result == Failure(FailureClass.INFRA, "GenerationError: engine core died")


def test_first_cause_is_kept_over_those_of_retries():
    engine = ScriptedEngine(refuse_all, say_nothing)
    assert ask(engine, "a", max_retries=1) == [Failure(FailureClass.INFRA, "out of memory")]


def test_waits_between_retries_double():
    waits: list[float] = []

    async def main(monkeypatch: pytest.MonkeyPatch) -> None:
        async def note(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", note)
        engine = ScriptedEngine(*[refuse_all] * 4)
        retries = RetryPolicy(max_retries=3, backoff_s=0.5)
        await generate_with_retries(engine, [request("a")], retries=retries, watchdog=StallWatchdog(60.0))

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(main(monkeypatch))
    assert waits == [0.5, 1.0, 2.0]
