"""Splitting a batch into optimizer steps and micro-batches, and counting what each step's loss is divided by.

Micro-batches are padded, or packed without padding (packing.py), or packed by shared prefixes (prefix_tree.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from tensordict import TensorCollection, TensorDict, is_non_tensor

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.distributed.vision_towers import RowImages
from nemo_rl.errors import ConfigError
from nemo_rl.loss_types import Normalizer
from nemo_rl.policy.packing import deal, pack_for_ranks
from nemo_rl.policy.prefix_tree import pack_trees
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.token_columns import ROUTED_EXPERTS
from nemo_rl.tracing import MICRO_BATCH, span
from nemo_rl.types import TrainingBatch


def expected_optimizer_steps(num_samples_per_step: int, train_global_batch_size: int) -> int:
    """Return the optimizer steps per training step: the nearest whole number, at least one."""
    return max(1, int(num_samples_per_step / train_global_batch_size + 0.5))


def split_optimizer_steps(group_id: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Split rows into at most `num_steps` optimizer steps of nearly equal size, without cutting a group.

    A group goes to the step in which its middle row falls; a step without a group is omitted.

    Example: groups of 3, 3, 2 and 4 rows in two steps: rows 0..5 and 6..11.
    """
    rows_by_group: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        rows_by_group.setdefault(group, []).append(row)
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    start = 0
    for rows in rows_by_group.values():
        middle = start + len(rows) / 2
        steps[min(int(middle * num_steps / len(group_id)), num_steps - 1)].extend(rows)
        start += len(rows)
    return [torch.tensor(rows) for rows in steps if rows]


class MicroBatching(Protocol):
    """A partition of samples into micro-batches."""

    def parts(self, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        """Return the micro-batches of each rank, the same number for all: indices into `lengths`, or none.

        Micro-batches that ranks compute at the same time have samples of similar length or number of tokens, because
        ranks wait for each other at every layer.
        """
        ...

    def pair_length(self, lengths: Sequence[int]) -> int:
        """Return the length of a sample that takes as much of a micro-batch as these samples together."""
        ...

    @property
    def length_multiple(self) -> int:
        """Return the number that the padded length of a micro-batch is rounded up to a multiple of."""
        ...


@dataclass(frozen=True, slots=True)
class SampleCount:
    """A number of samples of similar length.

    Example: lengths 9, 8, 7, 6, 5 in parts of 2: one rank gets (9, 8), (7, 6), (5); two get (9, 7), (5) and (8, 6), ().
    """

    size: int
    length_multiple: int = 1

    def parts(self, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        return _partition(lengths, num_ranks, lambda longest: self.size)

    def pair_length(self, lengths: Sequence[int]) -> int:
        return max(lengths)  # `size` counts pairs


@dataclass(frozen=True, slots=True)
class PaddedTokens:
    """Micro-batches of as many samples of similar length as fit into `tokens`, with padding
    (`policy.dynamic_batching`)."""

    tokens: int
    key: str  # configuration key, for the error
    length_multiple: int = 1

    def parts(self, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        """Return the micro-batches of each rank; raises ConfigError for a sample that is longer than one."""
        _check_longest(lengths, self.tokens, self.key)
        return _partition(lengths, num_ranks, lambda longest: max(1, self.tokens // self._padded(longest)))

    def pair_length(self, lengths: Sequence[int]) -> int:
        return len(lengths) * self._padded(max(lengths))

    def _padded(self, length: int) -> int:
        return -(-max(length, 1) // self.length_multiple) * self.length_multiple


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Packs of at most `tokens`, without padding (`policy.sequence_packing`)."""

    tokens: int
    key: str  # configuration key, for the error
    algorithm: str
    length_multiple: int = 1

    def parts(self, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        """Return the packs of each rank; raises ConfigError for a sample that is longer than one."""
        _check_longest(lengths, self.tokens, self.key)
        return pack_for_ranks(lengths, self.tokens, self.algorithm, num_ranks)

    def pair_length(self, lengths: Sequence[int]) -> int:
        return sum(lengths)


@dataclass(frozen=True, slots=True)
class PackedTrees(PackedTokens):
    """Packs of at most `tokens` distinct prefixes (`policy.sequence_packing.share_prefixes`)."""

    def parts_of(self, batch: TrainingBatch, num_ranks: int) -> list[list[list[int]]]:
        """Return the packs of each rank; raises ConfigError for a sample that is longer than one."""
        lengths = batch[keys.LENGTHS].tolist()
        _check_longest(lengths, self.tokens, self.key)
        group_id = batch.get(keys.GROUP_ID, torch.arange(len(lengths)))
        routes = (columns_of(batch) or {}).get(ROUTED_EXPERTS)
        own = None if routes is None else routes.cpu().numpy()
        tokens = batch[keys.TOKEN_IDS].cpu().numpy()
        sized = pack_trees(tokens, lengths, group_id.tolist(), self.tokens, num_ranks, own)
        return deal(sized, num_ranks)


def training_micro_batching(policy: PolicyConfig) -> MicroBatching:
    return _micro_batching_from_config(
        policy, policy.train_micro_batch_size, "train_mb_tokens", policy.max_total_sequence_length
    )


def scoring_micro_batching(policy: PolicyConfig) -> MicroBatching:
    """Return the policy's micro-batching without gradients."""
    num_samples = policy.logprob_batch_size or policy.train_micro_batch_size
    return _micro_batching_from_config(policy, num_samples, "logprob_mb_tokens", policy.max_total_sequence_length)


def teacher_micro_batching(teacher: TeacherConfig, section: str) -> MicroBatching:
    """Return a teacher's micro-batching; a number of tokens comes from its section."""
    return _micro_batching_from_config(teacher, teacher.logprob_batch_size, "logprob_mb_tokens", 1, section)


def divide_rows(
    batch: TrainingBatch, rows: torch.Tensor, batching: MicroBatching, layout: RankLayout
) -> list[tuple[torch.Tensor, MicroBatching, RankLayout]]:
    """Return the rows that are computed one after the other, each with its micro-batching and the layout of its ranks.

    With `context_parallel_size: auto` all ranks of a context share the samples, or pairs, that exceed the tokens of one
    rank; of the others each rank has packs of its own.
    """
    if not layout.divides_only_long:
        return [(rows, batching, layout)]
    assert isinstance(batching, PackedTokens)
    lengths = batch[keys.LENGTHS][rows]
    if batch.get(keys.PREFERENCE, None) is not None:
        _, pairs = batch[keys.GROUP_ID][rows].unique(return_inverse=True)
        lengths = pairs.bincount(weights=lengths)[pairs]
    is_long = lengths > batching.tokens
    together = replace(batching, tokens=batching.tokens * layout.context_parallel_size)
    found = [(rows[is_long], together, layout), (rows[~is_long], batching, layout.undivided)]
    return [part for part in found if len(part[0]) > 0]


def divided_micro_batches(
    batch: TrainingBatch, rows: torch.Tensor, batching: MicroBatching, layout: RankLayout
) -> Iterator[tuple[RankLayout, torch.Tensor, TrainingBatch]]:
    """Yield (layout, rows, part): the parts of `micro_batches` with the layout of the ranks that compute each."""
    for chosen, own_batching, ranks in divide_rows(batch, rows, batching, layout):
        for own_rows, part in micro_batches(batch, chosen, own_batching, ranks):
            yield ranks, own_rows, part


def micro_batches(
    batch: TrainingBatch, rows: torch.Tensor, batching: MicroBatching | int, layout: RankLayout = SINGLE_RANK
) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
    """Yield (rows, part) of this rank's rows, each part trimmed to its longest; an int is a number of samples.

    Results are summed over parts, so the split does not change them. All ranks get the same number of parts: a rank
    without samples left gets no rows and a dummy part. The rows of a preference pair are never separated, and a number
    of samples is then one of pairs.
    """
    if isinstance(batching, int):
        batching = SampleCount(batching)
    pairs = None
    if isinstance(batching, PackedTrees):
        if batch.get(keys.PREFERENCE, None) is not None:
            raise ValueError("packs by shared prefixes would separate preference pairs")
        known = (keys.TOKEN_IDS, keys.LENGTHS, keys.GROUP_ID, keys.COLUMNS)
        parts = batching.parts_of(batch.select(*known, strict=False)[rows], layout.data_parallel_size)
    else:
        lengths = batch[keys.LENGTHS][rows].tolist()
        if batch.get(keys.PREFERENCE, None) is not None:
            pairs = _pairs(batch[keys.GROUP_ID][rows].tolist())
            lengths = [batching.pair_length([lengths[index] for index in pair]) for pair in pairs]
        parts = batching.parts(lengths, layout.data_parallel_size)
    for indices in parts[layout.data_parallel_rank]:
        if pairs is not None:
            indices = [index for number in indices for index in pairs[number]]
        part = rows[indices]
        yield part, trim(batch[part], batching.length_multiple) if indices else _empty_micro_batch()


def in_spans(parts: Iterable[tuple[torch.Tensor, TrainingBatch]]) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
    """Yield the micro-batches, and trace what is done with each; on a device that is the launch of its kernels."""
    for rows, part in parts:
        with span(MICRO_BATCH, num_tokens=int(part[keys.LENGTHS].sum()), num_samples=len(rows)):
            yield rows, part


def _pairs(groups: Sequence[int]) -> list[list[int]]:
    """Return the indices of each group, in the order of its first row."""
    by_group: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        by_group.setdefault(group, []).append(index)
    return list(by_group.values())


def trim(batch: TrainingBatch, multiple: int = 1) -> TrainingBatch:
    """Return the batch without columns that are padding in every row: every [B, T, ...] tensor is trimmed, nested
    ones too.

    The width is a multiple of `multiple` if the batch has as many columns.
    """
    longest = max(int(batch[keys.LENGTHS].max()), 1)
    width = -(-longest // multiple) * multiple
    return _cut(batch, width)


def _cut(batch: TensorCollection, width: int) -> TensorDict:
    def cut(value: Any) -> Any:
        if is_non_tensor(value):  # a table of the whole batch
            return value
        if not isinstance(value, torch.Tensor):
            return _cut(value, width)
        return value[:, :width] if value.ndim > 1 else value

    return TensorDict({name: cut(value) for name, value in batch.items()}, batch_size=batch.batch_size)


def columns_of(batch: TrainingBatch) -> dict[str, torch.Tensor] | None:
    """Return the engines' decisions per token, [B, T, ...] by name; None if no row of the batch has any."""
    columns = batch.get(keys.COLUMNS, None)
    return None if columns is None else dict(columns.items())


def images_of(batch: TrainingBatch) -> RowImages | None:
    """Return the images of the rows; None if the batch has none."""
    rows = batch.get(keys.IMAGE_ROWS, None)
    return None if rows is None else RowImages(rows, batch[keys.IMAGES])


def loss_mask(batch: TrainingBatch) -> torch.Tensor:
    """Return the weight of each token in the loss, 0 for the first token: [B, T] float32."""
    mask = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK].unsqueeze(-1)
    mask[:, 0] = 0
    return mask


def count_valid(batch: TrainingBatch, rows: torch.Tensor) -> Normalizer:
    """Return the divisor of the loss of these rows; a trajectory with several samples counts once."""
    tokens = loss_mask(batch[rows]).sum(-1)  # [rows]
    rewards = batch.get(keys.REWARD, None)
    positive = 0.0 if rewards is None else float(tokens[rewards[rows] > 0].sum())
    weights = dict.fromkeys(batch[keys.TRAJECTORY_ID][rows].tolist(), 0.0)
    for trajectory, weight in zip(
        batch[keys.TRAJECTORY_ID][rows].tolist(), batch[keys.SAMPLE_MASK][rows].tolist(), strict=True
    ):
        weights[trajectory] = max(weights[trajectory], weight)
    return Normalizer(
        num_valid_tokens=float(tokens.sum()),
        num_valid_trajectories=sum(weights.values()),
        num_positive_tokens=positive,
    )


def _micro_batching_from_config(
    config: PolicyConfig | TeacherConfig, num_samples: int, name: str, longest: int, section: str = "policy"
) -> MicroBatching:
    packing, dynamic = config.sequence_packing, config.dynamic_batching
    default = num_samples * longest
    if packing.enabled:
        key = f"{section}.sequence_packing.{name}"
        kind = PackedTrees if packing.share_prefixes else PackedTokens
        return kind(getattr(packing, name) or default, key, packing.algorithm)
    if dynamic.enabled:
        key = f"{section}.dynamic_batching.{name}"
        return PaddedTokens(getattr(dynamic, name) or default, key, dynamic.sequence_length_round)
    return SampleCount(num_samples)


def _empty_micro_batch() -> TrainingBatch:
    shape = (1, 2)
    content = {
        keys.TOKEN_IDS: torch.zeros(shape, dtype=torch.int64),
        keys.TOKEN_MASK: torch.zeros(shape),
        keys.LENGTHS: torch.tensor([2]),
    }
    return TensorDict(content, batch_size=[1])


def _partition(lengths: Sequence[int], num_ranks: int, micro_batch_size: Callable[[int], int]) -> list[list[list[int]]]:
    """Deal samples to the ranks, longest first; in each round a rank gets at most `micro_batch_size(longest)`."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    while order:
        number = micro_batch_size(lengths[order[0]]) * num_ranks
        together, order = order[:number], order[number:]
        for rank, parts in enumerate(ranks):
            parts.append(together[rank::num_ranks])
    return ranks


def _check_longest(lengths: Sequence[int], tokens: int, key: str) -> None:
    longest = max(lengths, default=0)
    if longest > tokens:
        raise ConfigError(key, tokens, f"a sample has {longest} tokens; allowed: at least as many")
