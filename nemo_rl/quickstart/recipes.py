"""How the quickstart's models are made: a short supervised training on spellings of which some are right.

The student's labels are mostly wrong: a clean training would leave nothing to learn, none at all nothing to reward. The
teacher's are right, so that it can be distilled into the student. build/quickstart.py trains them.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from nemo_rl.data.conversations import Conversation
from nemo_rl.quickstart.words import QUICKSTART_TRAIN, QUICKSTART_VALIDATION, extract_words
from nemo_rl.types import Message, Prompt


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the weights depend on, beside the words."""

    seed: int = 0  # of the first weights and of the spellings
    num_steps: int = 280
    batch_size: int = 64  # spellings of one step
    peak_learning_rate: float = 2e-3  # the line that it falls along begins here, at step 0
    warmup_steps: int = 30
    right_share: float = 0.35  # of the spellings
    hidden_size: int = 192
    num_layers: int = 2
    tokenizer: Literal["characters", "pairs"] = "characters"

    @property
    def text(self) -> str:
        """Different wherever another recipe or other words give other weights."""
        named = asdict(self)
        if self.tokenizer == "characters":
            del named["tokenizer"]
        training = ", ".join(f"{name} {value}" for name, value in named.items())
        words = (section.model_dump_json(exclude_unset=True) for section in (QUICKSTART_TRAIN, QUICKSTART_VALIDATION))
        return "\n".join((training, *words, ""))


def student(seed: int) -> Recipe:
    """An imperfect speller that explores: what GRPO begins with."""
    return Recipe(seed=seed)


def teacher(seed: int) -> Recipe:
    """A good speller of the same family."""
    return Recipe(seed=seed, right_share=1.0)


def pairs_teacher(seed: int) -> Recipe:
    """A good speller with another tokenizer, in which two letters may be one token; these take longer to learn."""
    return Recipe(seed=seed, right_share=1.0, num_steps=600, tokenizer="pairs")


def spellings(prompts: Sequence[Prompt], recipe: Recipe) -> list[Conversation]:
    """Every conversation of the training in its order, `batch_size` a step; a function of prompts and recipe."""
    rng, words = random.Random(recipe.seed), extract_words(prompts)
    conversations = []
    for _ in range(recipe.num_steps):
        for prompt_index in rng.choices(range(len(prompts)), k=recipe.batch_size):
            answer = Message("assistant", sample_spelling(words[prompt_index], rng, right_share=recipe.right_share))
            conversations.append(Conversation((*prompts[prompt_index].messages, answer)))
    return conversations


def sample_spelling(word: str, rng: random.Random, *, right_share: float) -> str:
    """The word backward with that probability; else forward, or backward with two letters swapped."""
    backward = word[::-1]
    if rng.random() < right_share:
        return backward
    if rng.random() < 0.5:
        return word
    letters = list(backward)
    first, second = rng.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)
