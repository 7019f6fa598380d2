"""Search for a key by the word that somebody has for it: a name of another trainer, or a part of a name here.

peer_keys.yaml has the names of other trainers, ours for them, and notes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemo_rl.config.reference import SCHEMAS, find_schema, walk_keys

PEER_KEYS = Path(__file__).with_name("peer_keys.yaml")
WORDS = {  # names that people have for things that no trainer of the table calls so
    "lr": "learning_rate",
    "kl_coef": "kl_loss_coef",
    "kl_coeff": "kl_loss_coef",
    "cliprange": "clip_ratio_low",
    "epochs": "num_train_epochs",
    "n_samples_per_prompt": "num_generations",
    "group_size": "num_generations",
    "rollouts_per_prompt": "num_generations",
    "max_tokens": "max_completion_length",
    "context_length": "seq_len",
}
MAX_FOUND = 12


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that a word may mean."""

    key: str
    meaning: str  # its meaning here
    origin: str = ""  # the other trainer's name, and what differs


def search_keys(word: str) -> list[FoundKey]:
    """Return the keys that a word may mean, the likeliest first, at most MAX_FOUND.

    First those that another trainer calls so, in full or by the last part of its name, then keys here whose last part
    is the word, then those whose last part contains its words.

    Example: "learning_rate" finds policy.optimizer.kwargs.lr, by TRL's name
    """
    if not word.strip():
        return []
    found = {each.key: each for each in (*_of_peers(word), *_of_peers(WORDS.get(word, word)))}
    ours = _meanings()
    wanted = f"_{word.lower()}_"
    by_last = {key: key.rpartition(".")[2] for key in ours}
    exact = [key for key, last in by_last.items() if last == word]
    partly = [key for key, last in by_last.items() if wanted in f"_{last}_" and last != word]
    for key in (*exact, *partly):
        found.setdefault(key, FoundKey(key, ours[key]))
    return list(found.values())[:MAX_FOUND]


def format_found(word: str, found: list[FoundKey]) -> str:
    """Format the keys that a word may mean."""
    lines = [f"{word} is the name of no key here; it may mean"]
    for each in found:
        lines.append(f"{each.key}{f'  ({each.origin})' if each.origin else ''}")
        if each.meaning:
            lines.append(f"  {each.meaning}")
    return "\n".join(lines) + "\n"


def _of_peers(word: str) -> Iterator[FoundKey]:
    import yaml  # here: every command imports the command that searches

    ours = _meanings()
    for peer, section in yaml.safe_load(PEER_KEYS.read_text(encoding="utf-8")).items():
        for theirs, key, _, note in section["rows"]:
            if word in (theirs, theirs.rpartition(".")[2]):
                origin = f"{peer}: {theirs}{f'; {note}' if note else ''}"
                yield FoundKey(key, ours.get(key) or ours.get(key.rpartition(".")[0], ""), origin)


@cache
def _meanings() -> Mapping[str, str]:
    """Return the meaning of every key of every command; entries of one's own have no name here."""
    found: dict[str, Any] = {}
    for command in SCHEMAS:
        for reference in walk_keys(find_schema(command)):
            found.setdefault(reference.key, reference.meaning)
    return found
