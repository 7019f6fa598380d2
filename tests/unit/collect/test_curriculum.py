"""Input rows of the tasks whose mean reward is in a range."""

import json

import pytest

from nemo_rl.collect.curriculum import RewardRange, write_curriculum
from nemo_rl.collect.profile import profile
from nemo_rl.errors import ConfigError
from tests.unit.collect.collections import collect, collect_worked


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("low", "high", "questions"),
    [(0.0, 1.0, ["q0", "q1"]), (0.5, 0.75, ["q0"]), (1 / 6, 1 / 6, ["q1"]), (-1.0, 0.7, ["q1"])],
)
def test_rows_of_tasks_in_the_range_are_written_as_they_were(tmp_path, low, high, questions):
    collect_worked(tmp_path)
    count = write_curriculum(profile(tmp_path), tmp_path / "out.jsonl", RewardRange(low, high))
    assert lines_of(tmp_path / "out.jsonl") == [{"question": question} for question in questions]
    assert count == len(questions)


def test_a_range_without_tasks_writes_nothing(tmp_path):
    collect_worked(tmp_path)
    with pytest.raises(ConfigError, match="no task"):
        write_curriculum(profile(tmp_path), tmp_path / "out.jsonl", RewardRange(0.8, 0.9))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_collection_without_its_input_has_no_rows_to_write(tmp_path):
    collect(tmp_path)
    with pytest.raises(ConfigError, match=r"tasks.jsonl"):
        write_curriculum(profile(tmp_path), tmp_path / "out.jsonl", RewardRange(0, 1))


def test_a_range_that_is_upside_down_is_refused():
    with pytest.raises(ConfigError, match="max_reward"):
        RewardRange(0.5, 0.4)


def test_an_unknown_data_set_is_refused(tmp_path):
    collect_worked(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'words'"):
        write_curriculum(profile(tmp_path), tmp_path / "out.jsonl", RewardRange(0, 1), dataset="word")
