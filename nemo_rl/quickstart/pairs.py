"""The dataset `spell_backward`: the quickstart's preference pairs as rows. Loads without torch."""

from collections.abc import Iterator

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.data.rows import Row
from nemo_rl.errors import ConfigError

SPLITS = ("train", "validation")


def _load(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield rows `{"messages", "chosen", "rejected"}` of a split; the words are the same for every seed."""
    from nemo_rl.quickstart.words import make_quickstart_preferences  # here: it tokenizes and draws thousands of words

    split = section.split or "train"
    if split not in SPLITS:
        raise ConfigError("split", split, f"allowed: {', '.join(SPLITS)}")
    for pair in make_quickstart_preferences()[SPLITS.index(split)]:
        messages = [{"role": message.role, "content": message.content} for message in pair.messages]
        yield {"messages": messages, "chosen": pair.chosen, "rejected": pair.rejected}


SPELL_BACKWARD = DatasetEntry(DatasetConfig, make=_load)
