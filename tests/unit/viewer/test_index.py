import gc
import json
import math
import os
import resource
from pathlib import Path

import pytest

from nemo_rl.errors import DataError
from nemo_rl.viewer import index as index_module
from nemo_rl.viewer.index import Query, RolloutIndex
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.unit.viewer.rundirs import failed, rollout, write_lines, write_run


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_columns_are_those_of_the_lines(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(3, index=2, reward=0.5, text="a b c"), failed(4)])
    index = RolloutIndex(path, cache=cache).complete()
    first, second = index.columns
    assert (first["step"], first["reward"], first["tokens"], first["generation"]) == (3, 0.5, 3, 2)
    assert math.isnan(second["reward"])
    assert index.name_of("failure", second["failure"]) == "environment"
    assert (index.names("env"), index.names("stop"), index.names("failure")) == (
        ["math"],
        ["done", "failed"],
        ["environment"],
    )
    assert index.read(0)["messages"][1]["content"] == "a b c"


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        (Query(), [0, 1, 2, 3]),
        (Query(step=2), [2, 3]),
        (Query(min_reward=0.5), [1, 2]),
        (Query(max_reward=0.5), [0, 1]),
        (Query(failure="any"), [3]),
        (Query(failure="none", sort="-reward"), [2, 1, 0]),
        (Query(failure="infra"), []),
        (Query(group="1:a"), [0]),
        (Query(prompt="b"), [1, 2, 3]),
        (Query(env="words"), [2]),
        (Query(env="unknown"), []),
        (Query(sort="-tokens", min_tokens=2), [1, 0, 2, 3]),
        (Query(step_from=2, step_to=2, stop="done"), [2]),
    ],
)
def test_filters_choose_rows(tmp_path: Path, cache: Path, query: Query, rows: list[int]) -> None:
    lines = [
        rollout(1, group="a", reward=0.0),
        rollout(1, group="b", reward=0.5, text="three words here"),
        rollout(2, group="b", reward=1.0, task_name="nemo_gym", env="words"),
        failed(2, group="b", text="two words"),
    ]
    index = RolloutIndex(write_lines(tmp_path / "train.jsonl", lines), cache=cache).complete()
    assert index.select(query).tolist() == rows


def test_torn_last_line_waits_until_it_is_complete(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1)])
    whole = json.dumps(rollout(2)) + "\n"
    with path.open("a") as file:
        file.write(whole[:40])
    index = RolloutIndex(path, cache=cache).complete()
    assert (len(index), index.pending_bytes) == (1, 40)
    with path.open("a") as file:
        file.write(whole[40:])
    index.complete()
    assert (len(index), index.pending_bytes, index.read(1)["step"]) == (2, 0, 2)


def test_second_start_continues_where_the_first_ended(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), failed(1)])
    RolloutIndex(path, cache=cache).complete().close()
    write_lines(path, [rollout(2, task_name="words")])
    index = RolloutIndex(path, cache=cache)
    assert len(index) == 2
    index.complete()
    assert index.columns["step"].tolist() == [1, 1, 2]
    assert index.names("env") == ["math", "words"]
    assert index.select(Query(failure="environment")).tolist() == [1]


def test_another_file_under_the_same_name_is_indexed_anew(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), rollout(1)])
    RolloutIndex(path, cache=cache).complete().close()
    path.unlink()
    write_lines(path, [rollout(step) for step in (7, 8, 9)])
    assert RolloutIndex(path, cache=cache).complete().columns["step"].tolist() == [7, 8, 9]


def test_truncated_file_is_indexed_anew_and_says_so(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), rollout(2)])
    index = RolloutIndex(path, cache=cache).complete()
    path.write_text(json.dumps(rollout(1)) + "\n")
    with pytest.raises(DataError, match="was changed while it was read"):
        index.read(1)
    index.complete()
    assert len(index) == 1
    assert index.notes == ["train.jsonl became shorter while it was read; it is indexed from its beginning again"]


def test_file_that_disappears_is_named(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1)])
    index = RolloutIndex(path, cache=cache).complete()
    path.unlink()
    for call in (index.advance, lambda: index.read(0)):
        with pytest.raises(DataError, match=r"train.jsonl: cannot be read any more: No such file"):
            call()


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path, cache: Path) -> None:
    lines = [json.dumps(rollout(1)), "{broken", "", '["no object"]', '{"step": 1e99}', json.dumps(rollout(2))]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    index = RolloutIndex(path, cache=cache).complete()
    assert (len(index), index.num_damaged) == (2, 3)
    assert [index.read(row)["step"] for row in index.select(Query()).tolist()] == [1, 2]


def test_numbers_that_only_python_reads_do_not_lose_the_chunk(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [rollout(1), rollout(2, reward=float("nan"))]))
    assert RolloutIndex(path, cache=cache).complete().columns["step"].tolist() == [1, 2]


def test_half_a_surrogate_pair_is_read_back(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1, text="\ud83d alone"), rollout(2)])
    index = RolloutIndex(path, cache=cache).complete()
    assert index.read(0)["messages"][1]["content"] == "\ud83d alone"


def test_line_longer_than_a_chunk_is_indexed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 256)
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), rollout(2, text="x" * 5000), rollout(3)])
    index = RolloutIndex(path, cache=cache).complete()
    assert index.columns["step"].tolist() == [1, 2, 3]
    assert len(index.read(1)["messages"][1]["content"]) == 5000


def test_line_above_the_bound_is_skipped(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 256)
    monkeypatch.setattr(index_module, "MAX_LINE_BYTES", 1024)
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), rollout(2, text="x" * 5000), rollout(3)])
    index = RolloutIndex(path, cache=cache).complete()
    assert (index.columns["step"].tolist(), index.num_damaged) == ([1, 3], 1)


def test_search_finds_text_as_it_is_written(tmp_path: Path, cache: Path) -> None:
    lines = [rollout(1, text='say "hi"\nthere'), rollout(2, text="äöü"), rollout(3, text="nothing")]
    index = RolloutIndex(write_lines(tmp_path / "train.jsonl", lines), cache=cache).complete()
    everything = index.select(Query())
    assert index.search(everything, '"hi"\nthere', limit=10).rows.tolist() == [0]
    assert index.search(everything, "äöü", limit=10).rows.tolist() == [1]
    hits = index.search(everything, "role", limit=10)  # a key
    assert (hits.rows.tolist(), hits.resume_at) == ([], None)


def test_search_tells_where_it_stopped(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(step) for step in range(5)])
    index = RolloutIndex(path, cache=cache).complete()
    hits = index.search(index.select(Query()), "answer", limit=2)
    assert (hits.rows.tolist(), hits.resume_at) == ([0, 1], 2)


def test_index_without_a_cache_directory_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = write_lines(tmp_path / "train.jsonl", [rollout(1)])
    index = RolloutIndex(path, cache=blocked / "cache").complete()
    assert len(index) == 1
    index.close()


def test_closed_index_continues_where_it_was(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), failed(2)])
    index = RolloutIndex(path, cache=cache).complete()
    before = index.columns  # a page that still uses it
    index.close()
    assert len(index) == 2
    assert index.read(1)["step"] == 2
    write_lines(path, [rollout(3)])
    index.close()
    assert index.complete().columns["step"].tolist() == [1, 2, 3]
    assert before["step"].tolist() == [1, 2]
    assert index.names("failure") == ["environment"]


def test_index_that_another_viewer_took_over_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", [rollout(1), rollout(2)])
    first = RolloutIndex(path, cache=cache).complete()
    first.close()
    second = RolloutIndex(path, cache=cache).complete()  # holds the lock
    third = RolloutIndex(path, cache=cache).complete()
    with pytest.raises(DataError, match="there is no rollout 1"):
        first.read(1)
    assert first.complete().read(1)["step"] == second.read(1)["step"] == third.read(1)["step"] == 2


def test_many_runs_stay_below_the_limit_of_open_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "MAX_OPEN", 8)
    directory = tmp_path / "runs"
    for number in range(200):
        write_run(directory / f"exp_{number:03}", train=[rollout(number)], validation=[rollout(number)])
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2 * 8 + 8, limits[1]))
    try:
        sources = ViewerSources.open([directory], cache=cache)
        for source in sources.by_id.values():
            source.complete()
        steps = [source.split("train").column("step").tolist() for source in sources.in_order()]
        assert all(source.split("validation").read((0, 0))["step"] >= 0 for source in sources.in_order())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(steps) == [[number] for number in range(200)]
