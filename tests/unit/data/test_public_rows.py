"""Rows of public datasets."""

import json
from pathlib import Path
from typing import Any

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.public_rows import read_gpqa, read_mmlu, read_mmlu_pro, read_numina, read_squad
from nemo_rl.data.row_sources import load_rows


def test_dapo_rows_are_read_from_their_conversation_and_ground_truth(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    section = DatasetConfig(dataset_name="DAPOMath17K", data_path=str(tmp_path))
    assert list(load_rows(section, seed=0, key="data.train")) == [{"input": "1 + 1?", "output": "2"}]


def test_an_open_assistant_tree_is_one_conversation_a_leaf(tmp_path: Path) -> None:
    leaves = [{"role": "assistant", "text": text, "replies": []} for text in ("a", "b")]
    tree = {"prompt": {"role": "prompter", "text": "q", "replies": leaves}}
    (tmp_path / "trees.jsonl").write_text(json.dumps(tree) + "\n")
    section = DatasetConfig(dataset_name="open_assistant", data_path=str(tmp_path / "trees.jsonl"))
    rows: list[Any] = list(load_rows(section, seed=0, key="data.train"))
    assert [[turn["content"] for turn in row["messages"][1:]] for row in rows] == [["q", "a"], ["q", "b"]]


def test_rows_have_the_question_and_the_answer() -> None:
    squad: Any = read_squad({"context": "c", "question": "q", "answers": {"text": ["a", "b"]}})
    assert [turn["content"] for turn in squad["messages"]] == ["c", "q", "a"]
    valid = {"problem": "p", "answer": "3", "problem_is_valid": "Yes", "solution_is_valid": "Yes"}
    assert read_numina(valid) == {"input": "p", "output": "3"}
    assert read_numina({**valid, "answer": "proof"}) is None
    assert read_numina({**valid, "problem_is_valid": "No"}) is None


def test_options_are_lettered() -> None:
    assert read_mmlu({"question": "q", "choices": ["x", "y"], "answer": 1}) == {
        "input": "q\n\nA) x\nB) y",
        "output": "B",
    }
    assert read_mmlu_pro({"question": "q", "options": ["x"], "answer": "A"})["output"] == "A"
    wrong = {f"Incorrect Answer {number}": f"w{number}" for number in (1, 2, 3)}
    row = read_gpqa({"Question": "q", "Correct Answer": "right", **wrong})
    assert f"{row['output']}) right" in row["input"]
