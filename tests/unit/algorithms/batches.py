"""Small training batches from plain numbers."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.loss_types import Normalizer


def make_batch(
    token_mask: Sequence[Sequence[float]],
    *,
    rewards: Sequence[float] | None = None,
    group_id: Sequence[int] | None = None,
    trajectory_id: Sequence[int] | None = None,
    sample_mask: Sequence[float] | None = None,
    components: dict[str, Sequence[float]] | None = None,
    **others: Sequence[Sequence[float]] | Sequence[float] | torch.Tensor,
) -> TensorDict:
    """A batch with the keys of the rollout; log-probs, advantages and others by name, those 0 where not given."""
    mask = torch.tensor(token_mask, dtype=torch.float32)
    num_samples, width = mask.shape
    ids = torch.arange(num_samples) if trajectory_id is None else torch.tensor(trajectory_id)
    of_trajectory = torch.zeros(int(ids.max()) + 1).index_add_(0, ids, mask.sum(-1))
    reward = torch.tensor(rewards or [0.0] * num_samples)
    batch = TensorDict(
        {
            keys.TOKEN_IDS: torch.zeros(num_samples, width, dtype=torch.int64),
            keys.TOKEN_MASK: mask,
            keys.GENERATION_LOGPROBS: torch.zeros(num_samples, width),
            keys.ADVANTAGES: torch.zeros(num_samples, width),
            keys.LENGTHS: torch.full((num_samples,), width),
            keys.SAMPLE_MASK: torch.tensor(sample_mask or [1.0] * num_samples),
            keys.TRAJECTORY_ID: ids,
            keys.GROUP_ID: torch.tensor(group_id or [0] * num_samples),
            keys.TRAJECTORY_TOKENS: of_trajectory[ids],
            keys.REWARD: reward,
            keys.REWARD_COMPONENTS: TensorDict(
                {name: torch.tensor(values) for name, values in (components or {"score": reward.tolist()}).items()},
                batch_size=[num_samples],
            ),
            keys.TRUNCATED: torch.zeros(num_samples, dtype=torch.bool),
        },
        batch_size=[num_samples],
    )
    for name, values in others.items():
        batch[name] = torch.as_tensor(values, dtype=torch.float32)
    return batch


def normalizer_of(batch: TensorDict) -> Normalizer:
    """The counts of an optimizer step that consists of this batch."""
    trained = batch[keys.SAMPLE_MASK] > 0
    tokens = (batch[keys.TOKEN_MASK][:, 1:] * batch[keys.SAMPLE_MASK][:, None]).sum(-1)
    num_trajectories = float(len(batch[keys.TRAJECTORY_ID][trained].unique()))
    return Normalizer(float(tokens.sum()), num_trajectories, float(tokens[batch[keys.REWARD] > 0].sum()))
