"""Which rollouts belong to a collection and to its chunks."""

import pytest

from nemo_rl.collect.shards import Chunk, KeySpace, RolloutKey
from nemo_rl.errors import ConfigError


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
