"""Datasets and processors of NeMo-RL's run scripts, as datasets of a run.

What a script's dataset returns is a `DatumSpec`, whose messages are rendered already, so the run's chat template passes
their text through: the policy reads the tokens that the script made.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nemo_rl.compat.data_sections import FOREVER, name_prompt
from nemo_rl.compat.data_types import DatumSpec, TaskDataSpec
from nemo_rl.compat.translation import PASS_THROUGH
from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.config.kinds import Entry
from nemo_rl.config.recipe_files import at
from nemo_rl.config.registries import DATASETS, PROCESSORS
from nemo_rl.data.processors import PLACEHOLDER, RowFormat
from nemo_rl.data.prompt_sets import check_split, split_rows
from nemo_rl.data.row_sources import load_rows
from nemo_rl.data.rows import Row
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_prompt
from nemo_rl.types import Message, Prompt

logger = logging.getLogger(__name__)

MAX_PROMPTS = 10_000  # read of a dataset that only iterates, which may have no end
TRAIN, VALIDATION = "script_train", "script_validation"  # entries of the datasets of a script
DataConfig = dict[str, Any]  # the section `data`
# Keys of `data` that are not the dataset's, and those of a dataset that a script reads itself.
DATA_KEYS = ("max_input_seq_length", "shuffle", "num_workers")
SCRIPT_KEYS = ("dataset_name", "env_name", "processor")
Processor = Callable[..., DatumSpec]  # (row, TaskDataSpec, tokenizer, max_seq_length, index)


class RecipeData:
    """Stands for the datasets that the recipe names."""


def setup_response_data(
    tokenizer: Any, data_config: Mapping[str, Any], env_configs: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Any, ...]:
    """Return training and validation data and, with `env_configs`, environments by task: all as the recipe has it."""
    return (RecipeData(), RecipeData()) if env_configs is None else (RecipeData(), RecipeData(), {}, {})


def check_origin(train: Any, validation: Any) -> None:
    """Raise ConfigError if one of the datasets is the recipe's and the other the script's own.

    The tokens of the script's are rendered already, so they need another chat template.
    """
    if validation is None or isinstance(train, RecipeData) == isinstance(validation, RecipeData):
        return
    key, field, own = "val_dataset", "validation", validation
    if isinstance(validation, RecipeData):
        key, field, own = "dataset", "train", train
    problem = f"cannot be used beside data of setup_response_data; write it as data.{field}, or make both in the script"
    raise ConfigError(key, type(own).__name__, problem)


class AllTaskProcessedDataset:
    """Rows with the processors that make them prompts, by task or one for all."""

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        default_task_data_spec: TaskDataSpec | None,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, Processor]] | Processor,
        task_data_preprocessors: Any = None,
        max_seq_length: int | None = None,
    ) -> None:
        self.dataset, self.tokenizer, self.max_seq_length = dataset, tokenizer, max_seq_length
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors, self.task_data_preprocessors = task_data_processors, task_data_preprocessors
        if isinstance(task_data_processors, Mapping) and default_task_data_spec is not None:
            for spec, _ in task_data_processors.values():
                spec.copy_defaults(default_task_data_spec)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        prepare = self.task_data_preprocessors
        if isinstance(prepare, Mapping):
            prepare = prepare.get(row["task_name"])
        row = row if prepare is None else prepare(row)
        if not isinstance(self.task_data_processors, Mapping):
            process, spec = self.task_data_processors, self.default_task_data_spec
        else:
            spec, process = self.task_data_processors[row["task_name"]]
        return process(row, spec, self.tokenizer, self.max_seq_length, idx)


class ResponseDataset:
    """Rows of a JSONL file, or of a dataset of the hub, as messages with a question and its answer.

    Both forms of NeMo-RL: `data_path` (since 0.6), with `dataset` and `val_dataset`, which `split_validation_size` may
    split off; `train_data_path` and `val_data_path` (to 0.5), with `formatted_ds`. `task_spec` has the prompts of
    `prompt_file` and `system_prompt_file`.
    """

    def __init__(
        self,
        data_path: str | None = None,
        val_data_path: str | None = None,
        input_key: str = "input",
        output_key: str = "output",
        train_split: str | None = None,
        val_split: str | None = None,
        *,
        train_data_path: str | None = None,
        subset: str | None = None,
        split: str | None = None,
        split_validation_size: float | None = None,
        seed: int | None = None,
        prompt_file: str | None = None,
        system_prompt_file: str | None = None,
    ) -> None:
        path = data_path or train_data_path
        if path is None:
            raise ConfigError("data_path", None, "ResponseDataset needs a file or a name of the hub")
        self.task_name = "-".join(path.split("/")[-2:]).split(".")[0].lstrip("-")
        keys = {"input_key": input_key, "output_key": output_key, "subset": subset}
        self.dataset = self._read(path, split=split or train_split, **keys)
        self.val_dataset = None if val_data_path is None else self._read(val_data_path, split=val_split, **keys)
        if split_validation_size:
            self._split(split_validation_size, 42 if seed is None else seed)  # NeMo-RL's default
        self.formatted_ds = {"train": self.dataset, "validation": self.val_dataset}
        files = [None if name is None else find_prompt(name_prompt(name)) for name in (prompt_file, system_prompt_file)]
        self.task_spec = TaskDataSpec(self.task_name, *files)

    def _split(self, size: float, seed: int) -> None:
        if self.val_dataset is not None:
            raise ConfigError("data.split_validation_size", size, "has no meaning with val_data_path")
        rows = self.dataset
        kept, held_out = split_rows(len(rows), size, seed)
        check_split("data", size, len(rows), len(held_out))
        self.dataset, self.val_dataset = ([rows[index] for index in part] for part in (kept, held_out))

    def _read(self, path: str, **keys: Any) -> list[Row]:
        name = "jsonl" if path.endswith((".jsonl", ".json")) else "huggingface"
        rows = load_rows(DatasetConfig(dataset_name=name, data_path=path, **keys), seed=0, key="data")
        found = (with_messages(row, keys["input_key"], keys["output_key"]) for row in rows)
        return [{**row, "task_name": self.task_name} for row in found]


def load_response_dataset(data_config: Mapping[str, Any], seed: int = 42) -> ResponseDataset:
    """Return a dataset of NeMo-RL's `data` section, or of one in `data.train`; `seed` is that of its split.

    Raises ConfigError for another name than ResponseDataset, and for a key that would not be read.
    """
    name = data_config.get("dataset_name")
    if name != "ResponseDataset":
        problem = "in a run script only ResponseDataset; setup_response_data reads any dataset of the recipe"
        raise ConfigError("data.dataset_name", name, problem)
    known = inspect.signature(ResponseDataset).parameters
    options: dict[str, Any] = {"seed": seed}
    for key, value in data_config.items():
        if key in known and value is not None:
            options[key] = value
        elif key not in (*known, *DATA_KEYS, *SCRIPT_KEYS) and value is not None:
            raise ConfigError(f"data.{key}", value, "unknown key of a ResponseDataset in a run script", known=known)
    return ResponseDataset(**options)


def with_messages(row: Row, input_key: str, output_key: str) -> Row:
    """Return a row whose question and answer are messages, as NeMo-RL's processors expect them."""
    if "messages" in row or input_key not in row:
        return row
    asked = {"role": "user", "content": row[input_key]}
    return {**row, "messages": [asked, {"role": "assistant", "content": row.get(output_key)}]}


def math_hf_data_processor(
    datum_dict: Row, task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int
) -> DatumSpec:
    """Return the prompt of messages with a question and its answer, which is the ground truth."""
    question, answer = (message["content"] for message in datum_dict["messages"][:2])
    return _ask(question, answer, datum_dict, task_data_spec, tokenizer, max_seq_length, idx)


def math_data_processor(
    datum_dict: Row, task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int
) -> DatumSpec:
    """Return the prompt of a row with `problem` and `expected_answer`."""
    question, answer = datum_dict["problem"], str(datum_dict["expected_answer"])
    return _ask(question, answer, datum_dict, task_data_spec, tokenizer, max_seq_length, idx)


def _ask(
    question: str, answer: str, row: Row, spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int
) -> DatumSpec:
    asked = question if spec.prompt is None else spec.prompt.format(question)
    system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
    messages = [*system, {"role": "user", "content": asked}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids}],
        "length": len(ids),
        "extra_env_info": {"ground_truth": answer},
        "loss_multiplier": float(max_seq_length is None or len(ids) <= max_seq_length),
        "idx": idx,
        "task_name": row.get("task_name", spec.task_name or ""),
    }


PROCESSOR_REGISTRY: dict[str, Processor] = {
    "math_hf_data_processor": math_hf_data_processor,
    "math_data_processor": math_data_processor,
}
_own_processors: set[str] = set()


def register_processor(processor_name: str, processor_function: Processor) -> None:
    """Make a processor known under a name, which `data.*.processor` may use; raises ValueError for a known name."""
    if processor_name in PROCESSOR_REGISTRY:
        raise ValueError(f"a processor named {processor_name!r} is registered already")
    PROCESSOR_REGISTRY[processor_name] = processor_function
    _own_processors.add(processor_name)


@contextmanager
def open_processors(recipe: dict[str, Any], tokenizer: Any) -> Iterator[None]:
    """Make the script's processors entries of the run while the block runs, if its recipe names one.

    Raises ConfigError if another dataset has none: they need different chat templates.
    """
    data = recipe.get("data") or {}
    sections = [one for field in ("train", "validation") for one in _as_list(data.get(field))]
    names = [one.get("processor") or at(data, ["default", "processor"]) for one in sections]
    if not _own_processors.intersection(names):
        yield
        return
    for name in names:
        if name not in PROCESSOR_REGISTRY:
            problem = "beside a processor of register_processor every dataset needs one"
            raise ConfigError("data.train.processor", name, problem, known=PROCESSOR_REGISTRY)
    _pass_text_through(recipe)
    with ExitStack() as stack:
        for name in set(names):
            make = _adapt_processor(PROCESSOR_REGISTRY[name], tokenizer, data.get("max_input_seq_length"))
            stack.enter_context(PROCESSORS.registered_for(name, Entry(DatasetConfig, make=make)))
        yield


def _adapt_processor(process: Processor, tokenizer: Any, max_length: int | None) -> Callable[[Row, RowFormat], Prompt]:
    def make(row: Row, row_format: RowFormat) -> Prompt:
        spec = TaskDataSpec(row_format.task_name)
        spec.prompt = None if row_format.prompt_text == PLACEHOLDER else row_format.prompt_text
        spec.system_prompt = row_format.system_prompt
        named = {"task_name": row_format.task_name, **with_messages(row, row_format.input_key, row_format.output_key)}
        return read_datum(process(named, spec, tokenizer, max_length, 0), tokenizer, row_format.task_name)

    return make


def _pass_text_through(recipe: dict[str, Any]) -> None:
    section = recipe["policy"].get("tokenizer") or {}
    recipe["policy"]["tokenizer"] = {**section, "chat_template": PASS_THROUGH}


def read_datum(datum: DatumSpec, tokenizer: Any, task_name: str) -> Prompt:
    """Return a prompt of the tokens of a `DatumSpec`, whose answer is also under the name of this project."""
    log: list[Any] = datum["message_log"]
    messages = tuple(Message(message["role"], _text_of(message, tokenizer)) for message in log)
    state = dict(datum.get("extra_env_info") or {})
    if "ground_truth" in state:
        state.setdefault("answer", state["ground_truth"])
    return Prompt("", task_name, messages, state)


def _text_of(message: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the text that has the message's tokens: its content, or else what they decode to."""
    text, ids = message["content"], message.get("token_ids")
    if ids is None:
        return text
    ids = [int(token) for token in ids]
    return text if tokenizer(text, add_special_tokens=False)["input_ids"] == ids else tokenizer.decode(ids)


@dataclass(frozen=True, slots=True)
class ScriptPrompts:
    """The prompts of a script's dataset."""

    prompts: list[Prompt]
    stop_strings: tuple[str, ...]  # stop strings of the first prompt's answer
    is_endless: bool = False  # it only iterates, and as many as were requested were read


@contextmanager
def open_datasets(recipe: dict[str, Any], tokenizer: Any, train: Any, validation: Any) -> Iterator[set[str]]:
    """Write a script's datasets into the recipe, as entries that exist while the block runs; yield the tasks."""
    grpo = recipe["grpo"]
    num_needed = min(grpo["num_prompts_per_step"] * grpo.get("max_num_steps", FOREVER), MAX_PROMPTS)
    found = {TRAIN: _read_all(train, tokenizer, num_needed)}
    if found[TRAIN].is_endless:
        grpo["max_num_epochs"] = FOREVER  # NeMo-RL ends such a run by its steps
    if validation is not None:
        num_needed = min(grpo.get("max_val_samples") or num_needed, MAX_PROMPTS)
        found[VALIDATION] = _read_all(validation, tokenizer, num_needed)
    else:
        (recipe.get("checkpointing") or {}).update(metric_name=None)
    data = {key: value for key, value in (recipe.get("data") or {}).items() if key in DATA_KEYS}
    sections = {name: {"dataset_name": name, "processor": name} for name in found}
    recipe["data"] = {**data, "disjoint": False, "train": sections[TRAIN], "validation": sections.get(VALIDATION)}
    _pass_text_through(recipe)
    generation = recipe["policy"]["generation"]
    generation["stop_strings"] = generation.get("stop_strings") or list(found[TRAIN].stop_strings) or None
    with ExitStack() as stack:
        for name, read in found.items():
            rows = [{"index": index} for index in range(len(read.prompts))]
            entry = DatasetEntry(DatasetConfig, make=lambda section, seed, rows=rows: rows)
            stack.enter_context(DATASETS.registered_for(name, entry))
            make = lambda row, row_format, read=read: read.prompts[row["index"]]  # noqa: E731
            stack.enter_context(PROCESSORS.registered_for(name, Entry(DatasetConfig, make=make)))
        yield {prompt.task_name for read in found.values() for prompt in read.prompts}


def _read_all(dataset: Any, tokenizer: Any, num_needed: int) -> ScriptPrompts:
    """Return the prompts of a dataset, or of several by task; of one that only iterates, at most `num_needed`."""
    if isinstance(dataset, Mapping):
        read = [_read_all(one, tokenizer, num_needed) for one in dataset.values()]
        prompts = [prompt for one in read for prompt in one.prompts]
        return ScriptPrompts(prompts, read[0].stop_strings, any(one.is_endless for one in read))
    prompts, stops, num_left_out = [], (), 0
    only_iterates = _only_iterates(dataset)
    items = islice(iter(dataset), num_needed) if only_iterates else map(dataset.__getitem__, range(len(dataset)))
    for datum in items:
        stops = tuple(datum.get("stop_strings") or ()) if not prompts else stops
        if not datum.get("loss_multiplier", 1.0):
            num_left_out += 1
            continue
        prompts.append(read_datum(datum, tokenizer, datum.get("task_name") or ""))
    if num_left_out:
        logger.warning("left out %d prompts with loss_multiplier 0 of %d", num_left_out, num_left_out + len(prompts))
    is_endless = only_iterates and len(prompts) + num_left_out == num_needed
    if is_endless and num_needed == MAX_PROMPTS:
        logger.warning("read the first %d prompts of a dataset that only iterates; the run repeats them", num_needed)
    return ScriptPrompts(prompts, stops, is_endless)


def _only_iterates(dataset: Any) -> bool:
    is_iterable = any(base.__name__ == "IterableDataset" for base in inspect.getmro(type(dataset)))
    return is_iterable or not hasattr(dataset, "__getitem__")


def _as_list(sections: Any) -> Sequence[Mapping[str, Any]]:
    return [one for one in (sections if isinstance(sections, list) else [sections]) if isinstance(one, Mapping)]
