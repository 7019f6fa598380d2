"""A verifiers taskset, found as `speller-v1` from the directory of this file: words to spell backward."""

import random
import string
from collections.abc import Iterator

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["SpellerTaskset"]

QUESTION = "Spell this word backward (example: sun -> nus): {}"
NUM_TASKS = 1000


class SpellerData(vf.TaskData):
    """One word."""

    word: str


class SpellerTask(vf.Task[SpellerData]):
    """1 for the right spelling."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.word[::-1])


class SpellerTaskset(vf.Taskset[SpellerTask]):
    """Words of 3 to 5 letters, always the same ones."""

    def load(self) -> Iterator[SpellerTask]:
        random_words = random.Random(0)
        for _ in range(NUM_TASKS):
            word = "".join(random_words.choices(string.ascii_lowercase, k=random_words.randint(3, 5)))
            yield SpellerTask(SpellerData(prompt=QUESTION.format(word), word=word))
