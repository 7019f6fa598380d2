"""Built-in datasets except nemo_gym: what each `dataset_name` requires, and where its rows come from.

An entry's rows are made into prompts by a processor (processors.py); datasets.py loads them. Loaded with the
configuration, so large libraries are imported when rows are.
"""

import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_rl.config.data import NO_DEFAULTS, DatasetConfig, DatasetEntry, check_file, find_dataset
from nemo_rl.data.rows import Row, read_jsonl, to_jsonable
from nemo_rl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

DEFAULT_GENERATED_ROWS = 500


def load_rows(section: DatasetConfig, *, seed: int, key: str) -> list[Row]:
    """Return all rows of a resolved dataset, at most `section.size`; `key` is its configuration key, for errors."""
    name = section.dataset_name or ""
    entry = find_dataset(name, key=f"{key}.dataset_name")
    try:
        rows = list(islice(entry.make(section, seed), section.size))
    except ConfigError as error:  # a dataset knows its own keys, not where they stand
        raise error.under(key) from error
    if not rows:
        raise DataError(f"{key}: the dataset {name!r} has no rows")
    return rows


def adapt_dataset(key: str, path: str, target: Any) -> DatasetEntry:
    """Return an entry for a user's function `(section, seed) -> rows`; raises ConfigError for anything else."""
    if not callable(target):
        raise ConfigError(key, path, f"must be a function (section, seed) -> rows, not {type(target).__name__}")
    return DatasetEntry(DatasetConfig, make=target)


def check_data_file(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` names an existing file."""
    check_file(f"{key}.data_path", require_data_path(section, f"{key}.data_path"))


def require_data_path(section: DatasetConfig, key: str = "data_path") -> str:
    """Return `data_path`; raises ConfigError for `key` where it is not set."""
    if section.data_path is None:
        raise ConfigError(key, None, f"required by dataset_name: {section.dataset_name}")
    return section.data_path


def _check_data_path(key: str, section: DatasetConfig, config: Any) -> None:
    require_data_path(section, f"{key}.data_path")


def _check_reasoning_gym(key: str, section: DatasetConfig, config: Any) -> None:
    if section.task is None:
        raise ConfigError(f"{key}.task", None, "required by dataset_name: reasoning_gym")
    if section.data_path not in (None, config.data.default.data_path):
        problem = "dataset_name: reasoning_gym generates its rows; allowed: null, or another dataset_name"
        raise ConfigError(f"{key}.data_path", section.data_path, problem)


def _load_jsonl(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Yield the objects of a JSON Lines file, `data_path`."""
    return read_jsonl(Path(require_data_path(section)))


def _load_huggingface(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Return the rows of a hub dataset or of a local directory, `data_path`."""
    import datasets  # takes a second, and most recipes do not need it

    path = require_data_path(section)
    try:
        loaded = datasets.load_dataset(path, section.subset, split=section.split or "train")
    except Exception as error:  # the library raises its own, huggingface_hub's, requests' and the file system's errors
        raise DataError(f"{section.data_path}: cannot be loaded: {type(error).__name__}: {error}") from error
    return loaded  # type: ignore[return-value]


def _generate_reasoning_gym(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Return rows `{"task", "entry"}` of a reasoning_gym task: `size` are generated, and repeated questions dropped.

    Row i is drawn from seed + i, so near seeds give shifted copies of the same questions, and far ones still overlap
    by chance: `datasets.load_datasets` drops the validation datasets' questions from training.
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


def _hub_dataset(sft_defaults: DatasetConfig = NO_DEFAULTS, **values: Any) -> DatasetEntry:
    """Return the entry of a known dataset on the Hugging Face hub; `values` are the keys of its section."""
    return DatasetEntry(
        DatasetConfig,
        make=_load_huggingface,
        check=_check_data_path,
        defaults=DatasetConfig(**values),
        sft_defaults=sft_defaults,
    )


JSONL = DatasetEntry(DatasetConfig, make=_load_jsonl, check=check_data_file, reads_lines=True)
HUGGINGFACE = DatasetEntry(DatasetConfig, make=_load_huggingface, check=_check_data_path)
REASONING_GYM = DatasetEntry(
    DatasetConfig, make=_generate_reasoning_gym, check=_check_reasoning_gym, env_name="reasoning_gym"
)
OPEN_MATH_INSTRUCT_2 = _hub_dataset(
    data_path="nvidia/OpenMathInstruct-2",
    split="train_1M",
    input_key="problem",
    output_key="expected_answer",
    sft_defaults=DatasetConfig(output_key="generated_solution"),
)
DEEP_SCALER = _hub_dataset(
    data_path="agentica-org/DeepScaleR-Preview-Dataset", split="train", input_key="problem", output_key="answer"
)
AIME_2024 = _hub_dataset(data_path="HuggingFaceH4/aime_2024", split="train", input_key="problem", output_key="answer")
GSM8K = _hub_dataset(
    data_path="openai/gsm8k",
    subset="main",
    split="train",
    input_key="question",
    output_key="answer",
    processor="final_answer",
)
TULU3_SFT_MIXTURE = _hub_dataset(data_path="allenai/tulu-3-sft-mixture", split="train")
