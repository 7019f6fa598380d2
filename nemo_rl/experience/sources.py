"""Sources of the training loop's groups: rollouts of one step, or of as many batches as dynamic sampling needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nemo_rl.config.run import RolloutConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import DataError, RolloutError
from nemo_rl.experience.collection import flatten_groups, group_trajectories, make_rollout_jobs, run_training_rollouts
from nemo_rl.experience.failures import FailureBudget
from nemo_rl.experience.metrics import age_metrics, rollout_metrics
from nemo_rl.experience.replay_buffer import extract_buffer_state
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutJob, RolloutOptions
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import CollectedGroups, GroupSource
from nemo_rl.types import Message, Prompt, StopReason, TokenizedMessage, Trajectory, TrajectoryGroup


class ReturnGroups(Protocol):
    """A source that can take groups back for a later step (AsyncSource.give_back)."""

    def __call__(self, groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
        """Take the groups back; return those that are too old to be trained on at `next_version`."""
        ...


def drop_all_groups(groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
    """Return all groups, as a synchronous run must: at the next version all would be too old."""
    return groups


class SyncSource:
    """Rollouts of the next `num_prompts_per_step` prompts, made when they are requested.

    With a `writer`, all of them are written down, whatever becomes of their groups.
    """

    def __init__(
        self,
        loader: PromptLoader,
        dependencies: RolloutDependencies,
        options: RolloutOptions,
        *,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        failures: RolloutConfig,
        writer: RolloutWriter | None = None,
    ) -> None:
        self._loader = loader
        self._dependencies = dependencies
        self._options = options
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._failures = failures
        self._writer = writer

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return one group per prompt, in their order; fewer at the end of the dataset.

        Groups hold their failed rollouts too. Raises RolloutError with the first cause when too many fail, and when
        nothing progresses.
        """
        loaded = self._loader.take(self._num_prompts)
        if not loaded:
            raise StopAsyncIteration
        trajectories = await self._run(make_rollout_jobs(loaded, self._num_generations))
        if self._writer is not None:
            self._writer.write(weight_version + 1, trajectories)  # the step that trains on them
        metrics = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version)
        return CollectedGroups(group_trajectories(trajectories, self._num_generations), metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() | {"consumed_prompts": self._loader.consumed, "epoch": self._loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; what an asynchronous run had in its buffer is collected again first."""
        self._loader.load_state_dict(state)
        self._loader.put_back(extract_buffer_state(state, self._loader).prompt_indices)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    async def _run(self, jobs: Sequence[RolloutJob]) -> tuple[Trajectory, ...]:
        budget = FailureBudget(num_rollouts=len(jobs), max_failed_share=self._failures.max_failed_share)
        report = self._options.progress

        def count(trajectory: Trajectory) -> None:
            budget.record(trajectory)
            if report is not None:
                report(trajectory)

        return await run_training_rollouts(jobs, self._dependencies, replace(self._options, progress=count))


# Metrics of a background source: over the batches of a step
SUMMED_PREFIXES = ("efficiency/exposed_wait_s/", "replay_buffer/dropped_groups")
LATEST_VALUE_PREFIXES = ("efficiency/", "replay_buffer/")


@dataclass(slots=True)
class _StepAccumulator:
    """The groups that dynamic sampling has gathered for one step."""

    kept: list[TrajectoryGroup] = field(default_factory=list)
    seen: list[TrajectoryGroup] = field(default_factory=list)
    num_batches: int = 0
    background: dict[str, float] = field(default_factory=dict)  # metrics of a source that collects in the background

    def add(self, collected: CollectedGroups, is_kept: Callable[[TrajectoryGroup], bool]) -> None:
        self.num_batches += 1
        self.seen += collected.groups
        self.kept += (group for group in collected.groups if is_kept(group))
        for name, value in collected.metrics.items():
            if name.startswith(SUMMED_PREFIXES):
                self.background[name] = self.background.get(name, 0.0) + value
            elif name.startswith(LATEST_VALUE_PREFIXES):
                self.background[name] = value


class FilteredSource:
    """Dynamic sampling (DAPO, arXiv 2503.14476): only groups that teach something, whatever it takes to find them.

    Batches of `inner` are drawn until `num_prompts_per_step` groups have `min_group_size` survivors and are
    informative: their raw rewards differ. After `max_gen_batches` batches it gives up. What is left over in the last
    batch is given back where `inner` can train on it later, else dropped and counted. `inner` may draw more prompts at
    once than a step has: `prompts_per_batch`.
    """

    def __init__(
        self,
        inner: GroupSource,
        *,
        return_groups: ReturnGroups | None = None,
        is_informative: Callable[[TrajectoryGroup], bool],
        num_prompts_per_step: int,
        max_gen_batches: int,
        min_group_size: int,
    ) -> None:
        self._inner = inner
        self._return_groups = return_groups or drop_all_groups
        self._is_informative = is_informative
        self._num_prompts = num_prompts_per_step
        self._max_gen_batches = max_gen_batches
        self._min_group_size = min_group_size

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return a full step, or what is left of the dataset. Raises RolloutError after `max_gen_batches` batches."""
        accumulator = _StepAccumulator()
        try:
            await self._fill_step(accumulator, weight_version)
        except BaseException:
            self._return_groups(accumulator.kept, next_version=weight_version)
            raise
        kept, surplus = accumulator.kept[: self._num_prompts], accumulator.kept[self._num_prompts :]
        lost = self._return_groups(surplus, next_version=weight_version + 1)
        metrics = self._metrics(accumulator, kept, lost) | age_metrics(flatten_groups(kept), weight_version)
        return CollectedGroups(tuple(kept), metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        return self._inner.hold(until_idle=until_idle)

    async def close(self) -> None:
        await self._inner.close()

    async def _fill_step(self, accumulator: _StepAccumulator, weight_version: int) -> None:
        while len(accumulator.kept) < self._num_prompts:
            if accumulator.num_batches == self._max_gen_batches:
                raise RolloutError(self._too_few_message(accumulator))
            try:
                accumulator.add(await self._inner.next_groups(weight_version), self._is_kept)
            except StopAsyncIteration:
                if not accumulator.kept:
                    raise
                return

    def _is_kept(self, group: TrajectoryGroup) -> bool:
        return len(group.survivors) >= self._min_group_size and self._is_informative(group)

    def _metrics(
        self, accumulator: _StepAccumulator, kept: Sequence[TrajectoryGroup], lost: Sequence[TrajectoryGroup]
    ) -> dict[str, float]:
        """Return metrics of all rollouts and of the filter: `reward` is before it, `filtered_reward` after it."""
        return rollout_metrics(flatten_groups(accumulator.seen)) | {
            **accumulator.background,
            "dynamic_sampling_num_gen_batches": float(accumulator.num_batches),
            "dynamic_sampling_num_discarded_valid_samples": float(len(flatten_groups(lost))),
            "reward": _mean_reward(accumulator.seen),
            "filtered_reward": _mean_reward(kept),
        }

    def _too_few_message(self, accumulator: _StepAccumulator) -> str:
        return (
            f"{len(accumulator.kept)} of a step's {self._num_prompts} groups have rewards that differ, after "
            f"{accumulator.num_batches} batches (grpo.dynamic_sampling_max_gen_batches) of "
            f"{len(accumulator.seen)} prompts: "
            "the task is too easy or too hard for the policy, or grpo.num_generations_per_prompt is too small"
        )


def prompts_per_batch(num_prompts_per_step: int, batch_multiplier: float) -> int:
    """Return how many prompts dynamic sampling draws at once: `grpo.batch_multiplier` times a step's, rounded up."""
    return math.ceil(num_prompts_per_step * batch_multiplier)


def _mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the mean reward of the survivors; a step has some."""
    rewards = [trajectory.reward for group in groups for trajectory in group.survivors]
    return sum(rewards) / len(rewards)


RESPONSE = "answer"  # of a prompt's state: what its row has in `output_key`, or as the last message


@dataclass(frozen=True, slots=True)
class RecordedResponseSource:
    """Satisfies interfaces.GroupSource.

    A response is what the model would have to write, its end included; beyond `max_total_length` it is cut. It has
    log-probs of 0 and no reward.
    """

    loader: PromptLoader
    encoder: ChatEncoder
    num_prompts_per_step: int
    max_total_length: int

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        loaded = self.loader.take(self.num_prompts_per_step)
        if not loaded:
            raise StopAsyncIteration
        groups = tuple(self._group(one) for one in loaded)
        metrics = rollout_metrics([t for group in groups for t in group.trajectories])
        return CollectedGroups(groups, {k: v for k, v in metrics.items() if not k.endswith("reward_mean")})

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"consumed_prompts": self.loader.consumed, "epoch": self.loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def _group(self, loaded: LoadedPrompt) -> TrajectoryGroup:
        prompt = loaded.prompt
        prompt_log = self.encoder.encode_prompt(prompt.messages, prompt.tools)
        response = Message("assistant", get_recorded_response(prompt))
        token_ids = self.encoder.encode_answer(response, prompt.tools)
        max_response_tokens = self.max_total_length - sum(len(message.token_ids) for message in prompt_log)
        cut = token_ids[:max_response_tokens]
        trajectory = Trajectory(
            prompt=prompt,
            group_id=loaded.group_id,
            generation_index=0,
            message_log=(*prompt_log, TokenizedMessage(response, cut, (0.0,) * len(cut))),
            stop_reason=StopReason.DONE if len(cut) == len(token_ids) else StopReason.TRUNCATED,
            num_turns=1,
        )
        return TrajectoryGroup(loaded.group_id, prompt, (trajectory,))


def get_recorded_response(prompt: Prompt) -> str:
    """Return the response of a prompt's row; raise DataError if it has none."""
    response = prompt.env_state.get(RESPONSE)
    if not isinstance(response, str) or not response:
        raise DataError(
            f"prompt {prompt.prompt_id} of {prompt.dataset!r} has no response to learn from (distillation.off_policy): "
            "rows need a last message of the assistant, or text in output_key"
        )
    return response
