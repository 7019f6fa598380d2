"""NeMo-RL's import path of its batch."""

from nemo_rl.compat.batched_data_dict import BatchedDataDict

__all__ = ["BatchedDataDict"]
