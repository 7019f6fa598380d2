"""Prompt sets of `data`: one blend to train on, each validation dataset by itself, or the input of a collection."""

import hashlib
import json
import logging
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from nemo_rl.config.data import (
    BaseDataConfig,
    DataConfig,
    DatasetConfig,
    DatasetEntry,
    InputDataConfig,
    make_unique_name,
    resolve_dataset,
)
from nemo_rl.data.processors import make_prompt_maker, make_prompts
from nemo_rl.data.prompts import SAMPLE_ROWS, Blend, InMemoryPrompts, LazyPrompts
from nemo_rl.data.row_sources import load_rows, open_rows
from nemo_rl.data.rows import InMemoryRows, RowFile, to_jsonable
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, Prompt

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT", bound=LazyPrompts | InMemoryPrompts, covariant=True)

SEED_STRIDE = 1_000_003  # between datasets without a seed, so that none is a shifted copy of another
READ_AT_START = 100_000  # rows of a dataset; those of a larger one are read when they are drawn


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are drawn from, or measured, together."""

    name: str  # in metrics
    prompts: Sequence[Prompt]  # lazy prompts are made when needed: iterate over them instead of collecting them
    held_out: frozenset[int] = frozenset()  # `messages_key` of prompts that must not be drawn: they are validated on
    sizes: tuple[int, ...] = ()  # prompts of each dataset, in the order of the training blend

    @property
    def task_names(self) -> frozenset[str]:
        """Return the entries of `env` that the prompts need."""
        if isinstance(self.prompts, Blend):
            return self.prompts.task_names
        return frozenset(prompt.task_name for prompt in self.prompts)

    @property
    def agent_names(self) -> frozenset[str]:
        """Return the NeMo Gym agents that the prompts need."""
        if isinstance(self.prompts, Blend):
            return self.prompts.agent_names
        return frozenset(prompt.agent_name for prompt in self.prompts if prompt.agent_name)


@dataclass(frozen=True, slots=True)
class InputSet:
    """Prompts in the order of their tasks, with the rows that they were made from."""

    prompts: Blend
    parts: Sequence[LazyPrompts]

    def rows(self) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Yield every prompt with its row as the dataset has it, one at a time."""
        read = enumerate(chain.from_iterable(part.read_rows(range(len(part))) for part in self.parts))
        for position, prompt_id in zip(self.prompts.positions, self.prompts.prompt_ids(), strict=True):
            prompt, row = next(pair for index, pair in read if index == position)
            yield replace(prompt, prompt_id=prompt_id), to_jsonable(row)


def load_prompt_sets(config: DataConfig, run_seed: int) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """Return the training blend, named "train", and the validation sets.

    A dataset that names no seed gets one derived from `run_seed` and its index; the first training dataset gets
    `run_seed` itself. With `config.disjoint`, training prompts whose messages occur in a validation dataset are
    dropped; of NeMo Gym's rows, those that are rows of a validation dataset. Rows of a dataset of more than
    READ_AT_START stay in its files, and its held-out prompts are named in `held_out`.
    """
    loaded = _load_parts(config, run_seed, _load_prompts)
    _split_validation(config, loaded, run_seed)
    train_parts = [part for one in loaded["train"] for part in one.parts]
    held_out_parts = [part for one in loaded["validation"] for part in one.parts]
    repeated = _find_held_out(train_parts, held_out_parts) if config.disjoint else HeldOut()
    validation_sets = tuple(PromptSet(one.name, Blend.of(one.parts)) for one in loaded["validation"])
    blend = Blend.of(train_parts, without=repeated.positions)
    ends = accumulate((sum(len(part) for part in one.parts) for one in loaded["train"]), initial=0)
    sizes = tuple(high - low for low, high in pairwise(bisect_left(blend.positions, end) for end in ends))
    return PromptSet("train", blend, repeated.messages, sizes), validation_sets


def load_input(config: InputDataConfig, limit: int | None = None) -> InputSet:
    """Return the concatenated datasets of a collection, at most `limit` prompts.

    Rows of files stay in them; each is read once here. Prompts have the ids that they have in training. Raises
    ConfigError for a dataset, DataError for a row that cannot be read.
    """
    parts = [part for one in _load_parts(config, config.seed, _load_lazy_prompts)["input"] for part in one.parts]
    return InputSet(Blend.of(parts)[:limit], parts)


class LoadPart(Protocol[PartT]):
    """Loads one dataset; `key` is its configuration key."""

    def __call__(self, entry: DatasetEntry, section: DatasetConfig, name: str, *, seed: int, key: str) -> PartT: ...


@dataclass(frozen=True, slots=True)
class LoadedDataset(Generic[PartT]):
    """One dataset of the configuration; one that is repeated has its part several times."""

    name: str
    parts: list[PartT]


def split_rows(count: int, size: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices that stay and those that are held out: `size` of them, or a share of all below 1.

    Example: of 40 rows, 0.05 holds out 2.
    """
    num_held_out = round(count * size) if size < 1 else int(size)
    held_out = sorted(random.Random(seed).sample(range(count), min(num_held_out, count)))
    taken = frozenset(held_out)
    return [index for index in range(count) if index not in taken], held_out


def check_split(key: str, size: float, count: int, held_out: int) -> None:
    """Raise ConfigError for a split that leaves nothing to train or to validate on."""
    if not 0 < held_out < count:
        problem = f"holds out {held_out} of {count} rows: both parts need at least one"
        raise ConfigError(f"{key}.split_validation_size", size, problem)


def _split_validation(
    config: DataConfig, loaded: dict[str, list[LoadedDataset[LazyPrompts | InMemoryPrompts]]], run_seed: int
) -> None:
    """Move the validation splits of training datasets to sets of their own, in place."""
    names = {one.name for one in loaded["validation"]}
    for (key, own), one in zip(config.datasets_of("train"), loaded["train"], strict=True):
        section = resolve_dataset(own, config.default, key=key)[1]
        size = section.split_validation_size
        if not size:
            continue
        part = one.parts[0]
        kept, held_out = split_rows(len(part), size, run_seed if section.seed is None else section.seed)
        check_split(key, size, len(part), len(held_out))
        name = make_unique_name(one.name, names)
        names.add(name)
        loaded["validation"].append(LoadedDataset(name, [part.select(held_out)]))
        one.parts[:] = [part.select(kept)] * len(one.parts)


def _load_parts(
    config: BaseDataConfig, first_seed: int, load_part: LoadPart[PartT]
) -> dict[str, list[LoadedDataset[PartT]]]:
    """Return the loaded datasets of every field of `data`; names are unique within a field."""
    loaded: dict[str, list[LoadedDataset[PartT]]] = {field: [] for field in config.dataset_fields}
    index = 0
    for field in config.dataset_fields:
        names: set[str] = set()
        for key, own in config.datasets_of(field):
            entry, section = resolve_dataset(own, config.default, key=key)
            name = make_unique_name(section.name or str(section.dataset_name), names)
            names.add(name)
            seed = first_seed + SEED_STRIDE * index if section.seed is None else section.seed
            part = load_part(entry, section, name, seed=seed, key=key)
            logger.info("%s: loaded %d prompts of %s", key, len(part), name)
            loaded[field].append(LoadedDataset(name, [part] * (section.repeat or 1)))
            index += 1
    return loaded


def _load_prompts(
    entry: DatasetEntry, section: DatasetConfig, name: str, *, seed: int, key: str
) -> LazyPrompts | InMemoryPrompts:
    """Return one dataset's prompts for training: in memory, unless the entry has lazy ones or the dataset is large."""
    if entry.open_prompts is not None:
        return entry.open_prompts(section, name, key=key)
    stored = open_rows(entry, section, seed=seed, key=key)
    if stored is not None and len(stored) > READ_AT_START:
        logger.info("%s: %d rows stay in their files; %d are read at start", key, len(stored), SAMPLE_ROWS)
        make_prompt = make_prompt_maker(section, key=key)
        return LazyPrompts(stored, lambda row: replace(make_prompt(row), dataset=name), is_sampled=True)
    rows = load_rows(section, seed=seed, key=key)
    prompts = [replace(prompt, dataset=name) for prompt in make_prompts(rows, section, key=key)]
    return InMemoryPrompts(prompts, [prompt_digest(prompt) for prompt in prompts])


def _load_lazy_prompts(entry: DatasetEntry, section: DatasetConfig, name: str, *, seed: int, key: str) -> LazyPrompts:
    """Return one dataset's prompts with their rows; rows that are not lines of a file are held in memory."""
    if entry.open_prompts is not None:
        return entry.open_prompts(section, section.name or "", key=key)  # unnamed: measured agent by agent
    make_prompt = make_prompt_maker(section, key=key)
    if entry.reads_lines and section.data_path is not None:
        rows = RowFile(Path(section.data_path), limit=section.size)
    else:
        rows = InMemoryRows(f"{key} ({section.dataset_name})", load_rows(section, seed=seed, key=key))
    if not len(rows):
        raise DataError(f"{key}: {section.data_path} has no rows")
    return LazyPrompts(rows, lambda row: replace(make_prompt(row), dataset=name), digest=prompt_digest)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Training prompts that are validated on."""

    positions: frozenset[int] = frozenset()  # indices in the blend
    messages: frozenset[int] = frozenset()  # `messages_key` of those in parts whose rows are read when they are drawn


def _find_held_out(
    parts: Sequence[LazyPrompts | InMemoryPrompts], held_out: Sequence[LazyPrompts | InMemoryPrompts]
) -> HeldOut:
    """Return the prompts of `parts` that are validated on: rows of NeMo Gym by their text, others by messages."""
    digests = {digest for part in held_out if _is_compared_by_row(part) for digest in part.digests}
    others = (part for part in held_out if not _is_compared_by_row(part))
    messages = {messages_key(prompt) for part in others for prompt in part.read(range(len(part)))}
    repeated, start = [], 0
    for part in parts:
        if _is_compared_by_row(part):
            repeated += [start + index for index, digest in enumerate(part.digests) if digest in digests]
        elif isinstance(part, InMemoryPrompts):
            repeated += [start + index for index, prompt in enumerate(part.prompts) if messages_key(prompt) in messages]
        start += len(part)
    if len(repeated) == start:
        raise ConfigError("data.disjoint", True, "every training prompt occurs in a validation dataset")
    if repeated:
        logger.info("dropped %d of %d training prompts that occur in a validation dataset", len(repeated), start)
    is_sampled = any(isinstance(part, LazyPrompts) and part.is_sampled for part in parts)
    return HeldOut(frozenset(repeated), frozenset(messages) if is_sampled else frozenset())


def _is_compared_by_row(part: LazyPrompts | InMemoryPrompts) -> bool:
    return isinstance(part, LazyPrompts) and not part.is_sampled


def messages_key(prompt: Prompt) -> int:
    """Return a 64-bit hash of a prompt's messages, equal for equal messages within this process."""
    return hash(prompt.messages)


def prompt_digest(prompt: Prompt) -> int:
    """Return a digest of a prompt's task, messages, state and tools."""
    messages = [_digested(message) for message in prompt.messages]
    content = [prompt.task_name, messages, to_jsonable(dict(prompt.env_state)), to_jsonable(list(prompt.tools))]
    return int(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16], 16)


def _digested(message: Message) -> list[Any]:
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    images = [image.digest for image in message.images] or None
    rare = {"thinking": message.thinking, "tool_call_id": message.tool_call_id, "images": images}
    rare = {name: value for name, value in rare.items() if value is not None}
    return [
        message.role,
        message.content,
        calls,
        *([rare] if rare else []),
    ]  # omitted if empty
