"""The whole input of a collection: the ids of training, the rows as they are, read as they are asked for."""

import json
from pathlib import Path

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig, InputDataConfig
from nemo_rl.data.datasets import load_datasets, load_input
from nemo_rl.errors import ConfigError, DataError
from tests.fakes.gym_stack import row_of


def written(path: Path, *rows: dict[str, str]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(dataset_name="jsonl", data_path=str(path), env_name="e")


def letters(path: Path, text: str) -> DatasetConfig:
    return written(path, *({"input": letter, "output": letter.upper()} for letter in text))


def test_prompts_have_the_ids_that_they_have_in_training(tmp_path: Path) -> None:
    section = letters(tmp_path / "a.jsonl", "xyx")
    train, _ = load_datasets(DataConfig(train=section), 42)
    assert list(load_input(InputDataConfig(input=section)).prompts) == list(train.prompts)


def test_sets_stand_one_behind_the_other_and_the_limit_counts_over_all(tmp_path: Path) -> None:
    sets = [letters(tmp_path / "a.jsonl", "ab"), letters(tmp_path / "b.jsonl", "cd")]
    loaded = load_input(InputDataConfig(input=sets), 3)
    assert [prompt.messages[0].content for prompt in loaded.prompts] == ["a", "b", "c"]
    found = list(loaded.rows())
    assert [row for _, row in found] == [{"input": c, "output": c.upper()} for c in "abc"]
    assert [prompt for prompt, _ in found] == list(loaded.prompts)
    assert loaded.prompts[2].dataset == "jsonl_2"


def test_generated_rows_are_drawn_from_the_inputs_own_seed() -> None:
    section = DatasetConfig(dataset_name="reasoning_gym", task="chain_sum", size=4, env_name="e")
    first, again = (list(load_input(InputDataConfig(input=section)).rows()) for _ in range(2))
    other = list(load_input(InputDataConfig(input=section, seed=7)).rows())
    assert first == again != other
    assert first[0][1].keys() == {"task", "entry"}


def test_rows_of_a_file_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    loaded = load_input(InputDataConfig(input=letters(tmp_path / "a.jsonl", "ab")))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        loaded.prompts[1]


@pytest.mark.parametrize(("name", "expected"), [(None, ["spell", "play"]), ("words", ["words", "words"])])
def test_rows_of_nemo_gym_without_a_name_of_their_set_are_measured_by_agent(
    tmp_path: Path, name: str | None, expected: list[str]
) -> None:
    (tmp_path / "gym.jsonl").write_text("".join(json.dumps(row_of("a", agent)) + "\n" for agent in ("spell", "play")))
    section = DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "gym.jsonl"), name=name)
    assert [prompt.dataset for prompt in load_input(InputDataConfig(input=section)).prompts] == expected


def test_a_row_that_cannot_be_used_is_named_by_its_line(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", {"input": "a", "output": "b"}, {"input": "c"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: has no field 'output'"):
        load_input(InputDataConfig(input=section))


def test_a_set_without_rows_or_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.input: .*has no rows"):
        load_input(InputDataConfig(input=written(tmp_path / "a.jsonl")))
    with pytest.raises(ConfigError, match=r"data\.input\.dataset_name"):
        load_input(InputDataConfig(input=DatasetConfig(env_name="e")))
