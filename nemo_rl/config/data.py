"""`data`: the datasets of training and validation, or those of a collection.

All datasets share one section, since `data.default` holds keys for every dataset whatever its entry; what an entry
requires and knows is in its `DatasetEntry`: data/row_sources.py, public_datasets.py, reasoning_gym_rows.py,
nemo_gym_dataset.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from nemo_rl.config.images import ImagesConfig
from nemo_rl.config.kinds import Entry, Section
from nemo_rl.config.registries import DATASETS
from nemo_rl.config.value_types import Copies, Seed
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_prompt

Overlong: TypeAlias = Literal["mask", "drop", "refuse"]

JSON_LINES = (".jsonl", ".ndjson")  # endings of files of JSON Lines
TABLE_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json"}  # loaders of datasets


class DatasetConfig(Section):
    """One dataset; a key that is None is taken from what its entry knows, then from `data.default`."""

    dataset_name: str | None = None  # a built-in or registered entry, or a dotted path; None: by the end of data_path
    name: str | None = None  # its name in metrics; None: dataset_name, numbered if it is not unique
    data_path: str | None = None  # jsonl, file, nemo_gym: a file; huggingface: a hub name or a directory
    subset: str | None = None  # huggingface: the name of the dataset's configuration
    split: str | None = None  # huggingface; None: "train"
    # the field with the question, a text or a list of messages; None: "messages" or "prompt" if present, else "input"
    input_key: str | None = None
    output_key: str | None = None  # the field with the answer; None: "output"
    chosen_key: str | None = None  # preference pairs: the field with the preferred answer; None: "chosen"
    rejected_key: str | None = None  # preference pairs: the field with the other answer; None: "rejected"
    task: str | None = None  # reasoning_gym: the name of the task
    task_kwargs: dict[str, Any] = Field(default_factory=dict)  # reasoning_gym: options of the task
    kwargs: dict[str, Any] = Field(default_factory=dict)  # options of a dataset of your own
    size: int | None = Field(default=None, gt=0)  # maximum number of rows (reasoning_gym: rows generated)
    # Rows held out of a training dataset as a validation set: a share below 1, or a number of rows.
    split_validation_size: float | None = Field(default=None, ge=0)
    repeat: Copies | None = None  # copies of the dataset in its blend; None: one
    seed: Seed | None = None  # seeds generated rows; None: from grpo.seed and the dataset's index
    agent_name: str | None = None  # nemo_gym: the agent of rows that name none
    env_name: str | None = None  # a key of `env`; None: the environment that the entry names
    processor: str | None = None  # a built-in or registered name, or a dotted path; None: by the row's shape
    prompt_file: str | None = None  # text with {} in the place of the question
    system_prompt_file: str | None = None  # text of a system message before each question; None: none
    images: ImagesConfig | None = None  # allows images in rows, {} with default limits; None: images are refused


NO_DEFAULTS = DatasetConfig.with_defaults()


@dataclass(frozen=True, slots=True)
class DatasetEntry(Entry[DatasetConfig]):
    """A dataset that `dataset_name` may name; `make(section, seed)` returns its rows."""

    env_name: str = "math"  # the environment of its prompts if the section names none
    defaults: DatasetConfig = NO_DEFAULTS  # values of its section, below the recipe's own and above `data.default`
    sft_defaults: DatasetConfig = NO_DEFAULTS  # defaults of supervised training, above `defaults`
    reads_lines: bool = False  # its rows are the lines of `data_path`, which can stay in the file
    reads_tables: bool = False  # `make` returns a data.table_rows.Table, whose rows can stay in their files
    has_choices: bool = False  # questions with lettered options; a prompt without {} comes before them
    make_pairs: Callable[[DatasetConfig, int], Iterable[Any]] | None = None  # rows of pairs; None: those of `make`
    open_prompts: Callable[..., Any] | None = None  # (section, name, key=...): lazy prompts; None: the processor's


class BaseDataConfig(Section):
    """Keys that every choice of datasets has."""

    dataset_fields: ClassVar[tuple[str, ...]]

    max_input_seq_length: int | None = Field(default=None, gt=0)  # tokens of a prompt; None: room for one new token
    default: DatasetConfig = DatasetConfig.with_defaults()

    @property
    def datasets(self) -> Iterator[tuple[str, DatasetConfig]]:
        """Yield every dataset with its key, in the order of the fields."""
        for field in self.dataset_fields:
            yield from self.datasets_of(field)

    def datasets_of(self, field: str) -> list[tuple[str, DatasetConfig]]:
        """Return the datasets of one field, each with its key: `data.train`, or `data.train.0` in a list."""
        value = getattr(self, field)
        if isinstance(value, list):
            return [(f"data.{field}.{index}", section) for index, section in enumerate(value)]
        return [] if value is None else [(f"data.{field}", value)]


class DataConfig(BaseDataConfig):
    """The datasets of a training run."""

    dataset_fields: ClassVar[tuple[str, ...]] = ("train", "validation")

    shuffle: bool = True  # draw the training prompts in a new order each epoch
    # Training prompts above max_input_seq_length. drop: the next prompt takes its place; mask: it keeps its place in
    # the step, with no weight in the loss (NeMo-RL); refuse: all prompts are rendered at start, and one ends the run.
    overlong: Overlong = "drop"
    disjoint: bool = True  # drop training prompts that occur in a validation dataset
    train: DatasetConfig | list[DatasetConfig]
    # Rollouts: prompts of each training dataset in turn, e.g. [24, 8], whatever their sizes; null: they are one set.
    train_mix: list[Annotated[int, Field(gt=0)]] | None = None
    validation: DatasetConfig | list[DatasetConfig] | None = None

    @property
    def validates(self) -> bool:
        """Return whether there is any validation set: one of its own, or one split off a training dataset."""
        splits = (
            one.split_validation_size or self.default.split_validation_size for _, one in self.datasets_of("train")
        )
        return self.validation is not None or any(splits)


class InputDataConfig(BaseDataConfig):
    """The datasets of a collection."""

    dataset_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: DatasetConfig | list[DatasetConfig]  # concatenated: a task's index counts over all datasets
    # Prompts above max_input_seq_length. mask: never sampled, and wrong answers in every score; drop: excluded, and
    # counted beside the scores; refuse: one ends the collection.
    overlong: Overlong = "mask"
    seed: Seed = 42  # seeds generated rows of datasets without a seed


def find_dataset(name: str, *, key: str) -> DatasetEntry:
    """Return the dataset entry called `name`; raises ConfigError for `key` if there is none."""
    entry = DATASETS.entry(name, key=key)
    return entry if isinstance(entry, DatasetEntry) else DatasetEntry(entry.section, entry.make, entry.check)


def resolve_dataset(
    own: DatasetConfig, default: DatasetConfig, *, key: str, supervised: bool = False
) -> tuple[DatasetEntry, DatasetConfig]:
    """Return a dataset's entry and its full section: its own keys over what the entry knows over `data.default`.

    Raises ConfigError if no dataset, or an unknown one, is named.
    """
    name = own.dataset_name or default.dataset_name or infer_dataset_name(own.data_path)
    if name is None:
        raise ConfigError(f"{key}.dataset_name", None, "required", known=DATASETS.names)
    entry = find_dataset(name, key=f"{key}.dataset_name")
    layers = (default, entry.defaults, *((entry.sft_defaults,) if supervised else ()), own)
    values: dict[str, Any] = {}
    for layer in layers:
        set_values = {field: getattr(layer, field) for field in layer.model_fields_set}
        values |= {field: value for field, value in set_values.items() if value is not None}
    return entry, DatasetConfig(**{**values, "dataset_name": name})


def infer_dataset_name(data_path: str | None) -> str | None:
    """Return the entry that reads a path: by its ending, or "huggingface" for a directory or a name on the hub.

    Example: "rows.parquet" is "file", "org/rows" is "huggingface"
    """
    if data_path is None:
        return None
    suffix = Path(data_path).suffix.lower()
    if suffix in JSON_LINES:
        return "jsonl"
    return "file" if suffix in TABLE_FORMATS else "huggingface"


def make_unique_name(name: str, taken: Collection[str]) -> str:
    """Return the name, or the first of name_2, name_3, ... that is free."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def name_validation_sets(config: DataConfig) -> list[str]:
    """Return the validation sets' names in metrics; sets split off training datasets come last.

    Raises ConfigError for a dataset that does not exist.
    """
    found: list[str] = []
    for field in ("validation", "train"):
        names: list[str] = []
        for key, own in config.datasets_of(field):
            section = resolve_dataset(own, config.default, key=key)[1]
            names.append(make_unique_name(section.name or str(section.dataset_name), names))
            if field == "validation" or section.split_validation_size:
                found.append(make_unique_name(names[-1], found))
    return found


def check_prompt_file(key: str, name: str | None) -> None:
    """Raise ConfigError for a prompt that is no file and not packaged; None is accepted."""
    check_file(key, name if name is None else str(find_prompt(name)))


def check_file(key: str, path: str | None) -> None:
    """Raise ConfigError for a file that does not exist; None is accepted."""
    if path is not None and not Path(path).is_file():
        raise ConfigError(key, path, f"no such file (from {Path.cwd()})")
