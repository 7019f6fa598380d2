"""Where rows come from: files, the Hugging Face hub, generators; one function a kind, found by `dataset_name`."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.registry import find_registered
from nemo_rl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's JSON objects in order; blank lines are skipped.

    Raises DataError naming file:line for a line that is no JSON object, and naming the file when it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_object(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason}") from error


def encode_json_line(values: Mapping[str, Any], *, allow_nan: bool = True) -> bytes:
    """`values` as one line of UTF-8 with its newline.

    Half a surrogate pair, which a message may hold and UTF-8 cannot, stands as its JSON escape: Python's json reads it
    back as it was, while stricter readers (orjson) refuse such a line. ValueError without `allow_nan` for NaN.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=allow_nan)
    return (text + "\n").encode("utf-8", errors="backslashreplace")  # only surrogates cannot be encoded


def _parse_object(line: str, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{location}: no valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise DataError(f"{location}: a JSON object was expected, not {type(row).__name__}")
    return row


Row: TypeAlias = Mapping[str, Any]
RowSource: TypeAlias = Callable[[DatasetConfig, int], Iterable[Row]]  # (section, seed) -> rows
SourceT = TypeVar("SourceT", bound=RowSource)

SOURCES: dict[str, RowSource] = {}

# Data sets known by name: what their section says where the recipe does not.
PRESETS: dict[str, DatasetConfig] = {
    "OpenMathInstruct-2": DatasetConfig(
        data_path="nvidia/OpenMathInstruct-2", split="train_1M", input_key="problem", output_key="expected_answer"
    ),
    "DeepScaleR": DatasetConfig(
        data_path="agentica-org/DeepScaleR-Preview-Dataset", split="train", input_key="problem", output_key="answer"
    ),
    "AIME2024": DatasetConfig(
        data_path="HuggingFaceH4/aime_2024", split="train", input_key="problem", output_key="answer"
    ),
    "gsm8k": DatasetConfig(
        data_path="openai/gsm8k",
        subset="main",
        split="train",
        input_key="question",
        output_key="answer",
        processor="final_answer",
    ),
}


def register_dataset(name: str) -> Callable[[SourceT], SourceT]:
    """Make a function `(section, seed) -> rows` known to recipes as `dataset_name: <name>`."""

    def add(source: SourceT) -> SourceT:
        SOURCES[name] = source
        return source

    return add


def apply_preset(section: DatasetConfig) -> DatasetConfig:
    """The section with what is known of its data set; its own keys win."""
    preset = PRESETS.get(section.dataset_name or "")
    return section if preset is None else merge_sections(preset, section)


def merge_sections(base: DatasetConfig, section: DatasetConfig) -> DatasetConfig:
    """`section`, with the values of `base` for every key that it does not set."""
    own = {key: getattr(section, key) for key in section.model_fields_set if getattr(section, key) is not None}
    inherited = {key: getattr(base, key) for key in base.model_fields_set}
    return DatasetConfig(**{**inherited, **own})


def load_rows(section: DatasetConfig, *, seed: int, key: str) -> list[Row]:
    """All rows of one data set, `section.size` at most; `key` is its place in the configuration, for errors."""
    name, known = section.dataset_name, SOURCES | dict.fromkeys(PRESETS, huggingface)
    if name is None:
        raise ConfigError(f"{key}.dataset_name", None, "is missing", known=known)
    source = find_registered(name, known, key=f"{key}.dataset_name")
    try:
        rows = list(islice(source(section, seed), section.size))
    except ConfigError as error:  # a source knows its own keys, not where they stand
        raise error.under(key) from error
    if not rows:
        raise DataError(f"{key}: the data set {name!r} has no rows")
    return rows


@register_dataset("jsonl")
def jsonl(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """The objects of a JSON Lines file, `data_path`."""
    if section.data_path is None:
        raise ConfigError("data_path", None, "a data set of kind jsonl needs a file")
    return read_jsonl(Path(section.data_path))


@register_dataset("huggingface")
def huggingface(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """The rows of a hub data set or of a local folder, `data_path`."""
    if section.data_path is None:
        raise ConfigError("data_path", None, "a data set of kind huggingface needs a hub name or a folder")
    import datasets  # takes a second, and most recipes do not need it

    try:
        loaded = datasets.load_dataset(section.data_path, section.subset, split=section.split or "train")
    except Exception as error:  # the library raises its own, huggingface_hub's, requests' and the file system's errors
        raise DataError(f"{section.data_path}: cannot be loaded: {type(error).__name__}: {error}") from error
    return loaded  # type: ignore[return-value]


@register_dataset("reasoning_gym")
def reasoning_gym(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Rows `{"task", "entry"}` of a reasoning_gym task: `size` are generated, and repeated questions dropped.

    Row i is drawn from seed + i, so near seeds give shifted copies of the same questions, and far ones still overlap
    by chance: the validation sets' questions are taken out of training by `datasets.load_datasets`.
    """
    import reasoning_gym as library  # imports a hundred tasks

    if section.task is None:
        raise ConfigError("task", None, "a data set of kind reasoning_gym needs the name of a task")
    if section.task not in library.factory.DATASETS:
        raise ConfigError("task", section.task, "unknown task", known=library.factory.DATASETS)
    size = section.size or 500
    try:
        generated = library.create_dataset(section.task, size=size, seed=seed, **section.task_kwargs)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError("task_kwargs", section.task_kwargs, str(error)) from error
    unique = {}
    for index in range(size):
        entry = generated[index]
        unique.setdefault(entry["question"], {"task": section.task, "entry": to_jsonable(entry)})
    if len(unique) < size:
        logger.info("%s: %d of %d generated questions are distinct", section.task, len(unique), size)
    return unique.values()


def to_jsonable(value: Any) -> Any:
    """The value itself where JSON can hold it; else a copy whose foreign parts are numbers or text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return json.loads(json.dumps(_stringify_keys(value), default=_jsonable_default))
    return value


def _stringify_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _stringify_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stringify_keys(item) for item in value]
    return value


def _jsonable_default(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)  # numpy's arrays and numbers
    return str(value) if to_list is None else to_list()
