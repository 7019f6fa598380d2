"""Rows of reasoning_gym: those of a file are compared with generated ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.composite import DatasetSpec

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.processors import make_row_format, read_reasoning_gym_entry
from nemo_rl.data.reasoning_gym_rows import check_entry
from nemo_rl.data.row_sources import load_rows
from nemo_rl.data.rows import to_jsonable
from nemo_rl.errors import DataError
from tests.support.quick import quick


def entry_of(task: str, seed: int = 5) -> dict[str, Any]:
    return to_jsonable(reasoning_gym.create_dataset(task, size=1, seed=seed)[0])


SEEDED = ["bitwise_arithmetic", "calendar_arithmetic", "codeio", "knight_swap", "rubiks_cube"]


@pytest.mark.parametrize("task", quick(SEEDED, set(SEEDED) - {"knight_swap"}))  # it takes half a second to generate
def test_generated_rows_pass_whatever_their_seed(task: str) -> None:
    for seed in range(100, 130):
        check_entry(task, entry_of(task, seed))


def test_entry_of_a_mixture_is_one_of_its_task() -> None:
    parts = [DatasetSpec(name="gcd", weight=1, config={}), DatasetSpec(name="chain_sum", weight=1, config={})]
    mixture = reasoning_gym.create_dataset("composite", size=4, seed=1, datasets=parts)
    for index in range(4):
        check_entry("composite", to_jsonable(mixture[index]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"metadata": None}, "entry = .*: must be an object with question, answer and metadata"),
        ({"question": 7}, r"entry\.question = 7 is a number; in task 'bitwise_arithmetic' it is text"),
        ({"answer": ["0x1"]}, r"entry\.answer = \['0x1'\] is a list; .* it is text"),
        ({"metadata": {"problem": "1"}}, r"entry\.metadata\.\w+ is missing, which every entry"),
        ({"metadata.problem": 7}, r"entry\.metadata\.problem = 7 is a number; .* it is text"),
    ],
)
def test_entry_unlike_those_of_its_task_is_refused(changes: dict[str, Any], problem: str) -> None:
    entry = entry_of("bitwise_arithmetic")
    for name, value in changes.items():
        if name.startswith("metadata."):
            entry["metadata"][name.removeprefix("metadata.")] = value
        else:
            entry[name] = value
    with pytest.raises(DataError, match=problem):
        check_entry("bitwise_arithmetic", entry)


@pytest.mark.parametrize("task", ["no_such_task", None, ["gcd"], "composite"])
def test_unknown_task_is_refused(task: Any) -> None:
    with pytest.raises(DataError, match="no task of reasoning_gym; known: ab, acre"):
        check_entry(task, {"question": "?", "answer": "1", "metadata": {}})


def test_row_of_a_file_is_named(tmp_path: Path) -> None:
    good, bad = entry_of("gcd"), {**entry_of("gcd"), "answer": 3}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"task": "gcd", "entry": entry}) + "\n" for entry in (good, bad)))
    section = DatasetConfig(dataset_name="jsonl", data_path=str(path))
    first, second = load_rows(section, seed=0, key="data.train")
    row_format = make_row_format(section, key="data.train")
    assert read_reasoning_gym_entry(first, row_format).env_state["task"] == "gcd"
    with pytest.raises(DataError, match=r"entry\.answer = 3 is a number"):
        read_reasoning_gym_entry(second, row_format)
