"""Runs a traced run's work on a virtual clock, through the real sources, turns and routing, under other limits."""

import asyncio
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.trace.bubbles import Bubbles, count_bubbles
from nemo_rl.trace.planned_engine import Driver, PlannedEngine, TrainerState
from nemo_rl.trace.timeline import Timeline
from nemo_rl.trace.virtual_time import trace_in_virtual_time
from nemo_rl.trace.workload import ENVIRONMENT, SCORER, Limits, PlannedRollout, Workload, fit_workload
from nemo_rl.types import (
    EnvStep,
    GenerationRequest,
    Message,
    MessageLog,
    Prompt,
    SamplingParams,
    ScoreRequest,
    TokenizedMessage,
    Trajectory,
)

NEVER_S = 1e12  # deadlines: nothing is late in a plan
MAX_TOKENS = 2**40
NUM_CORRECTIONS = 3  # of the driver's time
MAX_LEFT = 0.75  # of the missing time after a correction that has an effect
CORRECTED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """Values that the planner varies."""

    num_prompts: int  # prompts per step
    num_generations: int  # rollouts per prompt
    age: int | None  # max_trajectory_age_steps in the background; None: collected before each step
    num_engines: int
    max_num_seqs: int  # sequences at once per engine
    calls: Mapping[str, int]  # concurrent calls of an environment or scorer by the name of its wait; absent: any number
    micro_batch_scale: float = 1.0  # size of a micro-batch relative to the traced run's
    trainer_scale: float = 1.0  # ranks that share the samples, relative to the traced run's
    num_devices: int = 1  # devices that train and sample


@dataclass(frozen=True, slots=True)
class Planned:
    """Expected results of a schedule."""

    bubbles: Bubbles
    tokens_per_s: float  # sampled and trained
    num_devices: int = 1

    @property
    def step_s(self) -> float:
        return self.bubbles.step_s

    @property
    def tokens_per_device_hour(self) -> float:
        return self.tokens_per_s * 3600 / self.num_devices


def plan(workload: Workload, schedule: Schedule, *, num_steps: int = 12) -> Planned:
    """Return the bubbles of `num_steps` steps without the first ones, in which the pipeline fills."""
    with _paused_garbage_collection():
        num_tokens, timeline = trace_in_virtual_time(_train(workload, schedule, num_steps))
    bubbles = count_bubbles(timeline)
    assert bubbles is not None
    counted = num_tokens[-bubbles.num_steps :]
    return Planned(bubbles, sum(counted) / (bubbles.num_steps * bubbles.step_s), schedule.num_devices)


def fit_to_run(timeline: Timeline, limits: Limits, schedule: Schedule) -> Workload:
    """Return the work of a traced run that had this schedule, such that its own plan takes as long as the run did.

    The driver's thread also waits for a core and for Python's lock, which no span tells: what a plan lacks is time of
    the driver per request, unless that makes no step longer. Raises ValueError as `fit_workload`.
    """
    workload, bubbles = fit_workload(timeline, limits), count_bubbles(timeline)
    assert bubbles is not None
    num_requests = limits.num_rollouts * statistics.fmean(len(r.turns) for group in workload.groups for r in group)
    missing_s = bubbles.step_s - plan(workload, schedule, num_steps=CORRECTED_STEPS).step_s
    for _ in range(NUM_CORRECTIONS):
        corrected = replace(workload, driver_s=max(workload.driver_s + missing_s / num_requests, 0.0))
        left_s = bubbles.step_s - plan(corrected, schedule, num_steps=CORRECTED_STEPS).step_s
        if abs(left_s) > MAX_LEFT * abs(missing_s):
            break
        workload, missing_s = corrected, left_s
    return workload


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Collect no cycles in the block: scans of what is alive, of which there is much, would take a third of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _train(workload: Workload, schedule: Schedule, num_steps: int) -> list[int]:
    """Run the steps; return the sampled tokens of each."""
    trainer, driver = TrainerState(), Driver(workload.driver_s)
    shapes = _Shapes(workload.groups)
    engines = [
        PlannedEngine(workload.engine, schedule.max_num_seqs, shapes.size, trainer, driver)
        for _ in range(schedule.num_engines)
    ]
    source = _open_source(workload, schedule, shapes, engines, num_steps)
    num_tokens = []
    for number in range(num_steps):
        timer = StepTimer(step=number + 1)
        with timer("total_step_time"):
            with timer("generation" if schedule.age is None else "exposed_generation"):
                groups = (await source.next_groups(number)).groups
                await driver.turn()  # training begins after the rollouts that began before it
            trajectories = [each for group in groups for each in group.trajectories]
            num_tokens.append(sum(map(shapes.num_tokens, trajectories)))
            with timer("policy_training"):
                await _compute(workload, schedule, trainer, len(trajectories), num_tokens[-1])
            await _other_phases(workload, source, engines, timer, number + 1)
    await source.close()
    return num_tokens


async def _compute(
    workload: Workload, schedule: Schedule, trainer: TrainerState, num_rollouts: int, num_tokens: int
) -> None:
    """Train for as long as the curve says, in parts: slower while an engine that shares the device samples."""
    curve = workload.trainer
    curve = replace(curve, micro_batches_per_rollout=curve.micro_batches_per_rollout / schedule.micro_batch_scale)
    seconds = curve.seconds(num_rollouts, num_tokens) / schedule.trainer_scale
    num_parts = 20 if curve.beside_generation > 1 else 1
    trainer.set(True)
    for _ in range(num_parts):
        is_slower = any(engine.is_computing for engine in trainer.engines)
        await asyncio.sleep(seconds / num_parts * (curve.beside_generation if is_slower else 1.0))
    trainer.set(False)


async def _other_phases(
    workload: Workload,
    source: AsyncSource | SyncSource,
    engines: Sequence[PlannedEngine],
    timer: StepTimer,
    version: int,
) -> None:
    """Spend the time of refits, in which engines pause, and of all other phases."""
    for name, seconds in workload.phases_s.items():
        if name == "weight_sync":
            continue
        with timer(name):
            await asyncio.sleep(seconds)
    async with source.hold():
        for engine in engines:
            await engine.pause()
        if "weight_sync" in workload.phases_s:
            with timer("weight_sync"):
                await asyncio.sleep(workload.phases_s["weight_sync"])
        for engine in engines:
            engine.weight_version = version
            await engine.resume()


def _open_source(
    workload: Workload, schedule: Schedule, shapes: "_Shapes", engines: Sequence[PlannedEngine], num_steps: int
) -> AsyncSource | SyncSource:
    generation = engines[0] if len(engines) == 1 else ReplicatedGeneration(engines)
    rollouts = [rollout for group in workload.groups for rollout in group]
    names = sorted({rollout.env for rollout in rollouts})
    scorers = {name: sorted({s for r in rollouts if r.env == name for s in r.scores_s}) for name in names}
    environments = {
        name: CheckedEnvironment(_Environment(shapes, _calls(schedule, ENVIRONMENT + name)), None) for name in names
    }
    places = {s: _calls(schedule, SCORER + s) for each in scorers.values() for s in each}
    scoring = Scoring(
        {name: [WeightedScorer(s, _Scorer(shapes, s, places[s]), 1.0) for s in each] for name, each in scorers.items()}
    )
    limits = RolloutLimits(10**6, MAX_TOKENS, NEVER_S, 0, 0.0, NEVER_S)
    dependencies = RolloutDependencies(generation, environments, _Encoder(), limits, scoring=scoring)
    prompts = [shapes.prompt(place) for place in range(schedule.num_prompts * num_steps)]
    loader = PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1)
    options = RolloutOptions(SamplingParams(max_new_tokens=MAX_TOKENS), seed=0)
    sizes: dict[str, Any] = {
        "num_prompts_per_step": schedule.num_prompts,
        "num_generations_per_prompt": schedule.num_generations,
        "failures": RolloutConfig(),
    }
    if schedule.age is None:
        return SyncSource(loader, dependencies, options, **sizes)
    bounds = {"max_age_steps": schedule.age, "stale_groups": "wait", "max_generation_failures": 0}
    return AsyncSource(loader, dependencies, options, **sizes, **bounds, num_steps=num_steps)


def _calls(schedule: Schedule, name: str) -> "asyncio.Semaphore | nullcontext[None]":
    limit = schedule.calls.get(name)
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


class _Shapes:
    """The sizes of planned rollouts: groups of the trace, in its order, again and again."""

    def __init__(self, groups: Sequence[Sequence[PlannedRollout]]) -> None:
        self.groups = groups
        self._rollouts = [rollout for group in groups for rollout in group]
        self._first = [0]
        for group in groups:
            self._first.append(self._first[-1] + len(group))

    def __getitem__(self, number: int) -> PlannedRollout:
        return self._rollouts[number]

    def num_tokens(self, trajectory: Trajectory) -> int:
        """Return the tokens that a rollout has sampled; its messages tell its shape."""
        messages = [message for log in trajectory.chains for message in log if message.is_generated]
        return sum(self[m.token_ids[0]].turns[i].num_tokens for i, m in enumerate(messages))

    def prompt(self, place: int) -> Prompt:
        env = self.groups[place % len(self.groups)][0].env
        return Prompt(str(place), env, (Message("user", ""),), {"turn": 0})

    def size(self, request: GenerationRequest) -> tuple[int, int]:
        """Return the tokens of a response, and the number of the rollout's shape, which stands for them."""
        _, _, place, generation, turn = request.request_id.split("#")[0].split(":")
        group = int(place) % len(self.groups)
        number = self._first[group] + int(generation) % len(self.groups[group])
        return self._rollouts[number].turns[int(turn)].num_tokens, number


class _Encoder(ChatEncoder):
    """Messages of one token; the text of a response is the number that its token tells."""

    def __init__(self) -> None:
        """Without a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MessageLog:
        return tuple(TokenizedMessage(message, (0,)) for message in messages)

    def encode_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> MessageLog:
        return tuple(TokenizedMessage(message, (0,)) for message in new_messages)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return str(token_ids[0])


class _Environment:
    """Takes the seconds of the rollout's turn."""

    def __init__(self, shapes: _Shapes, calls: "asyncio.Semaphore | nullcontext[None]") -> None:
        self._shapes, self._calls = shapes, calls

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> list[EnvStep]:
        return [await self._step(*each) for each in zip(conversations, states, strict=True)]

    async def _step(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> EnvStep:
        shape, turn = self._shapes[int(conversation[-1].content)], state["turn"]
        if seconds := shape.turns[turn].environment_s:
            async with self._calls:
                await asyncio.sleep(seconds)
        is_done = turn + 1 == len(shape.turns)
        return EnvStep(() if is_done else (Message("user", ""),), {"reward": 0.0}, is_done, {"turn": turn + 1})

    async def close(self) -> None:
        """Nothing is held."""


class _Scorer:
    """Takes the seconds of the rollout."""

    def __init__(self, shapes: _Shapes, name: str, calls: "asyncio.Semaphore | nullcontext[None]") -> None:
        self._shapes, self._name, self._calls = shapes, name, calls

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        for request in requests:
            answer = next(m for m in reversed(request.messages) if m.role == "assistant")
            async with self._calls:
                await asyncio.sleep(self._shapes[int(answer.content)].scores_s.get(self._name, 0.0))
        return [0.0] * len(requests)

    async def close(self) -> None:
        """Nothing is held."""
