"""Prompts in training order: each once per epoch, resumable to the exact position."""

import hashlib
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from nemo_rl.data.prompt_screen import PromptScreen, Verdict
from nemo_rl.data.prompt_sets import SEED_STRIDE
from nemo_rl.data.prompts import Blend
from nemo_rl.errors import DataError, UnusableRowError
from nemo_rl.types import Prompt


@dataclass(frozen=True, slots=True)
class LoadedPrompt:
    """A prompt and the epoch in which it is used; the two seed its samples."""

    prompt: Prompt
    epoch: int
    prompt_index: int  # in the training order, over all epochs
    is_masked: bool = False  # too long, and keeps its place in the step: it is not sampled and has no weight

    @property
    def group_id(self) -> str:
        """Return the id of the prompt's group; it contains the index, since datasets may share prompt ids."""
        return f"{self.epoch}:{self.prompt.prompt_id}:{self.prompt_index}"


class PromptLoader:
    """Prompts in training order, each once per epoch, for `max_epochs` epochs.

    The order of an epoch is a function of (seed, epoch) alone, so the state is a count and the indices of re-queued
    prompts. Prompts are read from `prompts` when they are taken, so those of a large file are never all in memory, and
    screened then. One that the screen drops is consumed: positions count all prompts, so they do not depend on it.

    With a `mix` the datasets, of `sizes` consecutive prompts, take turns: mix[d] prompts of dataset d, again and again,
    each dataset in an order of its own that starts over at its end. Example: sizes (2, 8) and mix (1, 2), unshuffled:
    0, 2, 3, 1, 4, 5, 0, 6, 7, 1, an epoch. An epoch has as many prompts as all datasets together.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        shuffle: bool,
        seed: int,
        max_epochs: int,
        screen: PromptScreen | None = None,
        sizes: Sequence[int] = (),
        mix: Sequence[int] = (),
    ) -> None:
        """By default no prompt is screened out, and all prompts are one dataset."""
        if not prompts or (mix and not all(sizes)):
            raise DataError("there are no prompts to train on" if not prompts else f"datasets of {list(sizes)} prompts")
        self._screen = screen or PromptScreen()
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._max_epochs = max_epochs
        self._next = 0
        self._put_back: tuple[int, ...] = ()  # indices before the next one that are to be taken again
        self._mix, self._sizes = (tuple(mix), tuple(sizes)) if mix else ((1,), (len(prompts),))
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}  # by dataset: its last epoch, and that order
        self._fingerprint = fingerprint(self._prompts, shuffle=shuffle, seed=seed, mix=mix)  # once, for every state

    @property
    def consumed(self) -> int:
        """Return the number of prompts taken and not put back, over all epochs."""
        return self._next - len(self._put_back)

    @property
    def num_put_back(self) -> int:
        """Return the number of prompts that were put back; `take` returns them first."""
        return len(self._put_back)

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs; `max_epochs` once the data is exhausted."""
        return self.epoch_after(self.consumed)

    @property
    def data_exhausted(self) -> bool:
        """Return whether `take` has nothing left."""
        return not self._put_back and self._next >= self._max_epochs * len(self._prompts)

    def epoch_after(self, num_prompts: int) -> int:
        """Return the number of complete epochs in `num_prompts` prompts."""
        return num_prompts // len(self._prompts)

    def take(self, count: int) -> tuple[LoadedPrompt, ...]:
        """Return the next `count` prompts, across epochs; fewer at the end of the last epoch, none after it.

        Prompts that were put back come first. Masked ones are among them, dropped ones are replaced by the next.
        """
        taken: list[LoadedPrompt] = []
        while len(taken) < count and not self.data_exhausted:
            if self._put_back:
                prompt_index, self._put_back = self._put_back[0], self._put_back[1:]
            else:
                prompt_index, self._next = self._next, self._next + 1
            if (loaded := self._screened(prompt_index)) is not None:
                taken.append(loaded)
        return tuple(taken)

    def take_step(self, count: int) -> tuple[LoadedPrompt, ...]:
        """Return the prompts of the next `count` that are trained on, at least one unless `take` has nothing left."""
        while taken := self.take(count):
            if trained := tuple(one for one in taken if not one.is_masked):
                return trained
        return ()

    def take_metrics(self) -> dict[str, float]:
        """Return the counts of prompts that were masked or dropped since the last call."""
        return self._screen.take_metrics()

    def put_back(self, prompt_indices: Iterable[int]) -> None:
        """Re-queue prompts, in training order, before all others."""
        self._put_back = tuple(sorted({*self._put_back, *prompt_indices}))

    def at(self, prompt_index: int) -> LoadedPrompt:
        """Return the prompt at an index of the training order, whether or not it was taken."""
        block, offset = divmod(prompt_index, sum(self._mix))
        ends = list(accumulate(self._mix))
        dataset = next(index for index, end in enumerate(ends) if offset < end)
        drawn = (
            block * self._mix[dataset] + offset - (ends[dataset] - self._mix[dataset])
        )  # prompts of the dataset before this one
        epoch, place = divmod(drawn, self._sizes[dataset])
        index = sum(self._sizes[:dataset]) + self._order(dataset, epoch)[place]
        return LoadedPrompt(self._prompts[index], epoch, prompt_index)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self._next, "put_back": list(self._put_back), "data": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raises DataError when the prompts, their order or the seed differ."""
        if state["data"] != self._fingerprint:
            raise DataError("the checkpoint was made with other training prompts, another seed or another data.shuffle")
        self._next = state["consumed"]
        self._put_back = tuple(state["put_back"])

    def _screened(self, prompt_index: int) -> LoadedPrompt | None:
        """Return the prompt at an index, masked or not; None if it is dropped."""
        try:
            loaded = self.at(prompt_index)
        except UnusableRowError as error:
            self._screen.reject(str(error))
            return None
        verdict = self._screen.judge(loaded.prompt)
        return None if verdict is Verdict.DROP else replace(loaded, is_masked=verdict is Verdict.MASK)

    def _order(self, dataset: int, epoch: int) -> Sequence[int]:
        known, order = self._orders.get(dataset, (None, ()))
        if known != epoch:
            seed = self._seed + SEED_STRIDE * dataset
            order = epoch_order(self._sizes[dataset], epoch, shuffle=self._shuffle, seed=seed)
            self._orders[dataset] = (epoch, order)
        return order


def epoch_order(count: int, epoch: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """Return the indices 0 to count - 1 in the order of one epoch: a function of (seed, epoch) alone."""
    if not shuffle:
        return range(count)
    order = array("I", range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def fingerprint(prompts: Sequence[Prompt], *, shuffle: bool, seed: int, mix: Sequence[int] = ()) -> str:
    """Return a digest of what determines the training order: the prompts, their order, shuffling, seed and mix."""
    digest = hashlib.sha256(f"{seed}\n{shuffle}".encode() + (f"\n{list(mix)}".encode() if mix else b""))
    for prompt_id in prompts.prompt_ids() if isinstance(prompts, Blend) else (prompt.prompt_id for prompt in prompts):
        digest.update(f"\n{prompt_id}".encode())
    return digest.hexdigest()[:16]
