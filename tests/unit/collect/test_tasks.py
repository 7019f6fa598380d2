"""The input of a collection, kept beside it."""

import pytest

from nemo_rl.collect.tasks import Task, read_tasks, write_tasks
from nemo_rl.errors import ConfigError, DataError

TASKS = [Task(f"p{i}", "words", "spell", {"question": f"größer {i}?", "nested": {"a": [i]}}) for i in range(3)]


def test_tasks_are_read_as_they_were_written(tmp_path):
    written = write_tasks(tmp_path / "new", TASKS)
    assert written.num_tasks == 3
    assert list(read_tasks(tmp_path / "new")) == TASKS


def test_the_same_tasks_are_accepted_again(tmp_path):
    assert write_tasks(tmp_path, TASKS) == write_tasks(tmp_path, iter(TASKS))


@pytest.mark.parametrize(
    ("others", "difference"),
    [
        ([TASKS[0], TASKS[2], TASKS[1]], "task 1 differs"),
        (TASKS[:2], r"task 2 differs\n.*p2.*\n  is  not there"),
        ([*TASKS, TASKS[0]], r"task 3 differs\n  was not there"),
    ],
)
def test_other_tasks_are_refused_with_the_first_that_differs(tmp_path, others, difference):
    write_tasks(tmp_path, TASKS)
    with pytest.raises(ConfigError, match=difference):
        write_tasks(tmp_path, others)
    assert list(read_tasks(tmp_path)) == TASKS


def test_a_directory_without_tasks_has_none(tmp_path):
    assert list(read_tasks(tmp_path)) == []


@pytest.mark.parametrize(
    "line", ["{}", '{"task_index": 1, "prompt_id": "", "dataset": "", "task_name": "", "row": {}}']
)
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "tasks.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"tasks.jsonl:1"):
        list(read_tasks(tmp_path))
