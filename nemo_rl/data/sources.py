"""Built-in kinds of datasets except nemo_gym: what each requires, its rows, and those of the Hugging Face hub by name.

A named entry's rows, with NeMo-RL's spellings, are made `input` and `output`, or `messages`; `data_path` may name a
directory with files of the same schema. Tasks of a verifiers taskset, and directories of Harbor tasks, are rows too.
Loaded with the configuration, so large libraries are imported when rows are.
"""

import gzip
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_rl.config.data import NO_DEFAULTS, DatasetConfig, DatasetEntry, check_file, find_dataset
from nemo_rl.data.rows import Row, read_jsonl, to_jsonable
from nemo_rl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

DEFAULT_GENERATED_ROWS = 500
TASK_FILE, INSTRUCTION_FILE = "task.toml", "instruction.md"  # of a Harbor task's directory


def load_rows(section: DatasetConfig, *, seed: int, key: str, are_pairs: bool = False) -> list[Row]:
    """Return all rows of a resolved dataset, at most `section.size`; `key` is its configuration key, for errors.

    With `are_pairs` they are the rows of preference pairs, where the dataset tells those apart.
    """
    name = section.dataset_name or ""
    entry = find_dataset(name, key=f"{key}.dataset_name")
    make = entry.make_pairs if are_pairs and entry.make_pairs is not None else entry.make
    try:
        rows = list(islice(make(section, seed), section.size))
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


def require_path_of(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless `data_path` is set."""
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
    return load_hub_rows(section, section.subset)


def load_hub_rows(section: DatasetConfig, subset: str | None, **options: Any) -> Iterable[Row]:
    """Return the rows of one subset of a hub dataset, or of a local directory, which has no subsets."""
    import datasets  # takes a second, and most recipes do not need it

    path = require_data_path(section)
    try:
        subset = None if Path(path).is_dir() else subset
        loaded = datasets.load_dataset(path, subset, split=section.split or "train", **options)
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


def load_csv_rows(section: DatasetConfig) -> Iterable[Row]:
    """Return the rows of a file with a header line, `data_path`: a path or an address."""
    return load_hub_rows(section.model_copy(update={"data_path": "csv"}), None, data_files=require_data_path(section))


JSONL = DatasetEntry(DatasetConfig, make=_load_jsonl, check=check_data_file, reads_lines=True)
CSV = DatasetEntry(DatasetConfig, make=lambda section, seed: load_csv_rows(section), check=require_path_of)
HUGGINGFACE = DatasetEntry(DatasetConfig, make=_load_huggingface, check=require_path_of)
REASONING_GYM = DatasetEntry(
    DatasetConfig, make=_generate_reasoning_gym, check=_check_reasoning_gym, env_name="reasoning_gym"
)


Convert = Callable[[Mapping[str, Any]], Row | None]  # None: the row is skipped

UNVERIFIABLE = ("", "proof", "notfound")  # answers of NuminaMath that no verifier can check
OASST_FILE = "2023-04-12_oasst_all.trees.jsonl.gz"
OASST_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\n\n"
)


def _hub(
    convert: Convert | None = None,
    *,
    subsets: tuple[str, ...] = (),
    sft_defaults: DatasetConfig = NO_DEFAULTS,
    choices: bool = False,
    **values: Any,
) -> DatasetEntry:
    """Return the entry of a dataset on the hub; `values` are the keys of its section, `subsets` are concatenated."""

    def load(section: DatasetConfig, seed: int) -> Iterable[Row]:
        for subset in subsets or (section.subset,):
            rows = load_hub_rows(section, subset)
            yield from rows if convert is None else (row for row in map(convert, rows) if row is not None)

    return DatasetEntry(
        DatasetConfig,
        make=load,
        check=require_path_of,
        defaults=DatasetConfig(**values),
        sft_defaults=sft_defaults,
        has_choices=choices,
    )


def read_dapo(row: Mapping[str, Any]) -> Row:
    """Read a row of DAPO-Math-17k: the prompt is a conversation, the answer the reward model's."""
    return {"input": row["prompt"][0]["content"], "output": row["reward_model"]["ground_truth"]}


def read_squad(row: Mapping[str, Any]) -> Row:
    """Read a row of SQuAD as a conversation: the passage, the question, and the first answer."""
    return {
        "messages": [
            {"role": "system", "content": row["context"]},
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answers"]["text"][0]},
        ]
    }


def read_helpsteer(row: Mapping[str, Any]) -> Row:
    """Read a row of HelpSteer3 as a conversation with the preferred response; the first where neither is."""
    context = row["context"]
    turns = [{"role": "user", "content": context}] if isinstance(context, str) else list(context)
    preferred = row["response2"] if row["overall_preference"] > 0 else row["response1"]
    return {"messages": [*turns, {"role": "assistant", "content": preferred}]}


def read_numina(row: Mapping[str, Any]) -> Row | None:
    """Read a row of NuminaMath-1.5; None where its answer cannot be verified, or it is not marked as valid."""
    answer = (row.get("answer") or "").strip()
    is_proof = (row.get("question_type") or "").strip().lower() == "proof"
    is_valid = row.get("problem_is_valid") == "Yes" and row.get("solution_is_valid") == "Yes"
    if answer.lower() in UNVERIFIABLE or is_proof or not is_valid:
        return None
    return {"input": row["problem"], "output": answer}


def read_choices(question: str, options: Iterable[str], answer: str) -> Row:
    """Return a row with lettered options and the letter of the right one."""
    lettered = "\n".join(f"{chr(ord('A') + index)}) {option}" for index, option in enumerate(options))
    return {"input": f"{question}\n\n{lettered}", "output": answer}


def read_mmlu(row: Mapping[str, Any]) -> Row:
    return read_choices(row["question"], row["choices"], chr(ord("A") + int(row["answer"])))


def read_mmlu_csv(row: Mapping[str, Any]) -> Row:
    return read_choices(row["Question"], (row[letter] for letter in "ABCD"), row["Answer"])


def read_mmlu_pro(row: Mapping[str, Any]) -> Row:
    return read_choices(row["question"], row["options"], row["answer"])


def read_gpqa(row: Mapping[str, Any]) -> Row:
    """Read a row of GPQA; its options are shuffled by the question, so that each run sees the same order."""
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
    order = random.Random(row["Question"]).sample(range(4), 4)
    return read_choices(row["Question"], [options[i] for i in order], chr(ord("A") + order.index(0)))


def _load_oasst(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield every thread of the OpenAssistant trees, `data_path` or the hub's file, as a conversation."""
    path = section.data_path
    if path is None:
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download("OpenAssistant/oasst1", OASST_FILE, repo_type="dataset")
        except Exception as error:  # huggingface_hub's, requests' and the file system's errors
            raise DataError(f"OpenAssistant/oasst1: cannot be loaded: {type(error).__name__}: {error}") from error
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(Path(path), "rt", encoding="utf-8") as lines:
        for line in lines:
            tree = json.loads(line)
            for thread in _threads(tree.get("prompt", tree)):
                if len(thread) > 1:
                    yield {"messages": [{"role": "system", "content": OASST_SYSTEM}, *thread]}


def _threads(node: Mapping[str, Any]) -> Iterator[list[dict[str, str]]]:
    """Yield the conversations from a node to each of its leaves."""
    turn = {"role": "user" if node["role"] == "prompter" else "assistant", "content": node["text"]}
    replies = node.get("replies") or ()
    if not replies:
        yield [turn]
    for reply in replies:
        for rest in _threads(reply):
            yield [turn, *rest]


OPEN_MATH_INSTRUCT_2 = _hub(
    data_path="nvidia/OpenMathInstruct-2",
    split="train_1M",
    input_key="problem",
    output_key="expected_answer",
    sft_defaults=DatasetConfig(output_key="generated_solution"),
)
DEEP_SCALER = _hub(
    data_path="agentica-org/DeepScaleR-Preview-Dataset", split="train", input_key="problem", output_key="answer"
)
AIME_2024 = _hub(data_path="HuggingFaceH4/aime_2024", split="train", input_key="problem", output_key="answer")
AIME_2025 = _hub(
    data_path="opencompass/AIME2025",
    subsets=("AIME2025-I", "AIME2025-II"),
    split="test",
    input_key="question",
    output_key="answer",
)
AIME_2026 = _hub(data_path="MathArena/aime_2026", split="train", input_key="problem", output_key="answer")
DAPO_MATH_17K = _hub(read_dapo, data_path="BytedTsinghua-SIA/DAPO-Math-17k", split="train")
DAPO_MATH_AIME_2024 = _hub(read_dapo, data_path="BytedTsinghua-SIA/AIME-2024", split="train")
NUMINA_MATH = _hub(read_numina, data_path="AI-MO/NuminaMath-1.5", split="train")
OPEN_R1_MATH = _hub(
    data_path="open-r1/OpenR1-Math-220k", subset="default", split="train", input_key="problem", output_key="answer"
)
MATH_500 = _hub(data_path="HuggingFaceH4/MATH-500", split="test", input_key="problem", output_key="answer")
GSM8K = _hub(
    data_path="openai/gsm8k",
    subset="main",
    split="train",
    input_key="question",
    output_key="answer",
    processor="final_answer",
)
TULU3_SFT_MIXTURE = _hub(data_path="allenai/tulu-3-sft-mixture", split="train")
NEMOTRON_CASCADE_MATH = _hub(data_path="nvidia/Nemotron-Cascade-2-SFT-Data", subset="math", split="train")
SQUAD = _hub(read_squad, data_path="rajpurkar/squad", split="train")
HELPSTEER3 = replace(
    _hub(read_helpsteer, data_path="nvidia/HelpSteer3", subset="preference", split="train"),
    make_pairs=lambda section, seed: load_hub_rows(section, section.subset),  # both responses
)
TULU3_PREFERENCE = _hub(data_path="allenai/llama-3.1-tulu-3-8b-preference-mixture", split="train")
OPEN_ASSISTANT = DatasetEntry(DatasetConfig, make=_load_oasst)
MMLU = _hub(read_mmlu, data_path="cais/mmlu", subset="all", split="test", choices=True)
MMLU_CSV = DatasetEntry(
    DatasetConfig,
    make=lambda section, seed: map(read_mmlu_csv, load_csv_rows(section)),
    check=require_path_of,
    has_choices=True,
)
MMLU_PRO = _hub(read_mmlu_pro, data_path="TIGER-Lab/MMLU-Pro", split="test", choices=True)
GPQA = _hub(read_gpqa, data_path="Idavidrein/gpqa", subset="gpqa_main", split="train", choices=True)
GPQA_DIAMOND = _hub(read_gpqa, data_path="Idavidrein/gpqa", subset="gpqa_diamond", split="train", choices=True)


def _check_verifiers(key: str, section: DatasetConfig, config: Any) -> None:
    if section.task is None:
        raise ConfigError(f"{key}.task", None, "required by dataset_name: verifiers, the id of its taskset")


def _read_taskset(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield a row of each task, without end for an endless taskset: its messages, its place, and its key.

    `task` is the id of the taskset, `task_kwargs` the other keys of its section.
    """
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type  # pyright: ignore[reportMissingImports]

    try:
        kind = taskset_config_type(section.task or "")
        taskset = load_taskset(kind.model_validate({**section.task_kwargs, "id": section.task}))
    except Exception as error:  # a plug-in's module, or pydantic's
        raise ConfigError("task", section.task, f"verifiers refuses it: {error}") from error
    if section.size is None and not taskset.bounded:
        raise ConfigError("size", None, "required: the taskset is endless")
    for task in taskset:
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages.append({"role": "user", "content": data.prompt_text or data.name or task.key})
        yield {"messages": messages, "task_index": data.idx, "task_key": task.key}


def find_task_directories(root: Path) -> list[Path]:
    """Return the directories under `root`, or `root` itself, that hold a Harbor task, sorted."""
    return sorted(file.parent for file in root.rglob(TASK_FILE) if (file.parent / INSTRUCTION_FILE).is_file())


def _check_harbor(key: str, section: DatasetConfig, config: Any) -> None:
    path = require_data_path(section, f"{key}.data_path")
    if not find_task_directories(Path(path)):
        problem = f"no directory in it has both {TASK_FILE} and {INSTRUCTION_FILE}"
        raise ConfigError(f"{key}.data_path", path, problem)


def _read_task_directories(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield a row of each task directory under `data_path`: its instruction, and where it is."""
    for directory in find_task_directories(Path(require_data_path(section))):
        instruction = (directory / INSTRUCTION_FILE).read_text(encoding="utf-8").strip()
        yield {"messages": [{"role": "user", "content": instruction}], "task_directory": str(directory.resolve())}


VERIFIERS = DatasetEntry(DatasetConfig, make=_read_taskset, check=_check_verifiers, env_name="verifiers")
HARBOR = DatasetEntry(DatasetConfig, make=_read_task_directories, check=_check_harbor, env_name="harbor")
