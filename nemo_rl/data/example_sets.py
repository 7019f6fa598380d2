"""Sets of supervised examples: one training blend and validation sets, for conversations and for preference pairs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nemo_rl.config.data import DataConfig, DatasetConfig, make_unique_name, resolve_dataset
from nemo_rl.data.prompt_sets import SEED_STRIDE, check_split, split_rows
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message

logger = logging.getLogger(__name__)


class Example(Protocol):
    """A sample of supervised training: a `Conversation`, or a `Preference` (preferences.py)."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]: ...


ExampleT = TypeVar("ExampleT", bound=Example)


@dataclass(frozen=True, slots=True)
class ExampleSet(Generic[ExampleT]):
    """Examples that are drawn from, or measured, together."""

    name: str  # in metrics
    examples: Sequence[ExampleT]


def load_examples(
    config: DataConfig, run_seed: int, read: Callable[[DatasetConfig, int, str], list[ExampleT]]
) -> tuple[ExampleSet[ExampleT], tuple[ExampleSet[ExampleT], ...]]:
    """Return the training blend, named "train", and the validation sets; seeds as in prompt_sets.load_prompt_sets.

    `read(section, seed, key)` returns the examples of one dataset. With `config.disjoint`, training examples whose
    prompt occurs in a validation set are dropped.
    """
    train: list[ExampleSet[ExampleT]] = []
    held_out: list[ExampleSet[ExampleT]] = []
    for index, (key, own) in enumerate(config.datasets):
        loaded = train if key.startswith("data.train") else held_out
        seed, taken = run_seed + SEED_STRIDE * index, {each.name for each in loaded}
        section = resolve_dataset(own, config.default, key=key, supervised=True)[1]
        name = make_unique_name(section.name or str(section.dataset_name), taken)
        examples = read(section, seed if section.seed is None else section.seed, key)
        logger.info("%s: loaded %d examples of %s", key, len(examples), name)
        loaded.append(ExampleSet(name, examples * (section.repeat or 1)))
    train = _split_validation(config, train, held_out, run_seed)
    blend = [example for each in train for example in each.examples]
    if config.disjoint:
        blend = _remove_held_out(blend, held_out)
    return ExampleSet("train", blend), tuple(held_out)


def _split_validation(
    config: DataConfig, train: list[ExampleSet[ExampleT]], held_out: list[ExampleSet[ExampleT]], run_seed: int
) -> list[ExampleSet[ExampleT]]:
    """Return the training sets without their validation splits, which are appended to `held_out`."""
    kept_sets = []
    for (key, own), one in zip(config.datasets_of("train"), train, strict=True):
        section = resolve_dataset(own, config.default, key=key, supervised=True)[1]
        size, repeat = section.split_validation_size, section.repeat or 1
        if not size:
            kept_sets.append(one)
            continue
        rows = one.examples[: len(one.examples) // repeat]
        kept, taken = split_rows(len(rows), size, run_seed if section.seed is None else section.seed)
        check_split(key, size, len(rows), len(taken))
        name = make_unique_name(one.name, {each.name for each in held_out})
        held_out.append(ExampleSet(name, [rows[index] for index in taken]))
        kept_sets.append(ExampleSet(one.name, [rows[index] for index in kept] * repeat))
    return kept_sets


def _remove_held_out(train: list[ExampleT], held_out: Sequence[ExampleSet[ExampleT]]) -> list[ExampleT]:
    prompt_messages = {example.prompt_messages for each in held_out for example in each.examples}
    kept = [example for example in train if example.prompt_messages not in prompt_messages]
    if not kept:
        raise ConfigError("data.disjoint", True, "every training example has a prompt of a validation dataset")
    if len(kept) < len(train):
        dropped = len(train) - len(kept)
        logger.info(
            "dropped %d of %d training examples whose prompt occurs in a validation dataset", dropped, len(train)
        )
    return kept
