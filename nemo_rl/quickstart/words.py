"""The quickstart's data: words to spell backward, some to learn from and others to measure on.

examples/configs/quickstart.yaml states the same validation set, so that the warm start never sees what the run
validates on; its training set may be drawn from another seed.
"""

import functools
from collections.abc import Iterable

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.datasets import PromptSet, load_datasets
from nemo_rl.types import Prompt

TASK_KWARGS = {"min_word_len": 3, "max_word_len": 5}

QUICKSTART_TRAIN = DatasetConfig(
    dataset_name="reasoning_gym", task="spell_backward", task_kwargs=TASK_KWARGS, size=12_000, seed=42
)
QUICKSTART_VALIDATION = DatasetConfig(
    dataset_name="reasoning_gym", task="spell_backward", task_kwargs=TASK_KWARGS, size=220, seed=1234
)


@functools.cache
def quickstart_prompts() -> tuple[PromptSet, PromptSet]:
    """Training and validation prompts; no question is in both."""
    train, (validation,) = load_datasets(
        DataConfig(train=QUICKSTART_TRAIN, validation=QUICKSTART_VALIDATION), run_seed=0
    )
    return train, validation


def extract_words(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """The word that each prompt asks about."""
    return tuple(prompt.env_state["entry"]["metadata"]["word"] for prompt in prompts)
