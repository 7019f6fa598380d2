"""`data.input`: the whole input of a collection, whose rows are read as their turn comes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_rl.config.data import DatasetConfig, InputDataConfig
from nemo_rl.data.blend import Blend, FilePrompts
from nemo_rl.data.datasets import SEED_STRIDE, as_list, load_dataset_sections, prompt_digest
from nemo_rl.data.nemo_gym import NEMO_GYM, open_nemo_gym_prompts
from nemo_rl.data.processors import make_prompt_maker
from nemo_rl.data.row_file import InMemoryRows, RowFile
from nemo_rl.data.sources import load_rows, to_jsonable
from nemo_rl.errors import DataError
from nemo_rl.types import Prompt


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
    loaded = load_dataset_sections(sections, config.default, seeds, "data.input", _load_part)
    parts = [part for one in loaded for part in one.parts]
    return InputSet(Blend.of(parts)[:limit], parts)


def _load_part(section: DatasetConfig, name: str, *, seed: int, key: str) -> FilePrompts:
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
