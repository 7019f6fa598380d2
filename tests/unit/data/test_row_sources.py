"""Rows of files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig, find_dataset
from nemo_rl.data.processors import make_prompt_maker
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.data.row_sources import load_rows
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message


def test_a_csv_file_is_read_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "math.csv").write_text('Question,Answer\n"1, 2 and?",3\n')
    section = DatasetConfig(dataset_name="csv", data_path=str(tmp_path / "math.csv"))
    assert list(load_rows(section, seed=0, key="data.input")) == [{"Question": "1, 2 and?", "Answer": 3}]
    (tmp_path / "mmlu.csv").write_text("Question,A,B,C,D,Answer,Subject\nWhich?,a,b,c,d,C,letters\n")
    section = DatasetConfig(dataset_name="mmlu_csv", data_path=str(tmp_path / "mmlu.csv"))
    expected = {"input": "Which?\n\nA) a\nB) b\nC) c\nD) d", "output": "C"}
    assert list(load_rows(section, seed=0, key="data.input")) == [expected]


ROWS = [{"question": "1 + 1?", "solution": "2"}, {"question": "2 + 2?", "solution": "4"}]


def write_rows(form: str, directory: Path) -> str:
    """Write ROWS in one of the forms that people have; return data_path."""
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    path = directory / f"rows.{form}"
    if form == "parquet":
        table.to_parquet(str(path))
    elif form == "csv":
        table.to_csv(str(path))
    elif form == "jsonl":
        table.to_json(str(path))
    elif form == "json":
        path.write_text(json.dumps(ROWS))
    elif form == "arrow":
        table.save_to_disk(str(directory / "saved"))
        return str(next((directory / "saved").glob("*.arrow")))
    elif form == "saved":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(path))
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "arrow", "saved", "dict"])
def test_rows_are_read_from_every_form_by_the_path_alone(form: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data_path": write_rows(form, tmp_path), "env_name": "math"}
    mapped: dict[str, Any] = {"input_key": "question", "output_key": "solution"}
    config = DataConfig(train=DatasetConfig(**keys, **mapped))
    train, validation = load_prompt_sets(config, run_seed=0)
    found = [(prompt.messages[-1].content, str(prompt.env_state["answer"])) for prompt in train.prompts]
    assert found == [("1 + 1?", "2"), ("2 + 2?", "4")]
    assert validation == ()


def test_split_of_a_saved_dictionary_is_chosen_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    path = write_rows("dict", tmp_path)
    section = DatasetConfig(dataset_name="huggingface", data_path=path, split="test")
    assert load_rows(section, seed=0, key="data.train") == ROWS[:1]
    with pytest.raises(ConfigError, match=r"data\.train\.split = 'tests': .*did you mean 'test'"):
        load_rows(section.model_copy(update={"split": "tests"}), seed=0, key="data.train")


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("jsonl", "rows.parquet", "is no file of JSON Lines; allowed: file"),
        ("file", "rows.xlsx", "its format is not known by its ending; allowed: .parquet, .arrow, .csv, .json"),
        ("file", "absent.csv", "no such file"),
    ],
)
def test_wrong_reader_of_a_file_is_refused(name: str, path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "rows.xlsx").touch()
    section = DatasetConfig(dataset_name=name, data_path=str(tmp_path / path))
    check = find_dataset(name, key="").check
    assert check is not None
    with pytest.raises(ConfigError) as error:
        check("data.train", section, None)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["jsonl", "file"])
def test_split_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    check = find_dataset(name, key="").check
    assert check is not None
    for split in (None, "train"):
        check("data.train", DatasetConfig(dataset_name=name, data_path=str(path), split=split), None)
    with pytest.raises(ConfigError, match=r"data\.train\.split = 'test': .*without splits; allowed: null, train"):
        check("data.train", DatasetConfig(dataset_name=name, data_path=str(path), split="test"), None)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("row", "section", "answer", "state"),
    [
        ({"prompt": MESSAGES, "answer": "2", "level": 1}, {}, "2", {"level": 1}),
        ({"prompt": MESSAGES, "solution": 2}, {"output_key": "solution"}, "2", {"solution": 2}),
        ({"chat": MESSAGES, "output": "2"}, {"input_key": "chat"}, "2", {}),
        ({"prompt": MESSAGES, "reward_model": {"ground_truth": "2", "style": "rule"}}, {}, "2", {}),
        ({"prompt": MESSAGES, "solution": 2, "answer": "x"}, {"output_key": "solution"}, "2", {"solution": 2}),
        ({"prompt": MESSAGES, "answer": "2", "reward_model": {"ground_truth": "x"}}, {}, "2", {}),
        ({"prompt": MESSAGES, "solution": ["4"]}, {"output_key": "solution"}, ["4"], {}),  # refused when a run starts
        ({"prompt": MESSAGES, "solution": math.inf}, {"output_key": "solution"}, math.inf, {}),  # and this
        ({"prompt": "1 + 1?", "topic": "sums"}, {}, None, {"topic": "sums"}),  # a reward that needs no answer
    ],
)
def test_messages_in_a_prompt_column_are_read_with_the_other_columns_as_state(
    row: dict[str, Any], section: dict[str, Any], answer: Any, state: dict[str, Any]
) -> None:
    own = DatasetConfig(dataset_name="jsonl", env_name="math", **section)
    prompt = make_prompt_maker(own, key="data.train")(row)
    assert prompt.messages[-1] == Message("user", "1 + 1?")
    assert len(prompt.messages) == (1 if isinstance(row.get("prompt"), str) else 2)
    assert prompt.env_state.get("answer") == answer
    assert state.items() <= prompt.env_state.items()
