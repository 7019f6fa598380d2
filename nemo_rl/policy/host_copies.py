"""Host memory for the copies of a checkpoint: pinned for a GPU, and kept from one save to the next."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.policy.offload import synchronize

ALIGNMENT = 64  # bytes; each copy begins at a multiple
BLOCK_BYTES = 2**30  # several of a large model's matrices


class HostCopies:
    """Copies of a device's tensors in blocks of host memory; each goes into the first block that has room for it.

    Blocks are powers of two, up to which torch rounds pinned memory.

    `copy` queues a copy on the current stream; `wait` awaits all of them by one synchronization. After `restart` the
    same memory holds the next copies, in the same order at the same places. Each copy has a storage of its own, as
    safetensors wants it. On a CPU, memory is not pinned; keeping it saves the kernel's clearing of pages.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block_bytes: int = BLOCK_BYTES,
        synchronize_device: Callable[[], None] | None = None,
    ) -> None:
        self._is_pinned = device.type == "cuda"
        self._block_bytes = block_bytes
        self._synchronize = synchronize_device or (lambda: synchronize(device))
        self._blocks: list[torch.Tensor] = []  # uint8
        self._used: list[int] = []  # bytes of each block

    @property
    def num_bytes(self) -> int:
        """Return the size of all memory that is kept."""
        return sum(len(block) for block in self._blocks)

    def restart(self) -> None:
        """Let the next copies overwrite those made so far."""
        self._used = [0] * len(self._blocks)

    @torch.no_grad()
    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, which is whole after `wait`; of a DTensor, of this rank's part."""
        source = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype)
        copied = self._take(source.numel() * source.element_size()).view(source.dtype).reshape(source.shape)
        return copied.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until every copy is whole."""
        self._synchronize()

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of the first block that has room for all of them, or of a new one."""
        rooms = (len(block) - used for block, used in zip(self._blocks, self._used, strict=True))
        index = next((index for index, room in enumerate(rooms) if room >= num_bytes), len(self._blocks))
        if index == len(self._blocks):
            size = max(self._block_bytes, 1 << (num_bytes - 1).bit_length())
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))
            self._used.append(0)
        start = self._used[index]
        self._used[index] = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return torch.from_numpy(self._blocks[index].numpy()[start : start + num_bytes])
