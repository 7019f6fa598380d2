"""What a finished batch tells, before it is trained on."""

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantage import TrajectoryIndex
from nemo_rl.types import TrainingBatch


@torch.no_grad()
def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Names of docs/metrics.md without their prefix.

    `reward` and `filtered_reward` are the mean raw reward of the batch's trajectories; where dynamic sampling leaves
    groups out, the source knows the mean over all of them and puts it in place of `reward`. `shaped_reward` is what
    the advantages are made of. Advantages are over the valid tokens; 0 where there is none.
    """
    mask = batch[keys.TOKEN_MASK]  # [B, T]
    trajectories = TrajectoryIndex.of(batch)
    raw = torch.zeros_like(batch[keys.REWARD])  # [B]
    for component in batch[keys.REWARD_COMPONENTS].values():
        raw = raw + component
    raw = raw[trajectories.first_sample].double()  # [N]
    steps = torch.arange(mask.shape[1], device=mask.device)
    # The prompt ends at the first sampled token, or with the sequence where none was sampled.
    prompt_lengths = torch.where(mask > 0, steps, batch[keys.LENGTHS][:, None]).amin(-1)
    metrics = {
        "reward": float(raw.mean()),
        "filtered_reward": float(raw.mean()),
        "shaped_reward": float(trajectories.first(keys.REWARD).mean()),
        "mean_prompt_length": float(prompt_lengths[trajectories.first_sample].double().mean()),
        "total_num_tokens": float(batch[keys.LENGTHS].sum()),
    }
    advantages = batch.get(keys.ADVANTAGES, None)
    if advantages is not None:
        advantages = advantages[(mask * batch[keys.SAMPLE_MASK][:, None]) > 0].double()
        has_tokens = len(advantages) > 0
        metrics |= {
            "advantages/mean": float(advantages.mean()) if has_tokens else 0.0,
            "advantages/max": float(advantages.max()) if has_tokens else 0.0,
            "advantages/min": float(advantages.min()) if has_tokens else 0.0,
        }
    return metrics
