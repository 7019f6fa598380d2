"""The three schedulers of rollouts, and the retries of the engine's requests, which end in a failure of class infra.

All semantics are those of turns.py; here is only when things are called:

- `run_async_multi_turn_rollout` (training): each sample advances alone, as soon as it can;
- `run_multi_turn_rollout_async_generation` (validation): each sample generates alone, each environment is called once
  per turn with all of its samples;
- `run_multi_turn_rollout` (engines without async generation): the engine too is called once per turn with all samples.

With an engine that samples by the requests' seeds, the three give the same trajectories.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from nemo_rl.data.vision import EncodedImage
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.cancellation import cancel_all, gather_or_cancel
from nemo_rl.experience.generation_retries import RetryPolicy, generate_with_retries
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_spans import begin_rollout_span, end_rollout_span
from nemo_rl.experience.turns import (
    EncodedPrompt,
    EnvironmentCall,
    Episode,
    RolloutJob,
    TurnRules,
    encode_prompt,
    observation_failure,
)
from nemo_rl.tracing import NO_SPAN, AnySpan
from nemo_rl.types import EnvStep, Failure, GenerationRequest, Message, Trajectory

ResultT = TypeVar("ResultT")


async def run_async_multi_turn_rollout(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each rollout alone, as soon as it can advance. Return trajectories in the order of `jobs`.

    Waits for generation and environments, all at once; unblocked by either's results. Needs an engine whose
    overlapping calls are served together. A failure is a trajectory; RolloutError is raised on a stall alone.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def alone(job: RolloutJob) -> Trajectory:
        rollout = await run.start(job)
        while rollout.is_live:
            await run.generate([rollout])
            await run.score([rollout])
        return await rollout.trajectory()

    return tuple(await run.guard(gather_or_cancel(alone(job) for job in jobs)))


async def run_multi_turn_rollout_async_generation(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Generate for each rollout alone; call each environment once per turn with all of its live rollouts.

    Tasks do not wait for each other. Otherwise as `run_async_multi_turn_rollout`.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def generate_each(live: Sequence[_Rollout]) -> None:
        await gather_or_cancel(run.generate([rollout]) for rollout in live)

    async def run_all_tasks() -> tuple[Trajectory, ...]:
        rollouts = [await run.start(job) for job in jobs]
        await gather_or_cancel(
            run.run_turns(task_rollouts, generate_each) for task_rollouts in _group_by_task(rollouts).values()
        )
        return tuple(await gather_or_cancel(rollout.trajectory() for rollout in rollouts))

    return await run.guard(run_all_tasks())


async def run_multi_turn_rollout(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Make one generation call per turn with all live rollouts, then one environment call per task.

    For engines without async generation. Otherwise as `run_async_multi_turn_rollout`.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def together() -> tuple[Trajectory, ...]:
        rollouts = [await run.start(job) for job in jobs]
        await run.run_turns(rollouts, run.generate)
        return tuple(await gather_or_cancel(rollout.trajectory() for rollout in rollouts))

    return await run.guard(together())


class _Rollout:
    """An episode with its clock, and its score once it has ended."""

    __slots__ = ("_result", "episode", "span", "started_at")

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.span = begin_rollout_span(episode.job)
        self.started_at = time.perf_counter()
        self._result: asyncio.Future[Trajectory] | None = None

    @property
    def is_live(self) -> bool:
        return self.episode.action is not None

    @property
    def task_name(self) -> str:
        return self.episode.job.prompt.task_name

    def end(self, run: "_SchedulerRun") -> None:
        """Stop the clock, and have the trajectory scored and reported; once, right at the end."""
        if self._result is None:
            trajectory = self.episode.trajectory(total_s=time.perf_counter() - self.started_at)
            with self.span.current():
                self._result = run.submit_for_scoring(trajectory, self.span)

    async def trajectory(self) -> Trajectory:
        """Return the result once it has its scores."""
        assert self._result is not None
        return await self._result


class _SchedulerRun:
    """One call of a scheduler: the shared state of its rollouts, and the two steps that schedulers order."""

    def __init__(self, jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions) -> None:
        environments, limits = dependencies.environments, dependencies.limits
        for task_name in sorted({job.prompt.task_name for job in jobs} - environments.keys()):
            raise ConfigError(f"env.{task_name}", None, "prompts name it as their task", known=environments)
        self.watchdog = dependencies.supervision.watchdog
        self._dependencies = dependencies
        self._options = options
        self._rules = TurnRules(
            limits.max_turns,
            limits.max_total_length,
            options.sampling,
            options.seed,
            limits.generation_timeout_s,
            dependencies.truncated_rewards,
            dependencies.speakers,
            dependencies.policy_versions,
        )
        self._retries = RetryPolicy(limits.max_retries, limits.retry_backoff_s)
        self._scoring_tasks: list[asyncio.Task[Trajectory]] = []
        self._spans: list[AnySpan] = []  # all rollouts' spans
        self._prompts: dict[int, EncodedPrompt | Failure] = {}  # keys: id() of prompts, which the jobs keep alive

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work` under the watchdog; however it ends, pending scores and open spans end too."""
        try:
            return await self.watchdog.guard(work)
        finally:
            await cancel_all(self._scoring_tasks)
            for span in self._spans:
                span.end(stop_reason="cancelled")

    async def start(self, job: RolloutJob) -> _Rollout:
        held: Sequence[EncodedImage] = ()
        if id(job.prompt) not in self._prompts:
            with contextlib.suppress(DataError):  # reported by encode_prompt
                held = await self._encode_images(job.prompt.messages)
        prompt = self._prompts.get(id(job.prompt))
        if prompt is None:
            prompt = self._prompts[id(job.prompt)] = encode_prompt(job.prompt, self._dependencies.encoder)
        rollout = _Rollout(Episode(job, prompt, self._dependencies.encoder, self._rules))
        del held
        self._spans.append(rollout.span)
        self._end([rollout])
        return rollout

    async def generate(self, rollouts: Sequence[_Rollout]) -> None:
        """Make one engine call with all of `rollouts`, which wait for a response."""
        requests = [_pending_request(rollout) for rollout in rollouts]
        started_at = time.perf_counter()
        with _only_span(rollouts).current():
            results = await generate_with_retries(
                self._dependencies.generation,
                requests,
                retries=self._retries,
                watchdog=self.watchdog,
            )
        seconds = time.perf_counter() - started_at
        for rollout, result in zip(rollouts, results, strict=True):
            rollout.episode.apply_response(result, seconds=seconds)
        self._end(rollouts)

    async def score(self, rollouts: Sequence[_Rollout]) -> None:
        """Make one environment call with those of `rollouts`, all of one task, that have not failed.

        Each has its own call if the environment bounds its items singly: one that takes long is no stall of the others.
        """
        waiting = [(r, r.episode.action) for r in rollouts if isinstance(r.episode.action, EnvironmentCall)]
        if not waiting:
            return
        task_name = waiting[0][0].task_name
        started_at = time.perf_counter()
        environment = self._dependencies.environments[task_name]

        async def step(share: Sequence[tuple[_Rollout, EnvironmentCall]]) -> Sequence[EnvStep | Failure]:
            rollouts, calls = zip(*share, strict=True)
            with _only_span(rollouts).current(), self.watchdog.waiting_for(f"environment {task_name}", len(calls)):
                return await environment.step([call.conversation for call in calls], [call.state for call in calls])

        shares = [[each] for each in waiting] if environment.bounds_items else [waiting]
        results = [each for share in await gather_or_cancel(map(step, shares)) for each in share]
        seconds = time.perf_counter() - started_at
        for (rollout, _), result in zip(waiting, results, strict=True):
            await self._apply_env_step(rollout, result, seconds)
        self._end([rollout for rollout, _ in waiting])

    async def _apply_env_step(self, rollout: _Rollout, result: EnvStep | Failure, seconds: float) -> None:
        held: Sequence[EncodedImage] = ()
        if isinstance(result, EnvStep) and rollout.episode.will_observe(result):
            try:
                held = await self._encode_images(result.observation)
            except DataError as error:
                result = observation_failure(error)
        rollout.episode.apply_env_step(result, seconds=seconds)
        del held

    async def _encode_images(self, messages: Sequence[Message]) -> Sequence[EncodedImage]:
        """Encode the images of messages outside of the event loop, as ImageEncoder.encode_all.

        Hold the result until the messages are encoded: meanwhile the encoder finds each image and processes none again.
        """
        images = [image for message in messages for image in message.images]
        if not images or (encoder := self._dependencies.encoder.images) is None:
            return ()
        return await encoder.encode_all(images)

    async def run_turns(
        self, rollouts: Sequence[_Rollout], generate_all: Callable[[Sequence[_Rollout]], Awaitable[None]]
    ) -> None:
        """Run all together, turn by turn: generate for the live ones, then call each of their environments once."""
        live = [rollout for rollout in rollouts if rollout.is_live]
        while live:
            await generate_all(live)
            await gather_or_cancel(self.score(task_rollouts) for task_rollouts in _group_by_task(live).values())
            live = [rollout for rollout in live if rollout.is_live]

    def submit_for_scoring(self, trajectory: Trajectory, span: AnySpan) -> "asyncio.Future[Trajectory]":
        """Score the trajectory while other rollouts continue; report it at once if there is nothing to score."""
        if self._dependencies.scoring.needs_scoring(trajectory):
            task = asyncio.ensure_future(self._score_and_report(trajectory, span))
            self._scoring_tasks.append(task)
            return task
        self._report(trajectory, span)
        done: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        done.set_result(trajectory)
        return done

    async def _score_and_report(self, trajectory: Trajectory, span: AnySpan) -> Trajectory:
        scored = await self._dependencies.scoring.score(trajectory, self.watchdog)
        self._report(scored, span)
        return scored

    def _report(self, trajectory: Trajectory, span: AnySpan) -> None:
        end_rollout_span(span, trajectory)
        self._dependencies.failure_log.record(trajectory)
        if self._options.progress is not None:
            self._options.progress(trajectory)

    def _end(self, rollouts: Sequence[_Rollout]) -> None:
        for rollout in rollouts:
            if not rollout.is_live:
                rollout.end(self)


def _only_span(rollouts: Sequence[_Rollout]) -> AnySpan:
    """Return the span of a rollout that is alone in a call; calls of several belong to none of them."""
    return rollouts[0].span if len(rollouts) == 1 else NO_SPAN


def _pending_request(rollout: _Rollout) -> GenerationRequest:
    assert isinstance(rollout.episode.action, GenerationRequest)
    return rollout.episode.action


def _group_by_task(rollouts: Sequence[_Rollout]) -> dict[str, list[_Rollout]]:
    by_task: dict[str, list[_Rollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.task_name, []).append(rollout)
    return by_task
