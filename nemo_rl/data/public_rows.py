"""Rows of public datasets (public_datasets.py): how each dataset's own fields are read."""

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.config.data import NO_DEFAULTS, DatasetConfig, DatasetEntry
from nemo_rl.data.row_sources import load_hub_rows, require_path_of
from nemo_rl.data.rows import Row
from nemo_rl.data.table_rows import Convert, Table
from nemo_rl.errors import DataError

UNVERIFIABLE = ("", "proof", "notfound")  # answers of NuminaMath that no verifier can check
OASST_FILE = "2023-04-12_oasst_all.trees.jsonl.gz"
OASST_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\n\n"
)


def hub_entry(
    convert: Convert | None = None,
    *,
    subsets: tuple[str, ...] = (),
    sft_defaults: DatasetConfig = NO_DEFAULTS,
    choices: bool = False,
    **values: Any,
) -> DatasetEntry:
    """Return the entry of a dataset on the hub; `values` are the keys of its section, `subsets` are concatenated."""

    def load(section: DatasetConfig, seed: int) -> Table:
        tables = [load_hub_rows(section, subset) for subset in subsets or (section.subset,)]
        return Table(tables[0].source, [part for table in tables for part in table.parts], convert)

    return DatasetEntry(
        DatasetConfig,
        make=load,
        check=require_path_of,
        defaults=DatasetConfig(**values),
        sft_defaults=sft_defaults,
        reads_tables=True,
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
    """Read a row of HelpSteer3 as a conversation with the preferred response; the first if neither is preferred."""
    context = row["context"]
    turns = [{"role": "user", "content": context}] if isinstance(context, str) else list(context)
    preferred = row["response2"] if row["overall_preference"] > 0 else row["response1"]
    return {"messages": [*turns, {"role": "assistant", "content": preferred}]}


def read_numina(row: Mapping[str, Any]) -> Row | None:
    """Read a row of NuminaMath-1.5; None if its answer cannot be verified, or it is not marked as valid."""
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


def load_oasst(section: DatasetConfig, seed: int) -> Iterator[Row]:
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
