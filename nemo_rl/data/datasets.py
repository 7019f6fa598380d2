"""`data` of the configuration as prompt sets: one blend to train on, and the validation sets apart."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from nemo_rl.config.data import DataConfig, DatasetConfig, InputDataConfig
from nemo_rl.data.blend import Blend, FilePrompts, InMemoryPrompts, InMemoryRows, RowFile
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.nemo_gym import NEMO_GYM, open_nemo_gym_prompts
from nemo_rl.data.processors import make_prompt_maker, make_prompts
from nemo_rl.data.sources import apply_preset, load_rows, merge_sections, to_jsonable
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT", bound=FilePrompts | InMemoryPrompts, covariant=True)

SEED_STRIDE = 1_000_003  # between data sets that name no seed: none is a shifted copy of another


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are drawn from, or measured, together."""

    name: str  # in metrics
    prompts: Sequence[Prompt]  # those of files are made as they are asked for: iterate, rather than collect them

    @property
    def task_names(self) -> frozenset[str]:
        """The entries of `env` that its prompts need."""
        if isinstance(self.prompts, Blend):
            return self.prompts.task_names
        return frozenset(prompt.task_name for prompt in self.prompts)

    @property
    def agent_names(self) -> frozenset[str]:
        """The agents of NeMo Gym that its prompts need."""
        if isinstance(self.prompts, Blend):
            return self.prompts.agent_names
        return frozenset(prompt.agent_name for prompt in self.prompts if prompt.agent_name)


def load_datasets(config: DataConfig, run_seed: int) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """The training blend, named "train", and the validation sets.

    A set that names no seed gets one derived from `run_seed` and its place, the first training set `run_seed` itself.
    With `config.disjoint`, training prompts whose messages occur in a validation set are left out; of NeMo Gym's rows,
    those that are rows of a validation set.
    """
    train_sections, validation_sections = as_list(config.train), as_list(config.validation)
    seeds = (run_seed + SEED_STRIDE * index for index in range(len(train_sections) + len(validation_sections)))
    train = load_dataset_sections(train_sections, config.default, seeds, "data.train", _load_part)
    held_out = load_dataset_sections(validation_sections, config.default, seeds, "data.validation", _load_part)
    held_parts = [part for loaded in held_out for part in loaded.parts]
    train_parts = [part for loaded in train for part in loaded.parts]
    repeated = _find_held_out(train_parts, held_parts) if config.disjoint else frozenset()
    return PromptSet("train", Blend.of(train_parts, without=repeated)), tuple(
        PromptSet(loaded.name, Blend.of(loaded.parts)) for loaded in held_out
    )


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


def as_list(sections: DatasetConfig | list[DatasetConfig] | None) -> list[DatasetConfig]:
    if sections is None:
        return []
    return sections if isinstance(sections, list) else [sections]


class LoadPart(Protocol[PartT]):
    """Loads one set; `key` is its place in the configuration."""

    def __call__(self, section: DatasetConfig, name: str, *, seed: int, key: str) -> PartT: ...


@dataclass(frozen=True, slots=True)
class LoadedDataset(Generic[PartT]):
    """One set of the configuration; a set that is repeated has its part several times."""

    name: str
    parts: list[PartT]


def load_dataset_sections(
    sections: Sequence[DatasetConfig],
    default: DatasetConfig,
    seeds: Iterator[int],
    key: str,
    load_part: LoadPart[PartT],
) -> list[LoadedDataset[PartT]]:
    names: set[str] = set()
    loaded = []
    for index, own in enumerate(sections):
        section_key = key if len(sections) == 1 else f"{key}[{index}]"
        section = merge_sections(
            default, apply_preset(merge_sections(DatasetConfig(dataset_name=default.dataset_name), own))
        )
        seed = next(seeds)
        name = make_unique_name(section.name or str(section.dataset_name), names)
        names.add(name)
        part = load_part(section, name, seed=seed if section.seed is None else section.seed, key=section_key)
        logger.info("%s: %d prompts of %s", section_key, len(part), name)
        loaded.append(LoadedDataset(name, [part] * (section.repeat or 1)))
    return loaded


def _load_part(section: DatasetConfig, name: str, *, seed: int, key: str) -> FilePrompts | InMemoryPrompts:
    """One set's prompts; those of NeMo Gym, whose files are large, stay in their file."""
    if section.dataset_name == NEMO_GYM:
        return open_nemo_gym_prompts(section, name, key=key)
    rows = load_rows(section, seed=seed, key=key)
    prompts = [replace(prompt, dataset=name) for prompt in make_prompts(rows, section, key=key)]
    return InMemoryPrompts(prompts, [prompt_digest(prompt) for prompt in prompts])


def make_unique_name(name: str, taken: set[str]) -> str:
    """The name, or the first of name_2, name_3, ... that is free."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _find_held_out(
    parts: Sequence[FilePrompts | InMemoryPrompts], held_out: Sequence[FilePrompts | InMemoryPrompts]
) -> frozenset[int]:
    """Places in the blend of `parts` of what is validated on."""
    rows = {digest for part in held_out if isinstance(part, FilePrompts) for digest in part.digests}
    asked = {prompt.messages for part in held_out if isinstance(part, InMemoryPrompts) for prompt in part.prompts}
    repeated, start = [], 0
    for part in parts:
        if isinstance(part, FilePrompts):
            repeated += [start + index for index, digest in enumerate(part.digests) if digest in rows]
        else:
            repeated += [start + index for index, prompt in enumerate(part.prompts) if prompt.messages in asked]
        start += len(part)
    if len(repeated) == start:
        raise ConfigError("data.disjoint", True, "every training prompt occurs in a validation set")
    if repeated:
        logger.info("%d of %d training prompts are left out: they are validated on", len(repeated), start)
    return frozenset(repeated)


def prompt_digest(prompt: Prompt) -> int:
    """Of what a prompt asks and carries."""
    messages = [(m.role, m.content, [(c.id, c.name, c.arguments) for c in m.tool_calls]) for m in prompt.messages]
    content = [prompt.task_name, messages, to_jsonable(dict(prompt.env_state)), to_jsonable(list(prompt.tools))]
    return int(hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16], 16)


@dataclass(frozen=True, slots=True)
class InputSet:
    """Prompts in the order of their tasks."""

    prompts: Blend
    parts: Sequence[FilePrompts]

    def rows(self) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Every prompt with its row, as the data set has it; one is held at a time."""
        read = chain.from_iterable(part.read_rows(range(len(part))) for part in self.parts)
        for prompt_id, (prompt, row) in zip(self.prompts.prompt_ids(), read, strict=False):  # ends with the prompts
            yield replace(prompt, prompt_id=prompt_id), to_jsonable(row)


def load_input(config: InputDataConfig, limit: int | None = None) -> InputSet:
    """The sets one behind the other, `limit` prompts at most. Rows of files stay in them; each is read once here.

    Prompts have the ids that they have in training. Raises ConfigError for a set, DataError for a row that cannot be
    read.
    """
    sections = as_list(config.input)
    seeds = (config.seed + SEED_STRIDE * place for place in range(len(sections)))
    loaded = load_dataset_sections(sections, config.default, seeds, "data.input", _load_part_of_input)
    parts = [part for one in loaded for part in one.parts]
    return InputSet(Blend.of(parts)[:limit], parts)


def _load_part_of_input(section: DatasetConfig, name: str, *, seed: int, key: str) -> FilePrompts:
    """One set; what is no file is held as rows."""
    if section.dataset_name == NEMO_GYM:
        return open_nemo_gym_prompts(
            section, section.name or "", key=key
        )  # a blend of agents is measured agent by agent
    make_prompt = make_prompt_maker(section, key=key)
    if section.dataset_name == "jsonl" and section.data_path is not None:
        rows = RowFile(Path(section.data_path), limit=section.size)
    else:
        rows = InMemoryRows(f"{key} ({section.dataset_name})", load_rows(section, seed=seed, key=key))
    if not len(rows):
        raise DataError(f"{key}: {section.data_path} has no rows")
    return FilePrompts(rows, lambda row: replace(make_prompt(row), dataset=name), digest=prompt_digest)
