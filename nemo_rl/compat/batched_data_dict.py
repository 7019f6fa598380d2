"""NeMo-RL's batch, as environments use it: columns of equal length, tensors or lists, by name.

The program itself trains on TensorDicts (batch.py).
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    import torch

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Columns of equal length, whose first dimension is the batch."""

    @property
    def size(self) -> int:
        """Return the number of rows; 0 without columns."""
        return len(next(iter(self.data.values()), ()))

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return the rows of these indices, in their order."""
        import torch

        chosen = [int(index) for index in indices]
        return type(self)(
            {
                name: column[torch.tensor(chosen, dtype=torch.long)]
                if isinstance(column, torch.Tensor)
                else [column[index] for index in chosen]
                for name, column in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> Self:
        """Return the rows from `start` to before `end`."""
        return type(self)({name: column[start:end] for name, column in self.data.items()})

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return part `rank` of `chunks` equal parts."""
        size = self.size // chunks
        return self.slice(rank * size, (rank + 1) * size)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return every row `num_repeats` times in a row."""
        return self.select_indices([index for index in range(self.size) for _ in range(num_repeats)])

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors, in place."""
        self.data = {name: column.to(device) if hasattr(column, "to") else column for name, column in self.data.items()}
        return self

    def get_dict(self) -> dict[str, Any]:
        return dict(self.data)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the rows of all batches; tensors are padded on the right to the longest, with 0 or the value named."""
        import torch

        columns: dict[str, Any] = {}
        for name in batches[0]:
            parts = [batch[name] for batch in batches]
            if not isinstance(parts[0], torch.Tensor):
                columns[name] = [item for part in parts for item in part]
                continue
            value = (pad_value_dict or {}).get(name, 0)
            rows = [row for part in parts for row in part]
            is_padded = rows[0].dim() > 0
            columns[name] = (
                torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
                if is_padded
                else torch.cat(parts)
            )
        return cls(columns)
