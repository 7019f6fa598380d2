"""Built-in kinds of datasets that read files or the Hugging Face hub: what each requires, its rows, and hub names.

A named entry's rows, with NeMo-RL's spellings, are made `input` and `output`, or `messages`; `data_path` may name a
directory with files of the same schema. Loaded with the configuration, so large libraries are imported when rows are.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_rl.config.data import JSON_LINES, TABLE_FORMATS, DatasetConfig, DatasetEntry, check_file, find_dataset
from nemo_rl.data.rows import Row, RowFile, Rows, read_jsonl
from nemo_rl.data.table_rows import Table, TableRows
from nemo_rl.errors import ConfigError, DataError

SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # files of directories that `save_to_disk` writes
FIELD_PROCESSORS = (None, "question_answer", "final_answer")  # with `input_key` they read no other field than two


def load_rows(section: DatasetConfig, *, seed: int, key: str, are_pairs: bool = False) -> list[Row]:
    """Return all rows of a resolved dataset, at most `section.size`; `key` is its configuration key, for errors.

    With `are_pairs`, rows of preference pairs, if the dataset has them apart.
    """
    name = section.dataset_name or ""
    entry = find_dataset(name, key=f"{key}.dataset_name")
    make = entry.make_pairs if are_pairs and entry.make_pairs is not None else entry.make
    try:
        rows = list(islice(make(section, seed), section.size))
    except ConfigError as error:  # a dataset knows its own keys, not their full paths
        raise error.under(key) from error
    if not rows:
        raise DataError(f"{key}: the dataset {name!r} has no rows")
    return rows


def open_rows(entry: DatasetEntry, section: DatasetConfig, *, seed: int, key: str) -> Rows | None:
    """Return a resolved dataset's rows as they are in its files; None if it has none, since it makes its rows.

    Raises as `load_rows`, except for a row that cannot be read.
    """
    if entry.reads_lines:
        return RowFile(Path(require_data_path(section, f"{key}.data_path")), limit=section.size)
    if not entry.reads_tables:
        return None
    try:
        table = entry.make(section, seed)
    except ConfigError as error:
        raise error.under(key) from error
    assert isinstance(table, Table)
    fields = (section.input_key, section.output_key)
    has_fields = all(set(fields) <= set(part.column_names) for part in table.parts)
    reads_fields = section.processor in FIELD_PROCESSORS and table.convert is None and has_fields
    return TableRows(table, limit=section.size, fields=[field for field in fields if field and reads_fields])


def adapt_dataset(key: str, path: str, target: Any) -> DatasetEntry:
    """Return an entry for a user's function `(section, seed) -> rows`; raises ConfigError for anything else."""
    if not callable(target):
        raise ConfigError(key, path, f"must be a function (section, seed) -> rows, not {type(target).__name__}")
    return DatasetEntry(DatasetConfig, make=target)


def check_data_file(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` names an existing file whose ending is one of JSON Lines, or of no table."""
    path = _check_path(key, section)
    if Path(path).suffix.lower() in TABLE_FORMATS.keys() - {".json"}:
        raise ConfigError(
            f"{key}.dataset_name", section.dataset_name, f"{path} is no file of JSON Lines; allowed: file"
        )


def check_table_file(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` names an existing file of a known format."""
    _table_format(_check_path(key, section), f"{key}.data_path")


def _check_path(key: str, section: DatasetConfig) -> str:
    """Return `data_path`; raises ConfigError unless it names an existing file, of which all rows are wanted."""
    path = require_data_path(section, f"{key}.data_path")
    check_file(f"{key}.data_path", path)
    if section.split not in (None, "train"):
        raise ConfigError(f"{key}.split", section.split, f"{path} is a file without splits; allowed: null, train")
    return path


def require_data_path(section: DatasetConfig, key: str = "data_path") -> str:
    """Return `data_path`; raises ConfigError for `key` if it is not set."""
    if section.data_path is None:
        raise ConfigError(key, None, f"required by dataset_name: {section.dataset_name}")
    return section.data_path


def require_path_of(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` is set."""
    require_data_path(section, f"{key}.data_path")


def _load_jsonl(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Yield the objects of a JSON Lines file, `data_path`."""
    return read_jsonl(Path(require_data_path(section)))


def _load_huggingface(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Return the rows of a hub dataset or of a local directory, `data_path`."""
    return load_hub_rows(section, section.subset)


def load_hub_rows(section: DatasetConfig, subset: str | None, **options: Any) -> Table:
    """Return the rows of one subset of a hub dataset, or of a local directory, which has no subsets."""
    import datasets  # takes a second, and most recipes do not need it

    path = require_data_path(section)
    if any((Path(path) / name).is_file() for name in SAVED_TO_DISK):
        return _load_saved(path, section.split)
    try:
        subset = None if Path(path).is_dir() else subset
        loaded: Any = datasets.load_dataset(path, subset, split=section.split or "train", **options)
    except Exception as error:  # the library raises its own, huggingface_hub's, requests' and the file system's errors
        raise DataError(f"{section.data_path}: cannot be loaded: {type(error).__name__}: {error}") from error
    return Table(path, (_keep_files(loaded),))


def _keep_files(loaded: Any) -> Any:
    """Return a dataset whose images stay files, which data/images.py checks before it decodes them."""
    has_images = any(map(_is_image, loaded.features.values()))
    return loaded.with_format("arrow") if has_images else loaded


def _is_image(feature: Any) -> bool:
    """Return whether a feature of the datasets library is or holds an image."""
    import datasets

    if hasattr(feature, "feature"):  # a Sequence, a List
        return _is_image(feature.feature)
    if isinstance(feature, dict | list):
        return any(map(_is_image, feature.values() if isinstance(feature, dict) else feature))
    return isinstance(feature, datasets.Image)


def _load_saved(path: str, split: str | None) -> Table:
    """Return the rows of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(path)
    except Exception as error:  # the library raises its own, pyarrow's and the file system's errors
        raise DataError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(loaded, dict):
        name = split or "train"
        if name not in loaded:
            raise ConfigError("split", split, f"{path} has no split {name!r}", known=loaded)
        loaded = loaded[name]
    elif split is not None:
        raise ConfigError("split", split, f"{path} is a single dataset without splits; allowed: null")
    return Table(path, (_keep_files(loaded),))


def _table_format(path: str, key: str = "data_path") -> str:
    """Return the loader of a file by its ending; raises ConfigError for `key` for any other."""
    formats = TABLE_FORMATS | dict.fromkeys(JSON_LINES, "json")
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise ConfigError(key, path, f"its format is not known by its ending; allowed: {', '.join(formats)}")
    return formats[suffix]


def _load_file(section: DatasetConfig, seed: int) -> Table:
    """Return the rows of a file, `data_path`, whose format is known by its ending."""
    path = require_data_path(section)
    by_format = section.model_copy(update={"data_path": _table_format(path), "split": None})
    return replace(load_hub_rows(by_format, None, data_files=path), source=path)


def load_csv_rows(section: DatasetConfig) -> Table:
    """Return the rows of a file with a header line, `data_path`: a path or an address."""
    return load_hub_rows(section.model_copy(update={"data_path": "csv"}), None, data_files=require_data_path(section))


JSONL = DatasetEntry(DatasetConfig, make=_load_jsonl, check=check_data_file, reads_lines=True)
FILE = DatasetEntry(DatasetConfig, make=_load_file, check=check_table_file, reads_tables=True)
CSV = DatasetEntry(
    DatasetConfig, make=lambda section, seed: load_csv_rows(section), check=require_path_of, reads_tables=True
)
HUGGINGFACE = DatasetEntry(DatasetConfig, make=_load_huggingface, check=require_path_of, reads_tables=True)
