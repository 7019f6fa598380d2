"""The store of one shard: resume, attempts, identity, kills."""

import json
import logging
import random
import signal
import subprocess
import sys

import pytest

from nemo_rl.collect.shards import Chunk, KeySpace, RolloutKey
from nemo_rl.collect.store import RolloutStore, discard_empty_collection
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Failure, FailureClass

IDENTITY = {"data": {"digest": "a1"}, "config": {"temperature": 1.0, "limits": (1, 2)}, "model": "m"}
FAILURE = Failure(FailureClass.INFRA, "GenerationError: gone")


def opened(directory, *, keys=None, **options) -> RolloutStore:
    return RolloutStore.open(directory, **{"seed": 0, "keys": keys or KeySpace(3, 2), "identity": IDENTITY, **options})


def rows(store: RolloutStore) -> list[dict]:
    return [json.loads(line) for line in store.files.rollouts.read_bytes().splitlines()]


def test_a_row_is_kept_under_its_key(tmp_path):
    with opened(tmp_path, seed=7) as store:
        store.append(RolloutKey(1, 0), {"reward": 0.5, "answer": "größer\n\u2028 \ud83d"})
    assert store.files.rollouts.name == "rollouts-rs7.jsonl"
    assert rows(store) == [
        {"task_index": 1, "rollout_index": 0, "seed": 7, "reward": 0.5, "answer": "größer\n\u2028 \ud83d"},
    ]


def test_a_chunk_is_in_the_name(tmp_path):
    with opened(tmp_path, seed=7, keys=KeySpace(9, 1, Chunk(3, 4))) as store:
        assert store.files.rollouts.name == "rollouts-rs7-chunk3.jsonl"


def test_resume_asks_for_what_is_missing_alone(tmp_path):
    with opened(tmp_path) as store:
        store.append(RolloutKey(2, 1), {})
        store.append(RolloutKey(0, 0), {})
        store.append_failure(RolloutKey(0, 1), FAILURE)
    with opened(tmp_path) as store:
        assert list(store.missing()) == [RolloutKey(0, 1), RolloutKey(1, 0), RolloutKey(1, 1), RolloutKey(2, 0)]
        assert (store.num_finished, store.num_missing, store.num_given_up) == (2, 4, 0)
        assert store.is_finished(RolloutKey(2, 1))
        assert store.num_attempts(RolloutKey(0, 1)) == 1


def test_missing_looks_at_a_key_when_its_turn_comes(tmp_path):
    with opened(tmp_path, keys=KeySpace(2, 1)) as store:
        missing = store.missing()
        assert next(missing) == RolloutKey(0, 0)
        store.append(RolloutKey(1, 0), {})
        assert list(missing) == []
        assert list(store.missing()) == [RolloutKey(0, 0)]


def test_attempts_are_capped_over_all_starts(tmp_path):
    key = RolloutKey(0, 0)
    with opened(tmp_path, keys=KeySpace(1, 1), max_attempts=3) as store:
        assert [store.append_failure(key, FAILURE) for _ in range(2)] == [1, 2]
    with opened(tmp_path, keys=KeySpace(1, 1), max_attempts=3) as store:
        assert list(store.missing()) == [key]
        assert store.append_failure(key, Failure(FailureClass.REWARD, "nan")) == 3
        assert list(store.missing()) == []
        assert (store.num_given_up, store.num_missing) == (1, 0)
        store.finish()
        failures = [json.loads(line) for line in store.files.failures.read_text().splitlines()]
    assert [(f["attempt"], f["class"], f["cause"]) for f in failures] == [
        (1, "infra", "GenerationError: gone"),
        (2, "infra", "GenerationError: gone"),
        (3, "reward", "nan"),
    ]


def test_a_higher_cap_opens_a_done_shard_again(tmp_path):
    key = RolloutKey(0, 0)
    with opened(tmp_path, keys=KeySpace(1, 1), max_attempts=1) as store:
        store.append_failure(key, FAILURE)
        store.finish()
    with opened(tmp_path, keys=KeySpace(1, 1), max_attempts=2) as store:
        assert not store.is_done
        assert list(store.missing()) == [key]
        store.append(key, {})
        store.finish()
        assert (store.num_finished, store.num_given_up) == (1, 0)
    assert json.loads(store.files.done.read_text()) == {"finished": 1, "given_up": 0}


def test_done_is_written_when_nothing_is_missing(tmp_path):
    with opened(tmp_path, keys=KeySpace(1, 2)) as store:
        store.append(RolloutKey(0, 0), {})
        with pytest.raises(ValueError, match="1 rollouts are missing"):
            store.finish()
        assert not store.is_done
        store.append(RolloutKey(0, 1), {})
        store.finish()
        assert store.is_done
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".unfinished")] == []


def test_a_finished_key_takes_nothing_more(tmp_path):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {})
        with pytest.raises(ValueError, match="finished already"):
            store.append(RolloutKey(0, 0), {})
        with pytest.raises(ValueError, match="finished already"):
            store.append_failure(RolloutKey(0, 0), FAILURE)
        with pytest.raises(ValueError, match="is not one of"):
            store.append(RolloutKey(0, 2), {})


def test_another_run_is_refused_with_every_difference(tmp_path):
    opened(tmp_path).close()
    other = {"data": {"digest": "a1"}, "config": {"temperature": 0.7, "top_p": 1.0}, "model": "m"}
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, identity=other, keys=KeySpace(4, 2))
    assert str(error.value).splitlines()[1:] == [
        "  num_tasks: was 3, is 4",
        "  run.config.temperature: was 1.0, is 0.7",
        "  run.config.limits: was [1, 2], is not set",
        "  run.config.top_p: was not set, is 1.0",
    ]


def test_a_refused_start_changes_nothing_and_locks_nothing(tmp_path):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError):
        opened(tmp_path, identity={"model": "another"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    opened(tmp_path).close()


def test_one_writer_at_a_time(tmp_path):
    with opened(tmp_path):
        with pytest.raises(ConfigError, match=r"rollouts-rs0.jsonl is being written to"):
            opened(tmp_path)
        opened(tmp_path, seed=1).close()
    opened(tmp_path).close()


def test_a_line_cut_anywhere_is_taken_off(tmp_path, caplog):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {"text": "whole"})
        whole = store.files.rollouts.read_bytes()
        store.append(RolloutKey(0, 1), {"text": "cut"})
        both = store.files.rollouts.read_bytes()
    for end in range(len(whole) + 1, len(both)):
        store.files.rollouts.write_bytes(both[:end])
        with caplog.at_level(logging.WARNING), opened(tmp_path) as again:
            assert again.num_finished == 1
        assert f"{end - len(whole)} bytes" in caplog.text
        caplog.clear()
        assert store.files.rollouts.read_bytes() == whole


def test_a_cut_line_longer_than_a_block_is_taken_off(tmp_path):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {})
    with store.files.rollouts.open("ab") as file:
        file.write(b'{"task_index": 0, "text": "' + b"x" * 3_000_000)
    with opened(tmp_path) as again:
        assert again.num_finished == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"task_index": 0, "rollout_index": 0, "seed": 0}', "is there twice"),
        ('{"task_index": 0, "rollout_index": 5, "seed": 0}', "another shard"),
        ('{"task_index": 0, "rollout_index": 1, "seed": 3}', "another shard"),
        ('{"reward": 1.0}', "jsonl:2: no rollout"),
        ("\0\0\0", "jsonl:2: no rollout"),
        ('{"rollout_index": "1", "task_index": 0, "seed": 0}', "jsonl:2: .* whole numbers"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, line, problem):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {})
    with store.files.rollouts.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=problem):
        opened(tmp_path)


def test_rows_without_an_identity_are_refused(tmp_path):
    with opened(tmp_path) as store:
        store.append(RolloutKey(0, 0), {})
    store.files.identity.unlink()
    with pytest.raises(DataError, match="identity"):
        opened(tmp_path)


def test_lines_that_others_wrote_in_another_order_of_keys_are_read(tmp_path):
    with opened(tmp_path) as store:
        pass
    store.files.rollouts.write_text('{"seed":0,"reward":1,"rollout_index":1,"task_index":2}\n')
    with opened(tmp_path) as again:
        assert again.is_finished(RolloutKey(2, 1))


COLLECTOR = """
import sys
from nemo_rl.collect.shards import KeySpace
from nemo_rl.collect.store import RolloutStore
from nemo_rl.types import Failure, FailureClass

with RolloutStore.open(sys.argv[1], seed=0, keys=KeySpace(60, 4), identity={"model": "m"}, max_attempts=200) as store:
    for key in store.missing():
        sys.stdin.readline()  # until it is allowed, so that it is never done before it is killed
        length = (key.task_index * 7919 + key.rollout_index * 104729) % 200_000
        store.append_failure(key, Failure(FailureClass.INFRA, "once"))
        store.append(key, {"text": "x" * length})
        print(key.task_index, key.rollout_index, flush=True)
    store.finish()
"""


def test_killed_at_random_points_the_union_is_complete_and_no_key_is_there_twice(tmp_path):
    draw = random.Random(0)
    reported: list[str] = []
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        count = draw.randrange(1, 38)
        process.stdin.write("\n" * (count + 2))
        process.stdin.flush()
        reported += [process.stdout.readline().strip() for _ in range(count)]
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.read().split("\n")[:-1]  # what it had said before the signal arrived
        assert process.wait() == -signal.SIGKILL
        finished = set(kept_keys(tmp_path))
        assert {tuple(map(int, line.split())) for line in reported} <= finished  # nothing that was appended is lost
        process.stdin.close()
    subprocess.run(
        [sys.executable, "-c", COLLECTOR, str(tmp_path)], check=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    keys = kept_keys(tmp_path)
    assert sorted(keys) == [(task, repeat) for task in range(60) for repeat in range(4)]


def kept_keys(directory) -> list[tuple[int, int]]:
    text = (directory / "rollouts-rs0.jsonl").read_bytes()
    whole = text[: text.rfind(b"\n") + 1].splitlines()
    return [(row["task_index"], row["rollout_index"]) for row in map(json.loads, whole)]


@pytest.mark.parametrize(
    ("begun", "now"),
    [(None, Chunk(0, 2)), (Chunk(0, 2), None), (Chunk(0, 2), Chunk(1, 4))],
)
def test_a_seed_that_was_cut_otherwise_is_refused(tmp_path, begun, now):
    with opened(tmp_path, keys=KeySpace(8, 1, begun)):
        pass
    with pytest.raises(ConfigError, match=r"collect\.chunk.*seed 0 was begun"):
        opened(tmp_path, keys=KeySpace(8, 1, now))
    assert len(list(tmp_path.glob("*_identity.json"))) == 1
    with opened(tmp_path, keys=KeySpace(8, 1, now), seed=1):
        pass


def test_a_collection_with_failed_attempts_alone_is_discarded(tmp_path):
    with opened(tmp_path) as store, opened(tmp_path, seed=1):
        store.append_failure(RolloutKey(0, 0), Failure(FailureClass.INFRA, "no server"))
        assert not discard_empty_collection(tmp_path)  # being written to
    (tmp_path / "tasks.jsonl").touch()
    assert discard_empty_collection(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with opened(tmp_path, identity={"model": "another"}) as store, opened(tmp_path, seed=1):
        store.append(RolloutKey(0, 0), {})
    before = sorted(tmp_path.iterdir())
    assert not discard_empty_collection(tmp_path)  # holds a rollout
    assert sorted(tmp_path.iterdir()) == before


def test_chunks_of_one_cut_stand_side_by_side(tmp_path):
    for index in range(3):
        with opened(tmp_path, keys=KeySpace(8, 1, Chunk(index, 3))):
            pass
    assert len(list(tmp_path.glob("*_identity.json"))) == 3
