"""Shards joined: order, completeness, identity."""

import json

import pytest

from nemo_rl.collect.merge import IncompleteCollection, merge
from nemo_rl.collect.shards import Chunk, RolloutKey
from nemo_rl.errors import ConfigError, DataError
from tests.unit.collect.collections import IDENTITY, collect

MERGED = ("rollouts.jsonl", "rollouts_failures.jsonl", "rollouts_identity.json", "rollouts.jsonl.done")


def files(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_four_chunks_and_two_seeds_merged_equal_the_unchunked(tmp_path):
    whole, chunked = tmp_path / "whole", tmp_path / "chunked"
    for seed in (5, 2):
        collect(whole, seed=seed)
        for index in range(4):
            collect(chunked, seed=seed, chunk=Chunk(index, 4))
    assert merge(whole).num_rollouts == merge(chunked).num_rollouts == 60
    for name in MERGED:
        assert (chunked / name).read_bytes() == (whole / name).read_bytes()


def test_rows_are_ordered_by_seed_task_and_rollout(tmp_path):
    collect(tmp_path, seed=10)
    collect(tmp_path, seed=9, chunk=Chunk(0, 2))
    collect(tmp_path, seed=9, chunk=Chunk(1, 2))
    rows = [json.loads(line) for line in merge(tmp_path).rollouts.read_bytes().splitlines()]
    keys = [(row["seed"], row["task_index"], row["rollout_index"]) for row in rows]
    assert keys == [(seed, task, repeat) for seed in (9, 10) for task in range(10) for repeat in range(3)]


def test_attempts_stay_in_order(tmp_path):
    collect(tmp_path, num_tasks=1, num_repeats=2, fails=frozenset({RolloutKey(0, 1)}))
    merge(tmp_path, allow_partial=True)
    failures = [json.loads(line) for line in (tmp_path / "rollouts_failures.jsonl").read_bytes().splitlines()]
    assert [(f["rollout_index"], f["attempt"]) for f in failures] == [(0, 1), (1, 1), (1, 2)]


def test_a_second_merge_writes_the_same_and_shards_stay(tmp_path):
    collect(tmp_path)
    shards = files(tmp_path)
    merge(tmp_path)
    first = files(tmp_path)
    merge(tmp_path)
    assert files(tmp_path) == first
    assert shards.items() < first.items()


def test_what_is_missing_is_listed(tmp_path):
    collect(tmp_path, chunk=Chunk(0, 3), left_out=frozenset({RolloutKey(3, 1)}), fails=frozenset({RolloutKey(6, 2)}))
    collect(tmp_path, chunk=Chunk(1, 3))
    before = files(tmp_path)
    with pytest.raises(IncompleteCollection) as error:
        merge(tmp_path, seeds=[0, 1])
    assert str(error.value).splitlines()[1:] == [
        "  rollouts-rs0-chunk0: 2 of 12 rollouts are missing, 1 of them failed whenever they were tried; "
        "task/rollout 3/1, 6/2",
        "  rollouts-rs0-chunk2: was not begun, 9 of 9 rollouts are missing",
        "  rollouts-rs1: was not begun, 30 of 30 rollouts are missing",
    ]
    assert files(tmp_path) == before


def test_a_partial_merge_is_not_done(tmp_path):
    collect(tmp_path)
    merge(tmp_path)
    collect(tmp_path, seed=1, left_out=frozenset({RolloutKey(3, 1)}))
    merged = merge(tmp_path, allow_partial=True)
    assert merged.num_rollouts == 59
    assert [gap.num_missing for gap in merged.gaps] == [1]
    assert not merged.done.exists()


def test_given_seeds_alone_are_merged(tmp_path):
    for seed in (0, 1, 2):
        collect(tmp_path, seed=seed)
    assert merge(tmp_path, seeds=[0, 2]).num_rollouts == 60


def test_shards_of_different_runs_are_refused(tmp_path):
    collect(tmp_path)
    collect(tmp_path, seed=1, identity={**IDENTITY, "model": "other"})
    with pytest.raises(ConfigError, match=r"rollouts-rs0 and rollouts-rs1 .*\n  run.model: was 'm', is 'other'"):
        merge(tmp_path, allow_partial=True)


def test_a_seed_in_two_ways_is_refused(tmp_path):
    collect(tmp_path)
    elsewhere = collect(tmp_path / "elsewhere", chunk=Chunk(0, 2)).files
    for file in (elsewhere.rollouts, elsewhere.identity):
        file.rename(tmp_path / file.name)
    with pytest.raises(ConfigError, match="seed 0 was collected in 2 chunks and whole"):
        merge(tmp_path)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no rollouts"):
        merge(tmp_path)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    store = collect(tmp_path)
    line = store.files.rollouts.read_bytes().splitlines(keepends=True)[4]
    with store.files.rollouts.open("ab") as file:
        file.write(line)
    with pytest.raises(DataError, match="is there twice"):
        merge(tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    store = collect(tmp_path, left_out=frozenset({RolloutKey(0, 0)}))
    with store.files.rollouts.open("ab") as file:
        file.write(b'{"task_index": 0, "rollout_index": 0, "seed": 0, "rew')
    assert merge(tmp_path, allow_partial=True).num_rollouts == 29
