"""`data` of the configuration as prompt sets: one blend to train on, and the validation sets apart."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nemo_rl.config.data import Data, Dataset
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.processors import make_prompts
from nemo_rl.data.sources import json_able, load_rows, overlay, with_preset
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message, Prompt

logger = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003  # between data sets that name no seed: none is a shifted copy of another


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are drawn from, or measured, together."""

    name: str  # in metrics
    prompts: tuple[Prompt, ...]


def load_datasets(config: Data, run_seed: int) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """The training blend, named "train", and the validation sets.

    A set that names no seed gets one derived from `run_seed` and its place, the first training set `run_seed` itself.
    With `config.disjoint`, training prompts whose messages occur in a validation set are left out.
    """
    train_sections, validation_sections = _sections(config.train), _sections(config.validation)
    seeds = (run_seed + SEED_STRIDE * place for place in range(len(train_sections) + len(validation_sections)))
    train_sets = _load(train_sections, config.default, seeds, "data.train")
    validation_sets = _load(validation_sections, config.default, seeds, "data.validation")
    blend = [prompt for prompts in train_sets for prompt in prompts.prompts]
    if config.disjoint:
        blend = _without(blend, validation_sets)
    train = PromptSet("train", _identified(blend))
    return train, tuple(PromptSet(held_out.name, _identified(held_out.prompts)) for held_out in validation_sets)


def check_prompt_lengths(prompt_sets: Iterable[PromptSet], encoder: ChatEncoder, max_input_tokens: int) -> None:
    """Render every prompt; raises ConfigError for the first one of more than `max_input_tokens` tokens."""
    for prompt_set in prompt_sets:
        for prompt in prompt_set.prompts:
            if not encoder.prompt_fits(prompt.messages, prompt.tools, max_input_tokens):
                length = len(flat_token_ids(encoder.encode_prompt(prompt.messages, prompt.tools)))
                raise ConfigError(
                    "data.max_input_seq_length",
                    max_input_tokens,
                    f"prompt {prompt.prompt_id} of {prompt.dataset!r} has {length} tokens",
                )


def _sections(sections: Dataset | list[Dataset] | None) -> list[Dataset]:
    if sections is None:
        return []
    return sections if isinstance(sections, list) else [sections]


def _load(sections: Sequence[Dataset], default: Dataset, seeds: Iterator[int], key: str) -> list[PromptSet]:
    names: set[str] = set()
    prompt_sets = []
    for place, own in enumerate(sections):
        where = key if len(sections) == 1 else f"{key}[{place}]"
        section = overlay(default, with_preset(overlay(Dataset(dataset_name=default.dataset_name), own)))
        seed = next(seeds)
        rows = load_rows(section, seed=seed if section.seed is None else section.seed, key=where)
        name = _unique(section.name or str(section.dataset_name), names)
        names.add(name)
        prompts = tuple(replace(prompt, dataset=name) for prompt in make_prompts(rows, section, key=where))
        logger.info("%s: %d prompts of %s", where, len(prompts), name)
        prompt_sets.append(PromptSet(name, prompts))
    return prompt_sets


def _unique(name: str, taken: set[str]) -> str:
    """The name, or the first of name_2, name_3, ... that is free."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _without(prompts: Sequence[Prompt], held_out: Sequence[PromptSet]) -> list[Prompt]:
    seen: set[tuple[Message, ...]] = {prompt.messages for each in held_out for prompt in each.prompts}
    kept = [prompt for prompt in prompts if prompt.messages not in seen]
    if len(kept) < len(prompts):
        logger.info(
            "%d of %d training prompts are left out: they are validated on", len(prompts) - len(kept), len(prompts)
        )
    if not kept:
        raise ConfigError("data.disjoint", True, "every training prompt occurs in a validation set")
    return kept


def _identified(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """Prompts with ids: a hash of what they ask and carry, numbered where it repeats. A row keeps its id when others
    are added, removed or moved."""
    repeats: Counter[str] = Counter()
    identified = []
    for prompt in prompts:
        digest = _digest(prompt)
        number = repeats[digest]
        repeats[digest] += 1
        identified.append(replace(prompt, prompt_id=f"{digest}-{number}" if number else digest))
    return tuple(identified)


def _digest(prompt: Prompt) -> str:
    messages = [(m.role, m.content, [(c.id, c.name, c.arguments) for c in m.tool_calls]) for m in prompt.messages]
    content = [prompt.task_name, messages, json_able(dict(prompt.env_state)), json_able(list(prompt.tools))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
