"""NeMo-RL's partition of items over workers, for environments written for it."""

from typing import TypeVar

from nemo_rl import nemo_rl_names

ItemT = TypeVar("ItemT")


def chunk_list_to_workers(to_chunk: list[ItemT], num_workers: int) -> list[list[ItemT]]:
    """Split a list, in order, into one part a worker; the last parts may be shorter or empty.

    Example: `chunk_list_to_workers([1, 2, 3, 4, 5], 3)` is `[[1, 2], [3, 4], [5]]`.
    """
    size = max(1, -(-len(to_chunk) // num_workers))
    return [to_chunk[start * size : (start + 1) * size] for start in range(num_workers)]


__getattr__ = nemo_rl_names.refuse(__name__)
