"""Assembly of groups into one training batch; tensors begin here.

Consumes the groups of a GroupSource and the shaped rewards; produces the rollout's part of the keys in batch.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.column_arrays import stack
from nemo_rl.errors import RolloutError
from nemo_rl.token_columns import concatenate_columns
from nemo_rl.types import (
    MessageLog,
    Prompt,
    StopReason,
    TrainingBatch,
    TrainingSample,
    Trajectory,
    TrajectoryGroup,
    placed_images,
)

TrajectoryKey: TypeAlias = tuple[str, int]  # group_id, generation_index


def trajectory_key(trajectory: Trajectory) -> TrajectoryKey:
    return trajectory.group_id, trajectory.generation_index


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The origin of one row of a batch: a chain of a trajectory."""

    prompt: Prompt
    message_log: MessageLog
    trajectory_key: TrajectoryKey
    chain_index: int  # index of `message_log` in `Trajectory.chains`


@dataclass(frozen=True, slots=True)
class AssemblyCounts:
    """Counts of the trajectories that `assemble_batch` used and dropped."""

    num_trajectories: int  # all
    num_failed: int
    num_dropped_groups: int  # groups with too few survivors
    num_dropped_survivors: int  # survivors in dropped groups


def count_assembly(groups: Sequence[TrajectoryGroup], *, min_group_size: int) -> AssemblyCounts:
    """Count the trajectories that `assemble_batch` uses and drops."""
    too_small = [group for group in groups if len(group.survivors) < min_group_size]
    return AssemblyCounts(
        num_trajectories=sum(len(group.trajectories) for group in groups),
        num_failed=sum(len(group.trajectories) - len(group.survivors) for group in groups),
        num_dropped_groups=len(too_small),
        num_dropped_survivors=sum(len(group.survivors) for group in too_small),
    )


def assemble_batch(
    groups: Sequence[TrajectoryGroup],
    rewards: Mapping[TrajectoryKey, float] | None = None,
    *,
    min_group_size: int,
) -> tuple[TrainingBatch, tuple[BatchRow, ...]]:
    """Make the batch of all survivors in groups of at least `min_group_size` of them, and the origin of each row.

    Rows follow the order of the groups, then the generation index, then the chains of a trajectory. `rewards` are the
    scaled and shaped ones by (group_id, generation_index); None takes the trajectories' own. Groups have a baseline all
    or none. Raises RolloutError with the first cause when nothing is left.
    """
    trajectories: list[Trajectory] = []
    samples: list[TrainingSample] = []
    rows: list[BatchRow] = []
    baselines: list[float] = []  # one per row

    def reward_of(trajectory: Trajectory) -> float:
        return trajectory.reward if rewards is None else rewards[trajectory_key(trajectory)]

    for group_id, group, trajectory in _iter_kept_trajectories(groups, min_group_size):
        reward = reward_of(trajectory)
        samples += make_training_samples(trajectory, trajectory_id=len(trajectories), group_id=group_id, reward=reward)
        trajectories.append(trajectory)
        key = trajectory_key(trajectory)
        rows += (BatchRow(trajectory.prompt, log, key, index) for index, log in enumerate(trajectory.chains))
        if group.baseline is not None:
            baselines += [reward_of(group.baseline)] * len(trajectory.chains)
    if not trajectories:
        raise RolloutError(_describe_empty_batch(groups, min_group_size))
    batch = _make_batch(samples, trajectories)
    if baselines:
        batch[keys.BASELINE_REWARD] = torch.tensor(baselines, dtype=torch.float32)
    return batch, tuple(rows)


def _iter_kept_trajectories(
    groups: Sequence[TrajectoryGroup], min_group_size: int
) -> Iterator[tuple[int, TrajectoryGroup, Trajectory]]:
    """Yield the trajectories to train on, in the order of the batch, with their group and its index in it."""
    kept = [group for group in groups if len(group.survivors) >= max(min_group_size, 1)]
    for group_id, group in enumerate(kept):
        for trajectory in sorted(group.survivors, key=lambda t: t.generation_index):
            yield group_id, group, trajectory


def make_training_samples(
    trajectory: Trajectory, *, trajectory_id: int, group_id: int, reward: float
) -> tuple[TrainingSample, ...]:
    """Make the token sequences to train on, one per chain. They share the trajectory's weight, and its reward.

    A chain with rewards of its own differs from that by as much as its rewards differ from the trajectory's.
    """
    samples = []
    for index, log in enumerate(trajectory.chains):
        own = sum(trajectory.rewards_of_chain(index).values()) - trajectory.reward
        samples.append(_make_sample(log, _BatchEntry(trajectory_id, group_id, reward + own, trajectory.loss_weight)))
    return tuple(samples)


@dataclass(frozen=True, slots=True)
class _BatchEntry:
    """The fields that the samples of a trajectory have in common."""

    trajectory_id: int
    group_id: int
    reward: float
    loss_weight: float


def _make_sample(log: MessageLog, entry: _BatchEntry) -> TrainingSample:
    generated = [m.generation_logprobs for m in log]
    lengths = [len(m.token_ids) for m in log]
    return TrainingSample(
        trajectory_id=entry.trajectory_id,
        group_id=entry.group_id,
        token_ids=tuple(chain.from_iterable(m.token_ids for m in log)),
        token_mask=tuple(
            chain.from_iterable((0 if g is None else 1,) * n for g, n in zip(generated, lengths, strict=True))
        ),
        generation_logprobs=tuple(
            chain.from_iterable((0.0,) * n if g is None else g for g, n in zip(generated, lengths, strict=True))
        ),
        reward=entry.reward,
        loss_weight=entry.loss_weight,
        columns=concatenate_columns([m.columns for m in log], lengths),
        images=placed_images(log),
    )


def _make_batch(samples: Sequence[TrainingSample], trajectories: Sequence[Trajectory]) -> TrainingBatch:
    lengths = np.fromiter((len(s.token_ids) for s in samples), dtype=np.int64, count=len(samples))
    mask = _pad_rows((s.token_mask for s in samples), lengths, torch.float32)
    mask[:, 0] = 0.0  # nothing comes before the first token, so nothing predicts it
    trajectory_id = torch.tensor([s.trajectory_id for s in samples])  # [B]
    per_trajectory = torch.zeros(len(trajectories)).index_add_(0, trajectory_id, mask.sum(-1))
    truncated = torch.tensor([t.stop_reason is StopReason.TRUNCATED for t in trajectories])
    columns = _columns(samples, width=mask.shape[1])
    batch = TensorDict(
        {
            keys.TOKEN_IDS: _pad_rows((s.token_ids for s in samples), lengths, torch.int64),
            keys.TOKEN_MASK: mask,
            keys.GENERATION_LOGPROBS: _pad_rows((s.generation_logprobs for s in samples), lengths, torch.float32)
            * mask,
            keys.LENGTHS: torch.from_numpy(lengths),
            keys.SAMPLE_MASK: torch.tensor([s.loss_weight for s in samples]),
            keys.TRAJECTORY_ID: trajectory_id,
            keys.GROUP_ID: torch.tensor([s.group_id for s in samples]),
            keys.TRAJECTORY_TOKENS: per_trajectory[trajectory_id],
            keys.REWARD: torch.tensor([s.reward for s in samples], dtype=torch.float32),
            keys.REWARD_COMPONENTS: _reward_components(trajectories),
            keys.TRUNCATED: truncated[trajectory_id],
            **({} if columns is None else {keys.COLUMNS: columns}),
        },
        batch_size=[len(samples)],
    )
    keys.add_images(batch, [s.images for s in samples])
    return batch


def _pad_rows(rows: Iterable[Sequence[float]], lengths: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Right-pad rows of different lengths with 0 to the longest: [B, T]."""
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64 if dtype is torch.int64 else np.float32)
    width = max(int(lengths.max()), 1)
    table = np.zeros((len(lengths), width), dtype=flat.dtype)
    table[np.arange(width) < lengths[:, None]] = flat
    return torch.from_numpy(table)


def _columns(samples: Sequence[TrainingSample], *, width: int) -> TensorDict | None:
    """Return each column as [B, T, ...], missing if a row has none; None if no row has any."""
    names = {name: None for sample in samples for name in sample.columns}
    if not names:
        return None
    lengths = [count for s in samples for count in (len(s.token_ids), width - len(s.token_ids))]
    tables: dict[str, torch.Tensor] = {}
    for name in names:
        table = stack([part for s in samples for part in (s.columns.get(name), None)], lengths)
        tables[name] = torch.from_numpy(table).unflatten(0, (-1, width))
    return TensorDict(tables, batch_size=[len(samples)])


def _reward_components(trajectories: Sequence[Trajectory]) -> TensorDict:
    """Return each sample's rewards by name, 0 if its environment does not give that one."""
    rows = [t.rewards_of_chain(index) for t in trajectories for index in range(len(t.chains))]
    names = sorted({name for row in rows for name in row})
    columns = {name: torch.tensor([row.get(name, 0.0) for row in rows], dtype=torch.float32) for name in names}
    return TensorDict(columns, batch_size=[len(rows)])


def _describe_empty_batch(groups: Sequence[TrajectoryGroup], min_group_size: int) -> str:
    counts = count_assembly(groups, min_group_size=min_group_size)
    return (
        f"nothing to train on: {counts.num_failed} of {counts.num_trajectories} rollouts failed, and no group has "
        f"rollout.min_group_size = {min_group_size} others left{describe_first_failure(groups)}"
    )


def describe_first_failure(groups: Sequence[TrajectoryGroup]) -> str:
    """Return the end of a message: class and cause of the first rollout that failed; empty if none did."""
    rollouts = chain.from_iterable((*group.trajectories, group.baseline) for group in groups)
    failures = (t.failure for t in rollouts if t is not None)
    first = next((f for f in failures if f is not None), None)
    return f"; the first failure was of class {first.failure_class}: {first.cause}" if first else ""
