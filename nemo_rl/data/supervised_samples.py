"""Supervised examples as tokens: samples, batches of them, and their loader."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.data.prompt_loader import epoch_order
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.errors import DataError
from nemo_rl.image_features import PlacedImage
from nemo_rl.types import ImagePart, TrainingBatch

MASKED_TOKENS = 4  # tokens of a masked sample that are computed


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image of a sample: its file, which is encoded again for each batch that has it, and its placeholder tokens."""

    image: ImagePart
    positions: tuple[int, ...]

    def encoded(self, images: ImageEncoder) -> PlacedImage:
        return PlacedImage(images.encode(self.image).features, self.positions)


def shift_images(images: Sequence[SampleImage], offset: int) -> tuple[SampleImage, ...]:
    """Return images of a sequence that `offset` tokens precede."""
    return tuple(replace(each, positions=tuple(at + offset for at in each.positions)) for each in images)


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedSample:
    """One conversation: its tokens, and which of them are trained on."""

    token_ids: np.ndarray  # [T] int32
    token_mask: np.ndarray  # [T] bool; true on the assistant's tokens, including the end of each turn
    images: tuple[SampleImage, ...] = ()
    is_masked: bool = False  # too long: it keeps its place in a batch, with no weight in the loss

    @property
    def rows(self) -> "tuple[SupervisedSample, ...]":
        return (self,)

    def with_last_answer(self) -> "SupervisedSample":
        """Return the sample in which only the last answer is trained on."""
        after_context = np.flatnonzero(~self.token_mask)
        last = np.flatnonzero(self.token_mask)[-1] if self.token_mask.any() else -1
        start = after_context[after_context < last][-1] + 1 if (after_context < last).any() else 0
        return replace(self, token_mask=self.token_mask & (np.arange(len(self.token_mask)) >= start))

    def truncate(self, max_tokens: int) -> "SupervisedSample":
        """Return the first `max_tokens` tokens, or fewer: none of an image that they would cut."""
        cut = [image.positions[0] for image in self.images if image.positions[-1] >= max_tokens]
        end = min([max_tokens, *cut])
        kept = tuple(image for image in self.images if image.positions[-1] < end)
        return SupervisedSample(self.token_ids[:end], self.token_mask[:end], kept)

    def masked(self) -> "SupervisedSample":
        """Return a sample of a few tokens in place of one that is too long."""
        token_ids = self.token_ids[:MASKED_TOKENS]
        return SupervisedSample(token_ids, np.zeros(len(token_ids), bool), is_masked=True)

    def with_edges(self, first: int | None, last: int | None) -> "SupervisedSample":
        """Return the sample that begins with the token `first`, not trained on, and ends with `last`, which is."""
        before = [] if first is None or self.token_ids[0] == first else [first]
        after = [] if last is None or self.token_ids[-1] == last else [last]
        token_ids = np.concatenate([np.array(before, np.int32), self.token_ids, np.array(after, np.int32)])
        edges = (np.zeros(len(before), bool), self.token_mask, np.ones(len(after), bool))
        return SupervisedSample(token_ids, np.concatenate(edges), shift_images(self.images, len(before)))

    def with_openings(self, num_tokens: int) -> "SupervisedSample":
        """Return the sample whose trained parts begin `num_tokens` tokens earlier."""
        mask = self.token_mask.copy()
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        for start in starts:
            mask[max(start - num_tokens, 0) : start] = True
        return replace(self, token_mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """A preference pair: in either conversation only the last answer is trained on."""

    chosen: SupervisedSample
    rejected: SupervisedSample

    def masked(self) -> "PairSample":
        """Return a pair of a few tokens in place of one with a side that is too long."""
        return PairSample(self.chosen.masked(), self.rejected.masked())

    @property
    def rows(self) -> tuple[SupervisedSample, ...]:
        return self.chosen, self.rejected


class TokenizedExample(Protocol):
    """One example as tokens."""

    @property
    def rows(self) -> tuple[SupervisedSample, ...]: ...


@dataclass(frozen=True, slots=True)
class SupervisedDataset:
    """The samples of an ExampleSet, in its order."""

    name: str
    samples: Sequence[TokenizedExample]
    num_overlong: int = 0  # examples of too many tokens: masked, dropped or truncated
    num_dropped: int = 0  # those that were dropped


def make_pair_batch(samples: Sequence[TokenizedExample], images: ImageEncoder | None = None) -> TrainingBatch:
    """Return pairs as a right-padded batch: the chosen row of each and then the rejected one, a group for each pair.

    `images` encodes those of the prompts; None if they have none.
    """
    batch = make_supervised_batch(samples, images)
    index = torch.arange(len(batch))
    return batch.update({keys.GROUP_ID: index // 2, keys.PREFERENCE: (1 - 2 * (index % 2)).float()})


def make_supervised_batch(samples: Sequence[TokenizedExample], images: ImageEncoder | None = None) -> TrainingBatch:
    """Return the samples' token sequences as a right-padded batch, each a group of its own.

    `images` encodes those of the samples; None if they have none.
    """
    rows = [row for sample in samples for row in sample.rows]
    lengths = np.array([len(row.token_ids) for row in rows])
    token_ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    token_mask = np.zeros(token_ids.shape, dtype=np.float32)
    for index, row in enumerate(rows):
        token_ids[index, : lengths[index]] = row.token_ids
        token_mask[index, : lengths[index]] = row.token_mask
    token_mask[:, 0] = 0.0  # nothing comes before the first token, so nothing predicts it
    batch = TensorDict(
        {
            keys.TOKEN_IDS: torch.from_numpy(token_ids),
            keys.TOKEN_MASK: torch.from_numpy(token_mask),
            keys.LENGTHS: torch.from_numpy(lengths),
            keys.SAMPLE_MASK: torch.tensor([0.0 if row.is_masked else 1.0 for row in rows]),
            keys.TRAJECTORY_ID: torch.arange(len(rows)),
            keys.GROUP_ID: torch.arange(len(rows)),
        },
        batch_size=[len(rows)],
    )
    if images is not None:
        keys.add_images(batch, [[each.encoded(images) for each in row.images] for row in rows])
    return batch


class SampleLoader:
    """Samples in training order, each once per epoch, a function of seed and epoch; resumable to the exact sample."""

    def __init__(self, samples: Sequence[TokenizedExample], *, shuffle: bool, seed: int, max_epochs: int) -> None:
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._end = max_epochs * len(samples)
        self._consumed = 0
        self._order: tuple[int, Sequence[int]] = (0, self._epoch_order(0))
        self._fingerprint = _fingerprint(samples, shuffle=shuffle, seed=seed)

    @property
    def data_exhausted(self) -> bool:
        """Return whether `take` has nothing left."""
        return self._consumed >= self._end

    def take(self, count: int) -> list[TokenizedExample]:
        """Return the next `count` samples, across epochs; fewer at the end of the last epoch, none after it."""
        stop = min(self._consumed + count, self._end)
        taken = [self._at(position) for position in range(self._consumed, stop)]
        self._consumed = stop
        return taken

    def state_dict(self) -> dict[str, Any]:
        epoch = self._consumed // len(self._samples)
        return {"consumed_prompts": self._consumed, "epoch": epoch, "data": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raises DataError when the samples, their order or the seed differ."""
        if state["data"] != self._fingerprint:
            raise DataError(
                "the checkpoint was made with other training conversations, tokens, another seed or data.shuffle"
            )
        self._consumed = state["consumed_prompts"]

    def _at(self, position: int) -> TokenizedExample:
        epoch, offset = divmod(position, len(self._samples))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return self._samples[self._order[1][offset]]

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        return epoch_order(len(self._samples), epoch, shuffle=self._shuffle, seed=self._seed)


def _fingerprint(samples: Sequence[TokenizedExample], *, shuffle: bool, seed: int) -> str:
    digest = hashlib.sha256(f"{seed}\n{shuffle}\n{len(samples)}".encode())
    for row in (row for sample in samples for row in sample.rows):
        digest.update(row.token_ids.tobytes())
        digest.update(row.token_mask.tobytes())
        digest.update("".join(each.image.digest for each in row.images).encode())
    return digest.hexdigest()[:16]
