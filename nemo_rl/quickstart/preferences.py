"""The quickstart's words as preferences: the word backward is better than any misspelling."""

import random
import string
from collections.abc import Callable, Iterable

from nemo_rl.data.preferences import Preference
from nemo_rl.quickstart.words import quickstart_prompts, words_of
from nemo_rl.types import Prompt

SEED = 7


def quickstart_preferences() -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on and pairs to measure on; no question is in both."""
    train, validation = quickstart_prompts()
    return pairs_of(train.prompts, seed=SEED), pairs_of(validation.prompts, seed=SEED + 1)


def pairs_of(prompts: Iterable[Prompt], *, seed: int) -> list[Preference]:
    """One pair a prompt, in its order; a function of prompts and seed."""
    prompts, draws = list(prompts), random.Random(seed)
    words = words_of(prompts)
    return [
        Preference(prompt.messages, word[::-1], misspelling(word, draws))
        for prompt, word in zip(prompts, words, strict=True)
    ]


def misspelling(word: str, draws: random.Random) -> str:
    """Anything that a poor speller writes, and never the word backward."""
    while True:
        wrong = draws.choice(MISTAKES)(word[::-1], draws)
        if wrong != word[::-1]:
            return wrong


def _forward(right: str, draws: random.Random) -> str:
    return right[::-1]


def _swapped(right: str, draws: random.Random) -> str:
    letters = list(right)
    first, second = draws.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def _replaced(right: str, draws: random.Random) -> str:
    place = draws.randrange(len(right))
    return right[:place] + draws.choice(string.ascii_lowercase) + right[place + 1 :]


def _dropped(right: str, draws: random.Random) -> str:
    place = draws.randrange(len(right))
    return right[:place] + right[place + 1 :]


def _added(right: str, draws: random.Random) -> str:
    place = draws.randrange(len(right) + 1)
    more = draws.choices((*string.ascii_lowercase, *right), k=draws.randint(1, 3))
    return right[:place] + "".join(more) + right[place:]


MISTAKES: tuple[Callable[[str, random.Random], str], ...] = (_forward, _swapped, _swapped, _replaced, _dropped, _added)
