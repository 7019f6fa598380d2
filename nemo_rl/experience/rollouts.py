"""The three schedulers of rollouts, and the retries of the engine's requests, which end in a failure of class infra.

All semantics are those of turns.py; here is only when things are called:

- `run_async_multi_turn_rollout` (training): each sample advances alone, as soon as it can;
- `run_multi_turn_rollout_async_generation` (validation): each sample generates alone, each environment is called once a
  turn with all of its samples;
- `run_multi_turn_rollout` (engines without async generation): the engine too is called once a turn with all samples.

With an engine that samples by the requests' seeds, the three give the same trajectories.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.boundary import CheckedEnvironment, error_to_failure
from nemo_rl.errors import ConfigError, GenerationError
from nemo_rl.experience.agents import AgentRuntime
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.supervision import FailureLog, StallWatchdog, Supervision, cancel_all, gather_or_cancel
from nemo_rl.experience.turns import EncodedPrompt, EnvironmentCall, Episode, RolloutJob, TurnRules, encode_prompt
from nemo_rl.generation.requests import answer_by_deadline, generate_by_deadline
from nemo_rl.interfaces import Generation
from nemo_rl.types import (
    Completion,
    FailedRequest,
    Failure,
    FailureClass,
    GenerationRequest,
    SamplingParams,
    Trajectory,
)

if TYPE_CHECKING:
    from nemo_rl.experience.nemo_gym_rollouts import GymRuntime  # which imports this module

logger = logging.getLogger(__name__)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
NO_RESULT = error_to_failure(GenerationError("the engine gave no result"), FailureClass.INFRA)
NEMO_RL_ARGUMENTS = frozenset({"policy_generation", "input_batch", "tokenizer", "task_to_env", "max_seq_len"})


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Length limits of a rollout, and its deadlines and retries."""

    max_turns: int
    max_total_length: int  # tokens of prompt, responses and observations together
    generation_timeout_s: float = 600.0  # of one request
    max_retries: int = 2  # of one generation request
    retry_backoff_s: float = 0.5  # before the first retry; doubles
    stall_timeout_s: float = 600.0  # without any progress


@dataclass(frozen=True, slots=True)
class RolloutDependencies:
    """Everything that the rollouts of a run share; it does not change once the run is open."""

    generation: Generation
    environments: Mapping[str, CheckedEnvironment]  # by task name
    encoder: ChatEncoder
    limits: RolloutLimits
    agents: Mapping[str, AgentRuntime] = field(default_factory=dict)  # by task name; their prompts need no environment
    gyms: "Mapping[str, GymRuntime]" = field(default_factory=dict)  # NeMo Gym stacks by task name
    scoring: Scoring = field(default_factory=Scoring)  # scores whole rollouts after they end
    failure_log: FailureLog = field(default_factory=FailureLog)
    supervision: Supervision = field(init=False)  # each copy made by `replace` has its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "supervision", Supervision(self.limits.stall_timeout_s))


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """The arguments of one call of the rollout layer."""

    sampling: SamplingParams  # `max_new_tokens` limits one response
    seed: int  # of the run
    progress: Callable[[Trajectory], None] | None = None  # called with each finished rollout; what it raises ends all
    trains: bool = True  # whether the policy is trained on what is sampled


def refuse_nemo_rl_arguments(function: Callable[P, Awaitable[ResultT]]) -> Callable[P, Coroutine[Any, Any, ResultT]]:
    """Return the function, which called as NeMo-RL's of its name raises a TypeError that says how it is called."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        if len(args) > 3 or NEMO_RL_ARGUMENTS & kwargs.keys():
            raise TypeError(
                f"{function.__name__} is called with jobs, dependencies and options, not with NeMo-RL's arguments: "
                "RolloutJob has the prompt, RolloutDependencies the engine, environments and encoder, RolloutOptions "
                "the limits, and trajectories are returned (docs/rollouts.md, docs/from_nemo_rl.md)"
            )
        return await function(*args, **kwargs)

    return call


@refuse_nemo_rl_arguments
async def run_async_multi_turn_rollout(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each rollout alone, as soon as it can advance. Return trajectories in the order of `jobs`.

    Waits for generation and environments, all at once; unblocked by either's results. Needs an engine whose
    overlapping calls are served together. A failure is a trajectory; RolloutError is raised on a stall alone.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def alone(job: RolloutJob) -> Trajectory:
        rollout = run.start(job)
        while rollout.is_live:
            await run.generate([rollout])
            await run.score([rollout])
        return await rollout.trajectory()

    return tuple(await run.guard(gather_or_cancel(alone(job) for job in jobs)))


@refuse_nemo_rl_arguments
async def run_multi_turn_rollout_async_generation(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Generate for each rollout alone; call each environment once a turn with all of its live rollouts.

    Tasks do not wait for each other. Otherwise as `run_async_multi_turn_rollout`.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def generate_each(live: Sequence[_Rollout]) -> None:
        await gather_or_cancel(run.generate([rollout]) for rollout in live)

    async def run_all_tasks() -> tuple[Trajectory, ...]:
        rollouts = [run.start(job) for job in jobs]
        await gather_or_cancel(
            run.run_turns(task_rollouts, generate_each) for task_rollouts in _group_by_task(rollouts).values()
        )
        return tuple(await gather_or_cancel(rollout.trajectory() for rollout in rollouts))

    return await run.guard(run_all_tasks())


@refuse_nemo_rl_arguments
async def run_multi_turn_rollout(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Make one generation call a turn with all live rollouts, then one environment call a task.

    For engines without async generation. Otherwise as `run_async_multi_turn_rollout`.
    """
    run = _SchedulerRun(jobs, dependencies, options)

    async def together() -> tuple[Trajectory, ...]:
        rollouts = [run.start(job) for job in jobs]
        await run.run_turns(rollouts, run.generate)
        return tuple(await gather_or_cancel(rollout.trajectory() for rollout in rollouts))

    return await run.guard(together())


class _Rollout:
    """An episode with its clock, and its score once it has ended."""

    __slots__ = ("_result", "episode", "started_at")

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
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
            self._result = run.submit_for_scoring(trajectory)

    async def trajectory(self) -> Trajectory:
        """Return the result once it has its scores."""
        assert self._result is not None
        return await self._result


class _SchedulerRun:
    """One call of a scheduler: what its rollouts share, and the two steps that schedulers order."""

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
        )
        self._retries = RetryPolicy(limits.max_retries, limits.retry_backoff_s)
        self._scoring_tasks: list[asyncio.Task[Trajectory]] = []
        self._prompts: dict[int, EncodedPrompt | Failure] = {}  # by the prompt's id(): the jobs keep the prompts alive

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work` under the watchdog; however it ends, pending scores are cancelled."""
        try:
            return await self.watchdog.guard(work)
        finally:
            await cancel_all(self._scoring_tasks)

    def start(self, job: RolloutJob) -> _Rollout:
        prompt = self._prompts.get(id(job.prompt))
        if prompt is None:
            prompt = self._prompts[id(job.prompt)] = encode_prompt(job.prompt, self._dependencies.encoder)
        rollout = _Rollout(Episode(job, prompt, self._dependencies.encoder, self._rules))
        self._end([rollout])
        return rollout

    async def generate(self, rollouts: Sequence[_Rollout]) -> None:
        """Make one engine call with all of `rollouts`, which wait for a response."""
        requests = [_pending_request(rollout) for rollout in rollouts]
        started_at = time.perf_counter()
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
        """Make one environment call with those of `rollouts`, all of one task, that have not failed."""
        waiting = [(r, r.episode.action) for r in rollouts if isinstance(r.episode.action, EnvironmentCall)]
        if not waiting:
            return
        task_name = waiting[0][0].task_name
        started_at = time.perf_counter()
        environment = self._dependencies.environments[task_name]
        with self.watchdog.waiting_for(f"environment {task_name}", len(waiting)):
            results = await environment.step([call.conversation for _, call in waiting], [c.state for _, c in waiting])
        seconds = time.perf_counter() - started_at
        for (rollout, _), result in zip(waiting, results, strict=True):
            rollout.episode.apply_env_step(result, seconds=seconds)
        self._end([rollout for rollout, _ in waiting])

    async def run_turns(
        self, rollouts: Sequence[_Rollout], generate_all: Callable[[Sequence[_Rollout]], Awaitable[None]]
    ) -> None:
        """Run all together, turn by turn: generate for the live ones, then call each of their environments once."""
        live = [rollout for rollout in rollouts if rollout.is_live]
        while live:
            await generate_all(live)
            await gather_or_cancel(self.score(task_rollouts) for task_rollouts in _group_by_task(live).values())
            live = [rollout for rollout in live if rollout.is_live]

    def submit_for_scoring(self, trajectory: Trajectory) -> "asyncio.Future[Trajectory]":
        """Score the trajectory while other rollouts continue; report it at once if there is nothing to score."""
        if self._dependencies.scoring.needs_scoring(trajectory):
            task = asyncio.ensure_future(self._score_and_report(trajectory))
            self._scoring_tasks.append(task)
            return task
        self._report(trajectory)
        done: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        done.set_result(trajectory)
        return done

    async def _score_and_report(self, trajectory: Trajectory) -> Trajectory:
        scored = await self._dependencies.scoring.score(trajectory, self.watchdog)
        self._report(scored)
        return scored

    def _report(self, trajectory: Trajectory) -> None:
        self._dependencies.failure_log.record(trajectory)
        if self._options.progress is not None:
            self._options.progress(trajectory)

    def _end(self, rollouts: Sequence[_Rollout]) -> None:
        for rollout in rollouts:
            if not rollout.is_live:
                rollout.end(self)


def _pending_request(rollout: _Rollout) -> GenerationRequest:
    assert isinstance(rollout.episode.action, GenerationRequest)
    return rollout.episode.action


def _group_by_task(rollouts: Sequence[_Rollout]) -> dict[str, list[_Rollout]]:
    by_task: dict[str, list[_Rollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.task_name, []).append(rollout)
    return by_task


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of retries of a failed generation request, and the pause before them."""

    max_retries: int
    backoff_s: float  # before the first retry; doubles


async def generate_with_retries(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    *,
    retries: RetryPolicy,
    watchdog: StallWatchdog,
) -> list[Completion | Failure]:
    """Return one result per request, in order. What fails or misses its deadline is retried, then fails (infra)."""
    completions: dict[str, Completion] = {}
    failures: dict[str, Failure] = {}
    pending = list(requests)
    for attempt in range(retries.max_retries + 1):
        if attempt:
            with watchdog.waiting_for("generation to be retried", len(pending)):
                await asyncio.sleep(retries.backoff_s * 2 ** (attempt - 1))
        with watchdog.waiting_for("generation", len(pending)):
            failure = await _try_generate(generation, pending, watchdog, completions, failures)
        pending = [request for request in pending if request.request_id not in completions]
        if not pending:
            break
        for request in pending:
            failures.setdefault(request.request_id, failure)
        logger.info("%d generation requests failed, attempt %d: %s", len(pending), attempt + 1, failure.cause)
    return [completions.get(request.request_id) or failures[request.request_id] for request in requests]


async def _try_generate(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    watchdog: StallWatchdog,
    completions: dict[str, Completion],
    failures: dict[str, Failure],
) -> Failure:
    """Send the requests once; add successes to `completions` and refusals to `failures`.

    Returns the failure of the requests that have no result.
    """

    def sort_in(result: Completion | FailedRequest) -> None:
        if isinstance(result, Completion):
            completions[result.request_id] = result
        else:
            failures.setdefault(result.request_id, Failure(FailureClass.INFRA, result.cause))

    try:
        if len(requests) == 1:
            if (result := await answer_by_deadline(generation, requests[0])) is not None:
                sort_in(result)
            return NO_RESULT
        async with aclosing(generate_by_deadline(generation, requests)) as results:
            async for result in results:
                watchdog.record_progress()
                sort_in(result)
    except Exception as error:
        return error_to_failure(error, FailureClass.INFRA)
    return NO_RESULT
