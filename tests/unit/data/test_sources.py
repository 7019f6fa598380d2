"""Named datasets, on small files of the hub's schemas."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.datasets import load_datasets, split_rows
from nemo_rl.data.sources import load_rows, read_gpqa, read_mmlu, read_mmlu_pro, read_numina, read_squad
from nemo_rl.errors import ConfigError


def test_dapo_rows_are_read_from_their_conversation_and_ground_truth(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    section = DatasetConfig(dataset_name="DAPOMath17K", data_path=str(tmp_path))
    assert list(load_rows(section, seed=0, key="data.train")) == [{"input": "1 + 1?", "output": "2"}]


def test_a_csv_file_is_read_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "math.csv").write_text('Question,Answer\n"1, 2 and?",3\n')
    section = DatasetConfig(dataset_name="csv", data_path=str(tmp_path / "math.csv"))
    assert list(load_rows(section, seed=0, key="data.input")) == [{"Question": "1, 2 and?", "Answer": 3}]
    (tmp_path / "mmlu.csv").write_text("Question,A,B,C,D,Answer,Subject\nWhich?,a,b,c,d,C,letters\n")
    section = DatasetConfig(dataset_name="mmlu_csv", data_path=str(tmp_path / "mmlu.csv"))
    expected = {"input": "Which?\n\nA) a\nB) b\nC) c\nD) d", "output": "C"}
    assert list(load_rows(section, seed=0, key="data.input")) == [expected]


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


def test_a_share_or_a_number_of_rows_is_held_out() -> None:
    kept, held_out = split_rows(40, 0.05, seed=1)
    assert len(held_out) == 2
    assert sorted(kept + held_out) == list(range(40))
    assert split_rows(40, 0.05, seed=1) == (kept, held_out)
    assert len(split_rows(40, 8, seed=1)[1]) == 8


def test_a_validation_split_is_a_set_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}", "output": str(i)}) + "\n" for i in range(20)))
    train = DatasetConfig(dataset_name="jsonl", data_path=str(path), split_validation_size=0.25, repeat=2)
    trained, validation = load_datasets(DataConfig(train=train), 42)
    assert [len(one.prompts) for one in validation] == [5]
    assert len(trained.prompts) == 30
    held_out = {prompt.messages for prompt in validation[0].prompts}
    assert not held_out & {prompt.messages for prompt in trained.prompts}
    with pytest.raises(ConfigError, match="holds out 20 of 20 rows"):
        load_datasets(DataConfig(train=train.model_copy(update={"split_validation_size": 50})), 42)
