"""How a batch is cut: into optimizer steps along whole groups, and those into micro-batches without spare padding."""

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.interfaces import Normalizer
from nemo_rl.policy.ranks import ALONE, RankLayout
from nemo_rl.types import TrainingBatch


def expected_optimizer_steps(num_samples_per_step: int, train_global_batch_size: int) -> int:
    """Optimizer steps of one training step: the nearest whole number, at least one."""
    return max(1, int(num_samples_per_step / train_global_batch_size + 0.5))


def split_optimizer_steps(group_id: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Rows of each optimizer step: at most `num_steps` parts of nearly equal size that never cut a group.

    A group goes to the part in which its middle row falls; a part that gets no group is left out.

    Example: groups of 3, 3, 2 and 4 rows in two steps: rows 0..5 and 6..11.
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(group_id.tolist()):
        rows_of.setdefault(group, []).append(row)
    steps: list[list[int]] = [[] for _ in range(num_steps)]
    start = 0
    for rows in rows_of.values():
        middle = start + len(rows) / 2
        steps[min(int(middle * num_steps / len(group_id)), num_steps - 1)].extend(rows)
        start += len(rows)
    return [torch.tensor(rows) for rows in steps if rows]


def micro_batches(
    batch: TrainingBatch, rows: torch.Tensor, size: int, layout: RankLayout = ALONE
) -> Iterator[tuple[torch.Tensor, TrainingBatch]]:
    """This rank's parts of at most `size` of these rows, longest first, each cut to its longest: (rows, part).

    Samples of like length go together, on one rank and over the ranks, which wait for each other at every layer; as
    everything about a part is summed, the order changes no result. All ranks get the same number of parts: one without
    a sample left gets no rows and a part whose log-probs nobody needs.

    Example: lengths 9, 8, 7, 6, 5 in parts of 2: one rank gets (9, 8), (7, 6), (5); two get (9, 7), (5) and (8, 6), ().
    """
    by_length = rows[torch.argsort(batch[keys.LENGTHS][rows], descending=True, stable=True)]
    num_ranks = layout.data_parallel_size
    own = by_length[layout.data_parallel_rank :: num_ranks]
    num_parts = -(-len(rows) // (num_ranks * size))
    for start in range(0, num_parts * size, size):
        part = own[start : start + size]
        yield part, trim(batch[part]) if len(part) else _nothing_needed()


def _nothing_needed() -> TrainingBatch:
    shape = (1, 2)
    return TensorDict(
        {keys.TOKEN_IDS: torch.zeros(shape, dtype=torch.int64), keys.TOKEN_MASK: torch.zeros(shape)}, batch_size=[1]
    )


def trim(batch: TrainingBatch) -> TrainingBatch:
    """The batch without the columns that are padding in every row: every [B, T, ...] tensor is cut."""
    longest = max(int(batch[keys.LENGTHS].max()), 1)
    cut = {k: v[:, :longest] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in batch.items()}
    return TensorDict(cut, batch_size=batch.batch_size)


def loss_mask(batch: TrainingBatch) -> torch.Tensor:
    """[B, T] float32: the weight of each token in the loss; entry 0 carries none."""
    mask = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK].unsqueeze(-1)
    mask[:, 0] = 0
    return mask


def count_valid(batch: TrainingBatch, rows: torch.Tensor) -> Normalizer:
    """What the loss of these rows is divided by; a trajectory with several samples counts once."""
    tokens = loss_mask(batch[rows]).sum()
    weights = dict.fromkeys(batch[keys.TRAJECTORY_ID][rows].tolist(), 0.0)
    for trajectory, weight in zip(
        batch[keys.TRAJECTORY_ID][rows].tolist(), batch[keys.SAMPLE_MASK][rows].tolist(), strict=True
    ):
        weights[trajectory] = max(weights[trajectory], weight)
    return Normalizer(num_valid_tokens=float(tokens), num_valid_trajectories=sum(weights.values()))
