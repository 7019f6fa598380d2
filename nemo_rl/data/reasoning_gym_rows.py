"""Dataset `reasoning_gym`: generated rows of its tasks, and the check of rows that come from elsewhere."""

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.data.rows import Row, to_jsonable
from nemo_rl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

DEFAULT_GENERATED_ROWS = 500
NUM_SAMPLES = 8  # generated rows of a task that its other rows are compared with
METADATA = "metadata."
JSON_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def _check_section(key: str, section: DatasetConfig, config: Any) -> None:
    if section.task is None:
        raise ConfigError(f"{key}.task", None, "required by dataset_name: reasoning_gym")
    if section.data_path not in (None, config.data.default.data_path):
        problem = "dataset_name: reasoning_gym generates its rows; allowed: null, or another dataset_name"
        raise ConfigError(f"{key}.data_path", section.data_path, problem)


def _generate_rows(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Return rows `{"task", "entry"}` of a reasoning_gym task: `size` are generated, and repeated questions dropped.

    Row i is drawn from seed + i, so near seeds give shifted copies of the same questions, and far ones still overlap
    by chance: `datasets.load_prompt_sets` drops the validation datasets' questions from training.
    """
    import reasoning_gym as library  # imports a hundred tasks

    if section.task not in library.factory.DATASETS:
        raise ConfigError("task", section.task, "unknown task", known=library.factory.DATASETS)
    size = section.size or DEFAULT_GENERATED_ROWS
    try:
        generated = library.create_dataset(section.task, size=size, seed=seed, **section.task_kwargs)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError("task_kwargs", section.task_kwargs, str(error)) from error
    unique: dict[str, Row] = {}
    for index in range(size):
        entry = generated[index]
        unique.setdefault(entry["question"], {"task": section.task, "entry": to_jsonable(entry)})
    if len(unique) < size:
        logger.info("%s: %d of %d generated questions are distinct", section.task, len(unique), size)
    return unique.values()


REASONING_GYM = DatasetEntry(DatasetConfig, make=_generate_rows, check=_check_section, env_name="reasoning_gym")


def check_entry(task: Any, entry: Any) -> None:
    """Raise DataError unless an entry has what generated ones of its task have: the fields, and their kinds.

    A mixture's entry ("composite") is one of the task that its metadata name.
    """
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metadata"), Mapping):
        raise DataError(f"entry = {entry!r:.80}: must be an object with question, answer and metadata")
    metadata = entry["metadata"]
    if task == "composite":
        task = metadata.get("source_dataset")
    kinds = {"question": {"text"}, "answer": {"text"}} | _metadata_kinds(str(task))
    for name, allowed in kinds.items():
        fields = metadata if name.startswith(METADATA) else entry
        field = name.removeprefix(METADATA)
        if field not in fields:
            raise DataError(f"entry.{name} is missing, which every entry of task {task!r} has")
        kind = JSON_KINDS.get(type(fields[field]))
        if kind is not None and kind not in allowed:
            value = f"{fields[field]!r:.80}"
            raise DataError(f"entry.{name} = {value} is {kind}; in task {task!r} it is {' or '.join(sorted(allowed))}")


@cache
def _metadata_kinds(task: str) -> dict[str, set[str]]:
    """Return the kinds of the metadata that all generated entries of a task have; null counts as any."""
    import reasoning_gym as library

    if task not in library.factory.DATASETS or task == "composite":
        names = ", ".join(sorted(library.factory.DATASETS))
        raise DataError(f"task = {task!r:.80}: no task of reasoning_gym; known: {names}")
    generated = library.create_dataset(task, size=NUM_SAMPLES, seed=0)
    samples = [to_jsonable(generated[index])["metadata"] for index in range(NUM_SAMPLES)]
    kinds = {}
    for name in set.intersection(*map(set, samples)):
        found = {JSON_KINDS.get(type(sample[name])) for sample in samples}
        if len(found) == 1 and None not in found:
            kinds[METADATA + name] = {str(kind) for kind in found}
    return kinds
