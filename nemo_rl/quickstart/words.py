"""Quickstart data: words to spell backward, for training and for validation, and preference pairs of spellings.

examples/configs/quickstart.yaml states the same validation set, so that the warm start never sees what the run
validates on; its training set may be drawn from another seed. Loads without torch: the dataset `spell_backward`, the
pairs as rows, is an entry that configurations import.
"""

import functools
import random
import string
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from nemo_rl.config.data import DataConfig, DatasetConfig, DatasetEntry
from nemo_rl.data.rows import Row
from nemo_rl.errors import ConfigError
from nemo_rl.types import Prompt

if TYPE_CHECKING:
    from nemo_rl.data.preferences import Preference
    from nemo_rl.data.prompt_sets import PromptSet

SEED = 7
SPLITS = ("train", "validation")
TASK_KWARGS = {"min_word_len": 3, "max_word_len": 5}

QUICKSTART_TRAIN = DatasetConfig(
    dataset_name="reasoning_gym", task="spell_backward", task_kwargs=TASK_KWARGS, size=12_000, seed=42
)
QUICKSTART_VALIDATION = DatasetConfig(
    dataset_name="reasoning_gym", task="spell_backward", task_kwargs=TASK_KWARGS, size=220, seed=1234
)


@functools.cache
def load_quickstart_prompts() -> "tuple[PromptSet, PromptSet]":
    """Return training and validation prompts; no question is in both."""
    from nemo_rl.data.prompt_sets import load_prompt_sets  # loads torch

    train, (validation,) = load_prompt_sets(
        DataConfig(train=QUICKSTART_TRAIN, validation=QUICKSTART_VALIDATION), run_seed=0
    )
    return train, validation


def extract_words(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return the word that each prompt asks about."""
    return tuple(prompt.env_state["entry"]["metadata"]["word"] for prompt in prompts)


def make_quickstart_preferences() -> "tuple[list[Preference], list[Preference]]":
    """Return training and validation pairs; no question is in both."""
    train, validation = load_quickstart_prompts()
    return make_preference_pairs(train.prompts, seed=SEED), make_preference_pairs(validation.prompts, seed=SEED + 1)


def make_preference_pairs(prompts: Iterable[Prompt], *, seed: int) -> "list[Preference]":
    """Return one pair per prompt, in order; a function of prompts and seed."""
    from nemo_rl.data.preferences import Preference  # loads torch

    prompts, rng = list(prompts), random.Random(seed)
    words = extract_words(prompts)
    return [
        Preference(prompt.messages, word[::-1], misspell(word, rng))
        for prompt, word in zip(prompts, words, strict=True)
    ]


def misspell(word: str, rng: random.Random) -> str:
    """Return a misspelling of the word backward, as a poor speller writes it."""
    while True:
        wrong = rng.choice(MISTAKES)(word[::-1], rng)
        if wrong != word[::-1]:
            return wrong


def _reverse_word(right: str, rng: random.Random) -> str:
    return right[::-1]


def _swap_letters(right: str, rng: random.Random) -> str:
    letters = list(right)
    first, second = rng.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def _replace_letter(right: str, rng: random.Random) -> str:
    index = rng.randrange(len(right))
    return right[:index] + rng.choice(string.ascii_lowercase) + right[index + 1 :]


def _drop_letter(right: str, rng: random.Random) -> str:
    index = rng.randrange(len(right))
    return right[:index] + right[index + 1 :]


def _insert_letters(right: str, rng: random.Random) -> str:
    index = rng.randrange(len(right) + 1)
    inserted = rng.choices((*string.ascii_lowercase, *right), k=rng.randint(1, 3))
    return right[:index] + "".join(inserted) + right[index:]


MISTAKES: tuple[Callable[[str, random.Random], str], ...] = (
    _reverse_word,
    _swap_letters,
    _swap_letters,
    _replace_letter,
    _drop_letter,
    _insert_letters,
)


def _load_pairs(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield rows `{"messages", "chosen", "rejected"}` of a split; the words are the same for every seed."""
    split = section.split or "train"
    if split not in SPLITS:
        raise ConfigError("split", split, f"allowed: {', '.join(SPLITS)}")
    for pair in make_quickstart_preferences()[SPLITS.index(split)]:
        messages = [{"role": message.role, "content": message.content} for message in pair.messages]
        yield {"messages": messages, "chosen": pair.chosen, "rejected": pair.rejected}


SPELL_BACKWARD = DatasetEntry(DatasetConfig, make=_load_pairs)
