"""Images beside tokens: an image as its model's vision tower takes it, and the tokens whose embeddings it replaces.

An image is processed once and known by the digest of its file from then on: the samples of a group, all turns of a
rollout, the engine's cache and a batch share one `ImageFeatures`. NumPy is imported with the first of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Output of a model family's processor for one image; equal to that of the same file."""

    digest: str  # SHA-256 of the image's file
    # Under the processor's names, without an axis of samples. Tiles: pixel_values [n, C, H, W] and pixel_attention_mask
    # [n, H, W]. Patches: pixel_values [n, width] and image_grid_thw [1, 3]. Never written to.
    arrays: "Mapping[str, np.ndarray]"
    num_tokens: int  # placeholder tokens, one per row of features

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageFeatures) and (self.digest, self.num_tokens) == (other.digest, other.num_tokens)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"ImageFeatures({self.digest[:12]}, {self.num_tokens} tokens)"

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a sequence of tokens."""

    features: ImageFeatures
    positions: tuple[int, ...]  # its placeholder tokens in order, one per row of features

    def shifted(self, offset: int) -> "PlacedImage":
        """Return the image in a sequence that `offset` tokens precede."""
        if not offset:
            return self
        return PlacedImage(self.features, tuple(position + offset for position in self.positions))


@dataclass(frozen=True, slots=True)
class ImageTable:
    """The distinct images of a batch. Its tokens name rows among the features of all images, in this order."""

    images: tuple[ImageFeatures, ...]

    @property
    def starts(self) -> list[int]:
        """Return the first row of each image, then the number of all rows."""
        return list(accumulate((image.num_tokens for image in self.images), initial=0))

    @classmethod
    def lay_out(cls, rows: Sequence[Sequence[PlacedImage]], width: int) -> "tuple[ImageTable, np.ndarray]":
        """Return the table of all images in B sequences, and the row of features of each token [B, T], else -1.

        Example: an image of two tokens at 1 and 2 of the second of two sequences gives [[-1, -1, -1], [-1, 0, 1]].
        """
        import numpy as np

        table = cls(tuple({placed.features: None for row in rows for placed in row}))
        starts = dict(zip(table.images, table.starts, strict=False))
        numbers = np.full((len(rows), width), -1, np.int64)
        for index, row in enumerate(rows):
            for placed in row:
                first = starts[placed.features]
                numbers[index, list(placed.positions)] = np.arange(first, first + len(placed.positions))
        return table, numbers
