"""Collections in NeMo Gym's files, read by real NeMo Gym's own profiler: its statistics are ours."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.collect.merge import merge
from nemo_rl.collect.nemo_gym_files import NemoGymFiles, export_nemo_gym, import_nemo_gym
from nemo_rl.collect.profile import iter_task_rows, profile
from nemo_rl.collect.shards import KeySpace, RolloutKey, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from tests.contracts.real_gym import gym_environment
from tests.unit.collect.collections import IDENTITY, collect_worked, rollout

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

PROFILE = """
import json, sys
from pathlib import Path
from nemo_gym.reward_profile import RewardProfiler
profiler, profiles = RewardProfiler(), []
for inputs, rollouts in json.loads(sys.argv[1]):
    rows, results = ([json.loads(line) for line in Path(path).read_text().splitlines()] for path in (inputs, rollouts))
    tasks, _ = profiler.profile_from_data(rows, results, allow_partial_rollouts=True)
    profiles.append(profiler.prepare_for_serialization(tasks))
print(json.dumps(profiles))
"""


MAJORITY = """
import json, sys
from pathlib import Path
from nemo_gym.reward_profile import compute_pass_majority_metrics
tasks = {}
for line in Path(sys.argv[1]).read_text().splitlines():
    tasks.setdefault((row := json.loads(line))["_ng_task_index"], []).append(row)
for field in ("extracted_answer", "extracted_model_code"):  # of math servers, and of code servers
    metrics, *_ = compute_pass_majority_metrics(list(tasks.values()), answer_key=field)
    print(metrics["majority@3/accuracy"])
"""


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, NemoGymFiles]]:
    """One of ours that was exported, one of Gym's that was imported; each with its directory."""
    ours, gyms = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("gyms")
    collect_worked(ours)
    exported = export_nemo_gym(merge(ours, allow_partial=True).rollouts, ours / "gym.jsonl")
    shipped = gym_environment().site_packages / "resources_servers" / "blackjack" / "data" / "example_rollouts.jsonl"
    import_nemo_gym(shipped, gyms)
    return [(ours, exported), (gyms, NemoGymFiles(shipped))]


def test_gyms_own_profiler_finds_the_same(collections: list[tuple[Path, NemoGymFiles]]) -> None:
    paths = [(str(files.inputs), str(files.rollouts)) for _, files in collections]
    command = [str(gym_environment().python), "-I", "-W", "ignore", "-c", PROFILE, json.dumps(paths)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout
    for (directory, _), theirs in zip(collections, json.loads(output.splitlines()[-1]), strict=True):
        ours = [row for row in iter_task_rows(profile(directory)) if row["num_rollouts"]]
        assert [_essence_of_ours(row) for row in ours] == [_essence_of_gyms(row) for row in theirs]


def test_gyms_own_votes_are_ours_whichever_field_its_server_reads(tmp_path: Path) -> None:
    """The first task's answers are 7, 7 and 8, of which 8 is right; the second's are all right."""
    write_tasks(tmp_path, [Task(str(index), "sums", "sums", {}) for index in range(2)])
    with RolloutStore.open(tmp_path, seed=0, keys=KeySpace(2, 3), identity=IDENTITY) as store:
        for repeat, answer in enumerate("778"):
            store.append(RolloutKey(0, repeat), rollout(float(answer == "8"), 5, answer))
            store.append(RolloutKey(1, repeat), rollout(1.0, 5, "9"))
    exported = export_nemo_gym(merge(tmp_path).rollouts, tmp_path / "gym.jsonl")
    command = [str(gym_environment().python), "-I", "-W", "ignore", "-c", MAJORITY, str(exported.rollouts)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout
    assert [float(line) for line in output.splitlines()] == [50.0, 50.0]
    assert profile(tmp_path).summaries[0].scores["majority@3"].mean == 0.5


def _essence_of_ours(row: dict[str, Any]) -> dict[str, Any]:
    statistics = {
        f"{kind}/{name}": pytest.approx(value) for kind in ("reward", "tokens") for name, value in row[kind].items()
    }
    if row["num_rollouts"] == 1:  # Gym says 0 in some files and nothing in others
        statistics |= {"reward/std": None, "tokens/std": None}
    counts = {name: row[name] for name in ("task_index", "num_rollouts", "expected", "missing")}
    return counts | statistics | {"rewards": [reward for reward in row["rollout_rewards"] if reward is not None]}


def _essence_of_gyms(row: dict[str, Any]) -> dict[str, Any]:
    names = {"reward": "reward", "tokens": "output_tokens"}
    statistics = {
        f"{kind}/{name}": row.get(f"{name}/{column}")
        for kind, column in names.items()
        for name in ("mean", "std", "min", "max", "median")
    }
    if row["num_rollouts"] == 1:
        statistics |= {"reward/std": None, "tokens/std": None}
    counts = {
        "task_index": row["_ng_task_index"],
        "num_rollouts": row["num_rollouts"],
        "expected": row["expected_num_rollouts"],
        "missing": row["missing_num_rollouts"],
    }
    return counts | statistics | {"rewards": [info["reward"] for info in row["rollout_infos"]]}
