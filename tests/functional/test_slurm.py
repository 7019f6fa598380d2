"""Jobs on a real Slurm of two nodes on this machine: arrays, kills, requeues, servers that die, the aggregation."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.collect.shards import ShardFiles
from tests.fakes.collect_program import NUM_TASKS
from tests.slurm_cluster import SlurmCluster, slurm_cluster, wait_until, why_not

ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "fakes"
RECIPE = ROOT / "examples" / "configs" / "collect.yaml"
PROGRAM = "tests.fakes.collect_program"
NUM_REPEATS = 2
REAL_TASKS = 60
REAL_DEADLINE_S = 560.0  # of one collection with a model

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@dataclass(frozen=True)
class Jobs:
    collection: str
    aggregation: str


@dataclass
class Case:
    """A collection in a directory of its own, with the stand-in for `nemo-rl collect`."""

    cluster: SlurmCluster
    directory: Path

    @property
    def output(self) -> Path:
        return self.directory / "out%a"  # which Slurm would take for the array task's number

    def submit(self, *overrides: str) -> Jobs:
        """Start a collection with the fake."""
        return self.submit_real(f"slurm.program=[{sys.executable},-m,{PROGRAM}]", *overrides)

    def submit_real(self, *overrides: str) -> Jobs:
        """By the command line, as a user does."""
        own = (f"collect.output_dir={self.output}", f"collect.num_repeats={NUM_REPEATS}")
        text = nemo_rl("submit", *own, f"slurm.job_name={self.directory.name}", *overrides)
        found = dict(line.split(": job ") for line in text.splitlines() if ": job " in line)
        return Jobs(found["collection"], found["aggregation"])

    @property
    def server(self) -> tuple[str, ...]:
        """A small server in each array task."""
        command = [sys.executable, str(FAKES / "node_server.py"), "'{host}:{port}'", str(self.directory)]
        return (f"slurm.server.command=[{','.join(command)}]", "slurm.server.start_timeout_s=120")

    def hold(self, seed: int, chunk: int, after: int) -> None:
        """Let that collection go no further than `after` rollouts until `release`."""
        (self.directory / "partial").write_text(str(after))
        (self.directory / "partial").rename(self.directory / f"hold-{seed}-{chunk}")

    def release(self, seed: int, chunk: int) -> None:
        (self.directory / f"hold-{seed}-{chunk}").unlink()

    def rows(self, seed: int, chunk: int | None) -> list[dict[str, Any]]:
        path = ShardFiles.of(self.output, seed, chunk).rollouts
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_rows(self, jobs: Jobs, count: int, seed: int, chunk: int | None, deadline_s: float = 120.0) -> None:
        """Wait until that shard has that many rows; fail if the collection ends without them."""
        wait_until(
            lambda: len(self.rows(seed, chunk)) >= count,
            self.logs,
            hopeless=lambda: not self.cluster.is_queued(jobs.collection),
            deadline_s=deadline_s,
        )

    def logs(self) -> str:
        return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted(self.output.rglob("*.log")))


@pytest.fixture
def case(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STEPS", str(tmp_path / "case"))
    monkeypatch.setenv("NEMO_RL_POLL_S", "0.2")
    directory = tmp_path / "case"
    directory.mkdir()
    return Case(cluster, directory)


def nemo_rl(command: str, *overrides: str) -> str:
    """Return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl", command, "--config", str(RECIPE), *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=REAL_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def job_of(row: dict[str, Any]) -> str:
    return row["job"]


def test_a_killed_task_is_submitted_again_alone_and_runs_what_is_missing(case: Case) -> None:
    case.hold(1, 1, after=2)
    arguments = ("collect.seeds=0,1", "slurm.num_chunks=2", *case.server)
    first = case.submit(*arguments)
    case.wait_for_rows(first, 2, 1, 1)
    assert case.cluster.fields(first.aggregation)["Reason"] == "Dependency"
    case.cluster.run("scancel", "--signal=KILL", "--full", f"{first.collection}_3")
    case.cluster.wait_until_ended(first.collection, first.aggregation)
    states = [case.cluster.state(f"{first.collection}_{task}") for task in range(4)]
    assert states[:3] == ["COMPLETED"] * 3, case.logs()
    assert states[3] in ("FAILED", "CANCELLED")
    assert case.cluster.state(first.aggregation) == "CANCELLED"
    assert not (case.output / "rollouts.jsonl").exists()

    case.release(1, 1)
    second = case.submit(*arguments)
    assert "--array=3\n" in (case.output / "slurm/0002/collect.sbatch").read_text()
    case.cluster.wait_until_ended(second.collection, second.aggregation)
    assert case.cluster.state(second.aggregation) == "COMPLETED", case.logs()
    of_jobs = Counter(job_of(row) for row in case.rows(1, 1))
    assert of_jobs == {f"{first.collection}.0": 2, f"{second.collection}.0": NUM_TASKS * NUM_REPEATS // 2 - 2}
    merged = [json.loads(line) for line in (case.output / "rollouts.jsonl").read_text().splitlines()]
    keys = [(row["seed"], row["task_index"], row["rollout_index"]) for row in merged]
    assert keys == [(s, t, r) for s in (0, 1) for t in range(NUM_TASKS) for r in range(NUM_REPEATS)]
    assert (case.output / "profile.json").exists()


@pytest.mark.slow  # waits for limits
def test_a_task_at_its_time_limit_is_requeued_and_goes_on_while_the_aggregation_waits(case: Case) -> None:
    case.hold(0, 0, after=5)
    jobs = case.submit("slurm.requeue_s_before_end=60", *case.server)
    case.wait_for_rows(jobs, 5, 0, None)
    case.cluster.run("scancel", "--signal=USR1", "--batch", f"{jobs.collection}_0")  # as Slurm does at that time
    wait_until(lambda: case.cluster.fields(f"{jobs.collection}_0")["Restarts"] == "1", case.logs)
    assert case.cluster.state(jobs.aggregation) == "PENDING"
    case.cluster.wait_until_ended(jobs.collection, jobs.aggregation)
    assert case.cluster.state(jobs.aggregation) == "COMPLETED", case.logs()
    assert "the time limit is near" in (case.output / "slurm/0001/logs/collect-0.log").read_text()
    of_jobs = Counter(job_of(row) for row in case.rows(0, None))
    assert of_jobs == {f"{jobs.collection}.0": 5, f"{jobs.collection}.1": NUM_TASKS * NUM_REPEATS - 5}


def test_servers_of_two_nodes_stand_behind_one_address_and_the_death_of_one_ends_the_job(case: Case) -> None:
    case.hold(0, 0, after=4)
    case.hold(0, 1, after=0)
    several = ("slurm.nodes=2", "slurm.server.num_replicas=2", "slurm.collection.num_tasks=2")
    jobs = case.submit(*several, *case.server)
    case.wait_for_rows(jobs, 4, 0, 0)
    (case.directory / "die-n2").touch()
    case.cluster.wait_until_ended(jobs.collection, jobs.aggregation)
    assert case.cluster.state(f"{jobs.collection}_0") == "FAILED"
    log = (case.output / "slurm/0001/logs" / "collect-0.log").read_text()
    assert "the server ended while it was needed" in log
    assert "no memory left on n2" in log
    assert {row["server"] for row in case.rows(0, 0)} <= {"n1", "n2"}
    assert case.rows(0, 1) == []


class Training:
    """A training command in a job, with the stand-in for `nemo-rl`."""

    def __init__(self, case: Case) -> None:
        self.case, self.directory = case, case.directory / "jobs" / "0001"
        program = f"slurm.program=[{sys.executable},-m,tests.fakes.training_program]"
        own = (program, f"slurm.directory={case.directory / 'jobs'}", f"slurm.job_name={case.directory.name}")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "nemo_rl",
                "submit",
                *own,
                "slurm.time=00:10:00",
                "--",
                "grpo",
                "--config",
                "quickstart",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=REAL_DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.splitlines()[0].removeprefix("training: job ")

    def log(self) -> str:
        path = self.directory / "train.log"
        return path.read_text() if path.exists() else self.case.cluster.queue()

    def checkpoint(self, name: str) -> str:
        path = self.directory / "checkpoints" / name
        return path.read_text() if path.exists() else ""

    def finish(self) -> list[str]:
        """Let the steps go on, and return the nodes of all starts once the job is done."""
        (self.directory / "checkpoints" / "go").touch()
        self.case.cluster.wait_until_ended(self.job)
        assert self.case.cluster.state(self.job) == "COMPLETED", self.log()
        assert self.checkpoint("step") == "3"
        return self.checkpoint("nodes").split()


def test_training_on_a_drained_node_goes_on_on_the_other_with_its_checkpoints(case: Case) -> None:
    training, cluster = Training(case), case.cluster
    wait_until(lambda: training.checkpoint("step") == "1", training.log)
    [node] = training.checkpoint("nodes").split()
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    try:
        cluster.run("scontrol", "requeue", training.job)
        wait_until(lambda: len(training.checkpoint("nodes").split()) == 2, training.log)
        assert training.finish() == [node, "n2" if node == "n1" else "n1"]
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_training_at_its_time_limit_saves_and_is_requeued(case: Case) -> None:
    training = Training(case)
    wait_until(lambda: training.checkpoint("step") == "1", training.log)
    case.cluster.run("scancel", "--signal=USR1", "--batch", training.job)  # as Slurm does at that time
    wait_until(lambda: len(training.checkpoint("nodes").split()) == 2, training.log)
    assert len(training.finish()) == 2
    assert "requeued: the time limit is near" in training.log()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_real_collection_in_chunks_of_which_one_was_killed_equals_the_unchunked_one(case: Case) -> None:
    small = ("collect.seeds=0,1", f"data.input.size={REAL_TASKS}", "server.backend=hf", "collect.concurrency=2")
    arguments = (*small, "slurm.num_chunks=2", "slurm.sbatch_args=[--exclusive]")
    nemo_rl("collect", *small, f"collect.output_dir={case.directory / 'whole'}", f"collect.num_repeats={NUM_REPEATS}")
    first = case.submit_real(*arguments)
    case.wait_for_rows(first, 1, 1, 0, REAL_DEADLINE_S)
    case.cluster.run("scancel", "--signal=KILL", "--full", f"{first.collection}_2")
    case.cluster.wait_until_ended(first.collection, first.aggregation, deadline_s=REAL_DEADLINE_S)
    kept = case.rows(1, 0)
    second = case.submit_real(*arguments)
    assert "--array=2\n" in (case.output / "slurm/0002/collect.sbatch").read_text()
    case.cluster.wait_until_ended(second.collection, second.aggregation, deadline_s=REAL_DEADLINE_S)
    assert case.cluster.state(second.aggregation) == "COMPLETED", case.logs()
    assert case.rows(1, 0)[: len(kept)] == kept
    merged = [json.loads(line) for line in (case.output / "rollouts.jsonl").read_text().splitlines()]
    assert len(merged) == 2 * REAL_TASKS * NUM_REPEATS
    assert sampled(merged) == sampled(
        [
            json.loads(line)
            for seed in (0, 1)
            for line in ShardFiles.of(case.directory / "whole", seed).rollouts.read_text().splitlines()
        ]
    )


def sampled(rows: list[dict[str, Any]]) -> dict[tuple[int, int, int], tuple[float, str]]:
    """Reward and response of each rollout."""
    return {
        (row["seed"], row["task_index"], row["rollout_index"]): (row["reward"], row["messages"][-1]["content"])
        for row in rows
    }
