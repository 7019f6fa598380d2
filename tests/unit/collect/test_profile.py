"""Statistics of a collection against numbers worked out by hand; comparisons and curricula."""

import json
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.collect.merge import merge
from nemo_rl.collect.profile import iter_task_rows, profile
from nemo_rl.collect.profile_report import write_profile
from nemo_rl.collect.shards import KeySpace, RolloutKey, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.collect.table import NO_ANSWER, UNKNOWN_LENGTH, CollectionManifest, RolloutTable
from nemo_rl.collect.task_metrics import TaskMetrics, compute_task_metrics, default_ks
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.pass_at_k import majority_at_k, pass_at_k
from nemo_rl.types import Failure, FailureClass
from tests.unit.collect.collections import IDENTITY, collect_worked, rollout

TASKS = [
    {
        "task_index": 0,
        "dataset": "words",
        "env": "spell",
        "prompt_id": "p0",
        "task_name": "spell",
        "expected": 4,
        "num_rollouts": 4,
        "missing": 0,
        "num_failed": 0,
        "reward": {"mean": 0.75, "std": 0.5, "min": 0.0, "max": 1.0, "median": 1.0},
        "tokens": {"mean": 30.0, "std": 21.602469, "min": 10.0, "max": 60.0, "median": 25.0},
        "pass@1[avg-of-4]": 0.75,
        "pass@2": 1.0,  # of 1, 0, 1, 1 no two are wrong
        "pass@4": 1.0,
        "majority@2": 0.75,  # a, b, a, a: three of six pairs are a tie
        "majority@4": 1.0,
        "rollout_rewards": [1.0, 0.0, 1.0, 1.0],
        "rollout_tokens": [10, 20, 30, 60],
        "row": {"question": "q0"},
    },
    {
        "task_index": 1,
        "dataset": "words",
        "env": "spell",
        "prompt_id": "p1",
        "task_name": "spell",
        "expected": 4,
        "num_rollouts": 3,
        "missing": 1,
        "num_failed": 0,
        "reward": {"mean": 1 / 6, "std": 0.288675, "min": 0.0, "max": 0.5, "median": 0.0},
        "tokens": {"mean": 17 / 3, "std": 1.154701, "min": 5.0, "max": 7.0, "median": 5.0},
        "pass@1[avg-of-4]": 1 / 6,
        "pass@2": 1 / 3,  # .5, .5, 0
        "pass@4": None,
        "majority@2": 0.25,  # c d: .25, c: .5, d: 0
        "majority@4": None,
        "rollout_rewards": [0.5, None, 0.0, 0.0],
        "rollout_tokens": [5, None, 5, 7],
        "row": {"question": "q1"},
    },
    {
        "task_index": 2,
        "dataset": "words",
        "env": "spell",
        "prompt_id": "p2",
        "task_name": "spell",
        "expected": 4,
        "num_rollouts": 0,
        "missing": 4,
        "num_failed": 2,  # wrong answers
        "reward": dict.fromkeys(("mean", "std", "min", "max", "median")),
        "tokens": dict.fromkeys(("mean", "std", "min", "max", "median")),
        "pass@1[avg-of-4]": 0.0,
        "pass@2": 0.0,
        "pass@4": None,
        "majority@2": 0.0,
        "majority@4": None,
        "rollout_rewards": [None] * 4,
        "rollout_tokens": [None] * 4,
        "row": {"question": "q2"},
    },
]
# name: mean, standard error, tasks
SCORES = {
    "reward": (11 / 24, 7 / 24, 2),
    "tokens": (107 / 6, 73 / 6, 2),
    "pass@1[avg-of-4]": (11 / 36, statistics.stdev([3 / 4, 1 / 6, 0]) / 3**0.5, 3),
    "pass@2": (4 / 9, statistics.stdev([1, 1 / 3, 0]) / 3**0.5, 3),
    "pass@4": (1.0, None, 1),
    "majority@2": (1 / 3, statistics.stdev([3 / 4, 1 / 4, 0]) / 3**0.5, 3),
    "majority@4": (1.0, None, 1),
}


def test_every_task_is_as_worked_out_by_hand(tmp_path):
    collect_worked(tmp_path)
    for row, expected in zip(iter_task_rows(profile(tmp_path)), TASKS, strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            is_number = isinstance(value, float) or (name in ("reward", "tokens") and expected["num_rollouts"])
            assert row[name] == (pytest.approx(value, abs=1e-6) if is_number else value), name


def test_the_summary_is_as_worked_out_by_hand(tmp_path):
    collect_worked(tmp_path)
    (summary,) = profile(tmp_path).summaries
    assert (summary.num_tasks, summary.expected, summary.num_rollouts, summary.missing) == (3, 12, 7, 5)
    assert summary.scores.keys() == SCORES.keys()
    for name, (mean, error, num_tasks) in SCORES.items():
        score = summary.scores[name]
        assert score.mean == pytest.approx(mean), name
        assert score.standard_error == (None if error is None else pytest.approx(error)), name
        assert score.num_tasks == num_tasks
    assert summary.thresholds == {0.25: 0.5, 0.5: 0.5, 0.75: 0.5, 1.0: 0.0}


def test_five_right_answers_and_95_failures_are_a_pass_at_1_of_5_percent(tmp_path, caplog):
    failing = [RolloutKey(task, 0) for task in range(5, 100)]
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(100, 1), identity=IDENTITY) as store:
        for task in range(5):
            store.append(RolloutKey(task, 0), rollout(1.0, 10, "a"))
        for key in failing:
            store.append_failure(key, Failure(FailureClass.REWARD, "TimeoutError: no answer in 10 s"))
    measured = profile(tmp_path)
    (summary,) = measured.summaries
    assert summary.scores["pass@1[avg-of-1]"].mean == pytest.approx(0.05)
    assert (summary.num_rollouts, summary.missing, summary.num_failed) == (5, 95, 95)
    assert caplog.messages == [
        f"{tmp_path}: 95 of 100 rollouts failed and count as wrong: pass@1 0.0500, mean reward of the others 1.0000"
    ]


def test_a_failure_is_no_better_than_the_worst_answer(tmp_path):
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(2, 2), identity=IDENTITY) as store:
        store.append(RolloutKey(0, 0), rollout(-1.0, 10, "a"))
        store.append(RolloutKey(0, 1), rollout(1.0, 10, "a"))
        store.append(RolloutKey(1, 0), rollout(1.0, 10, "a"))
        store.append_failure(RolloutKey(1, 1), Failure(FailureClass.INFRA, "lost"))
    assert profile(tmp_path).summaries[0].scores["pass@1[avg-of-2]"].mean == 0.0


def test_what_ended_and_failed_is_counted(tmp_path):
    collect_worked(tmp_path)
    table = profile(tmp_path).table
    assert (table.stop_reasons, table.failed_attempts) == ({"done": 7}, {"environment": 2})


def test_merged_files_give_the_profile_of_their_shards(tmp_path):
    collect_worked(tmp_path)
    write_profile(profile(tmp_path), tmp_path / "..")
    merge(tmp_path, allow_partial=True)
    for shard in tmp_path.glob("rollouts-rs*"):
        shard.unlink()
    write_profile(profile(tmp_path), tmp_path)
    for name in ("profile.json", "profile_tasks.jsonl"):
        assert (tmp_path / name).read_bytes() == (tmp_path / ".." / name).read_bytes()


@pytest.mark.parametrize("is_merged", [False, True])
def test_seeds_may_be_chosen(tmp_path, is_merged):
    collect_worked(tmp_path)
    if is_merged:
        merge(tmp_path, allow_partial=True)
        for shard in tmp_path.glob("rollouts-rs*"):
            shard.unlink()
    measured = profile(tmp_path, seeds=[1])
    assert [row["rollout_rewards"] for row in iter_task_rows(measured)] == [[1.0, 1.0], [0.0, 0.0], [None, None]]
    assert measured.table.failed_attempts == {"environment": 1}


def test_a_seed_that_was_not_begun_is_missing(tmp_path):
    collect_worked(tmp_path)
    assert profile(tmp_path, seeds=[0, 1, 2]).summaries[0].missing == 11


def test_data_sets_are_measured_apart(tmp_path):
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(4, 1), identity=IDENTITY) as store:
        for task, (reward, dataset) in enumerate([(1.0, "a"), (0.0, "b"), (0.5, "b"), (0.0, "a")]):
            store.append(RolloutKey(task, 0), rollout(reward, 3, None, dataset=dataset))
    summaries = profile(tmp_path).summaries
    assert [(s.dataset, s.num_tasks, s.scores["reward"].mean) for s in summaries] == [
        ("all", 4, 0.375),
        ("a", 2, 0.5),
        ("b", 2, 0.25),
    ]
    assert "majority@1" not in summaries[0].scores  # nobody gave an answer


@pytest.mark.parametrize("keeps_input", [True, False])
def test_environments_are_measured_apart_where_they_divide_the_tasks_otherwise(tmp_path, keeps_input):
    tasks = [Task(str(i), dataset, "gym", {}, env) for i, (dataset, env) in enumerate(["aX", "aY", "bX", "bX"])]
    if keeps_input:
        write_tasks(tmp_path, tasks)
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(4, 1), identity=IDENTITY) as store:
        for task, reward in enumerate([1.0, 0.0, 0.5, 0.0]):
            names = {"dataset": tasks[task].dataset, "task_name": "gym", "env": tasks[task].env}
            store.append(RolloutKey(task, 0), {**names, "reward": reward})
    measured = profile(tmp_path)
    found = {s.dataset: (s.num_tasks, s.scores["reward"].mean) for s in measured.summaries}
    assert found == {"all": (4, 0.375), "a": (2, 0.5), "b": (2, 0.25), "env/X": (3, 0.5), "env/Y": (1, 0.0)}
    assert [row["env"] for row in iter_task_rows(measured)] == ["X", "Y", "X", "X"]
    with pytest.raises(ConfigError, match="did you mean 'env/X'"):
        measured.task_indices("env/XX")


def test_environments_that_are_the_datasets_are_measured_once(tmp_path):
    write_tasks(tmp_path, [Task("0", "X", "gym", {}, "X"), Task("1", "Y", "gym", {}, "Y")])
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(2, 1), identity=IDENTITY) as store:
        store.append(RolloutKey(0, 0), {"reward": 1.0})
    assert [summary.dataset for summary in profile(tmp_path).summaries] == ["all", "X", "Y"]


def test_many_tasks_are_measured_alike_in_every_block(tmp_path):
    num_tasks = 9000
    rewards = np.random.default_rng(0).integers(0, 5, (num_tasks, 3)) / 4
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(num_tasks, 3), identity=IDENTITY) as store:
        for key in store.missing():
            store.append(key, {"reward": rewards[key.task_index, key.rollout_index]})
    measures = profile(tmp_path).measures
    np.testing.assert_allclose(measures.reward.std, rewards.std(axis=1, ddof=1), atol=1e-12)
    np.testing.assert_allclose(measures.reward.median, np.median(rewards, axis=1))
    pairs = np.mean([np.maximum(rewards[:, i], rewards[:, j]) for i, j in ((0, 1), (0, 2), (1, 2))], axis=0)
    np.testing.assert_allclose(measures.scores["pass@2"], pairs)


def test_ks_are_powers_of_two_and_all():
    assert default_ks(12) == (1, 2, 4, 8, 12)
    assert default_ks(16) == (1, 2, 4, 8, 16)
    assert all(low < high for n in range(1, 70) for low, high in pairwise(default_ks(n)))


def test_a_k_above_the_rollouts_of_a_task_is_refused(tmp_path):
    collect_worked(tmp_path)
    with pytest.raises(ConfigError, match="k = 5: must be from 1 to 4"):
        profile(tmp_path, ks=[5])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"task_index": 0, "rollout_index": 0, "seed": 0, "reward": 1}, "is there twice"),
        ({"task_index": 9, "rollout_index": 0, "seed": 0, "reward": 1}, "not a rollout of this collection"),
        ({"task_index": 2, "rollout_index": 0, "seed": 0, "reward": "high"}, "is no rollout"),
        ({"rollout_index": 0, "seed": 0}, "is no rollout .*task_index"),
    ],
)
def test_damaged_rows_are_named(tmp_path, row, problem):
    collect_worked(tmp_path)
    with (tmp_path / "rollouts-rs0.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"rollouts-rs0.jsonl:4: .*{problem}"):
        profile(tmp_path)


def test_a_rollout_without_a_reward_counts_as_missing(tmp_path, caplog):
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(1, 2), identity=IDENTITY) as store:
        store.append(RolloutKey(0, 0), {"reward": None, "num_generated_tokens": 3})
        store.append(RolloutKey(0, 1), {"reward": 1.0})
    (row,) = iter_task_rows(profile(tmp_path))
    assert (row["missing"], row["rollout_rewards"], row["rollout_tokens"]) == (1, [None, 1.0], [None, None])
    assert "1 rollouts have no reward" in caplog.text


Cell = tuple[float, int, int]  # reward, length, answer
cells = st.none() | st.tuples(st.integers(-2, 4).map(lambda n: n / 4), st.integers(0, 50), st.integers(0, 3))


def table_of(tasks: list[list[Cell | None]]) -> RolloutTable:
    missing = (np.nan, UNKNOWN_LENGTH, NO_ANSWER)
    values = np.array([[missing if cell is None else cell for cell in task] for task in tasks])
    rewards, tokens, answers = np.moveaxis(values, 2, 0)
    manifest = CollectionManifest((0,), len(tasks), len(tasks[0]), {}, (), ())
    datasets = np.zeros(len(tasks), np.int32)
    return RolloutTable(
        manifest, rewards, tokens.astype(np.int32), answers.astype(np.int64), datasets, ("",), datasets, ("",)
    )


def check(measures: TaskMetrics, index: int, task: list[Cell]) -> None:
    for found, place in ((measures.reward, 0), (measures.tokens, 1)):
        numbers = [cell[place] for cell in task]
        expected = {
            "mean": statistics.fmean(numbers) if numbers else np.nan,
            "std": statistics.stdev(numbers) if len(numbers) > 1 else np.nan,
            "min": min(numbers, default=np.nan),
            "max": max(numbers, default=np.nan),
            "median": statistics.median(numbers) if numbers else np.nan,
        }
        for name, value in expected.items():
            assert getattr(found, name)[index] == pytest.approx(value, abs=1e-9, nan_ok=True), name
    rewards, answers = [cell[0] for cell in task], [cell[2] or None for cell in task]
    for name, values in measures.scores.items():
        kind, _, k = name.partition("@")
        if "avg" in name:
            continue
        count = int(k)
        if count > len(task):
            value = np.nan
        else:
            value = pass_at_k(rewards, count) if kind == "pass" else majority_at_k(rewards, answers, count)
        assert values[index] == pytest.approx(value, abs=1e-9, nan_ok=True), name


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_each_task_is_measured_as_if_alone(tasks: list[list[Cell | None]]):
    measures = compute_task_metrics(table_of(tasks))
    for index, task in enumerate(tasks):
        there = [cell for cell in task if cell is not None]
        assert measures.num_rollouts[index] == len(there)
        check(measures, index, there)


def test_above_32_rollouts_all_vote_or_nobody():
    scores = compute_task_metrics(table_of([[(1.0, 3, 1)] * 40])).scores
    assert [name for name in scores if name.startswith("majority")] == ["majority@40"]
    assert [name for name in scores if name.startswith("pass@")] == [
        "pass@1[avg-of-40]",
        *(f"pass@{k}" for k in (2, 4, 8, 16, 32, 40)),
    ]


def test_ks_may_be_chosen():
    scores = compute_task_metrics(table_of([[(1.0, 3, 1)] * 4]), ks=[3, 1]).scores
    assert list(scores) == ["pass@1[avg-of-4]", "pass@3", "majority@3"]
    assert default_ks(1) == (1,)
