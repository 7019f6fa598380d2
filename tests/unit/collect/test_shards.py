"""Shards: keys, identity, files and the stored input."""

import json

import pytest

from nemo_rl.collect.shards import (
    MAX_DIFFERENCES_SHOWN,
    Chunk,
    KeySpace,
    RolloutKey,
    ShardFiles,
    ShardIdentity,
    Task,
    describe_identity_differences,
    find_shards,
    read_tasks,
    write_tasks,
)
from nemo_rl.errors import ConfigError, DataError


def test_shards_are_found_by_seed_and_chunk(tmp_path):
    for seed, chunk in ((10, None), (2, 11), (2, 3)):
        ShardFiles.of(tmp_path, seed, chunk).identity.touch()
    (tmp_path / "rollouts_identity.json").touch()  # of a merge
    (tmp_path / "rollouts-rsx_identity.json").touch()
    names = [files.name for files in find_shards(tmp_path)]
    assert names == ["rollouts-rs2-chunk3", "rollouts-rs2-chunk11", "rollouts-rs10"]


def test_a_chunk_is_every_nth_task_with_all_repeats():
    keys = KeySpace(10, 2, Chunk(1, 4))
    expected = [(task, repeat) for task in (1, 5, 9) for repeat in (0, 1)]
    assert [(k.task_index, k.rollout_index) for k in keys] == expected
    assert len(keys) == 6


@pytest.mark.parametrize("num_tasks", [0, 1, 3, 4, 11])
def test_chunks_hold_every_key_of_the_whole_once(num_tasks):
    parts = [key for index in range(4) for key in KeySpace(num_tasks, 3, Chunk(index, 4))]
    assert sorted(parts) == list(KeySpace(num_tasks, 3))


def test_keys_are_numbered_in_order():
    keys = KeySpace(10, 3, Chunk(2, 4))
    assert [keys.number(key) for key in keys] == list(range(len(keys)))
    assert [keys.key(number) for number in range(len(keys))] == list(keys)


@pytest.mark.parametrize("key", [RolloutKey(0, 0), RolloutKey(1, 2), RolloutKey(13, 0), RolloutKey(1, -1)])
def test_a_key_of_elsewhere_has_no_number(key):
    with pytest.raises(ValueError):
        KeySpace(10, 2, Chunk(1, 4)).number(key)


@pytest.mark.parametrize(("index", "count"), [(4, 4), (-1, 4), (0, 0)])
def test_a_chunk_that_does_not_exist_is_refused(index, count):
    with pytest.raises(ConfigError, match="chunk"):
        Chunk(index, count)


@pytest.mark.parametrize("chunk", [None, Chunk(0, 1), Chunk(2, 3)])
def test_an_identity_is_read_as_it_was_written(tmp_path, chunk):
    identity = ShardIdentity(3, KeySpace(10, 2, chunk), {"config": {"a": [1, None]}, "model": "größer"})
    identity.write(tmp_path / "i.json")
    assert ShardIdentity.read(tmp_path / "i.json") == identity
    identity.check(tmp_path / "i.json")


def test_differences_name_nested_keys():
    before = {"a": {"b": 1, "c": {}}, "same": [1]}
    now = {"a": {"b": 2, "d": None}, "same": [1]}
    assert describe_identity_differences(before, now).splitlines() == [
        "  a.b: was 1, is 2",
        "  a.c: was {}, is not set",
        "  a.d: was not set, is None",
    ]
    assert describe_identity_differences(now, now) == ""


def test_many_differences_are_cut():
    lines = describe_identity_differences({}, {str(n): n for n in range(MAX_DIFFERENCES_SHOWN + 5)}).splitlines()
    assert (len(lines), lines[-1]) == (MAX_DIFFERENCES_SHOWN + 1, "  and 5 more")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"chunk": 3, "num_chunks": 2, "num_tasks": 1, "num_repeats": 1}'])
def test_a_file_that_is_no_identity_is_refused(tmp_path, text):
    (tmp_path / "i.json").write_text(text)
    with pytest.raises(DataError, match=r"i.json: is not the identity"):
        ShardIdentity.read(tmp_path / "i.json")


TASKS = [Task(f"p{i}", "words", "spell", {"question": f"größer {i}?", "nested": {"a": [i]}}) for i in range(3)]


def test_tasks_are_read_as_they_were_written(tmp_path):
    written = write_tasks(tmp_path / "new", TASKS)
    assert written.num_tasks == 3
    assert list(read_tasks(tmp_path / "new")) == TASKS


def test_only_an_agent_names_an_environment_of_its_own(tmp_path):
    tasks = [Task("0", "", "nemo_gym", {}, "code_gen_simple_agent"), Task("1", "", "math", {})]
    write_tasks(tmp_path, tasks)
    assert list(read_tasks(tmp_path)) == tasks
    assert ["env" in json.loads(line) for line in (tmp_path / "tasks.jsonl").open()] == [True, False]


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
