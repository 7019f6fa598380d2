"""NeMo Gym's own servers, trained on and collected from through the command line: the quickstart's model."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl import cli
from nemo_rl.collect.profile import iter_task_rows, profile
from nemo_rl.distributed.machine import unused_port
from tests.contracts.real_gym import MCQA, REASONING_GYM, VERSIONS, gym_environment, real_gym, stack_processes
from tests.functional.cli import DEADLINE_S, ROOT, Run, environment, run_command_line, run_directory
from tests.support.otlp_collector import attributes_of, collector, services_and_spans

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym and makes the quickstart's model

SCRIPT = ROOT / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
COLLECTION = "examples/nemo_gym/collect.yaml"
NUM_TASKS, NUM_REPEATS = 40, 2
SMALL = (
    "++data.shuffle=false",  # then the environments take turns
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=4",
    "grpo.max_val_samples=8",
    "grpo.val_period=2",
    "weight_sync.verify=true",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    command = [sys.executable, "examples/nemo_gym/make_rows.py", "quickstart", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, env=environment(), timeout=120)
    return directory


def train(rows: Path, log_dir: Path, *overrides: str) -> Run:
    return run_command_line(SCRIPT, log_dir, *SMALL, *overrides, NEMO_GYM_DATA=str(rows))


def check_steps(metrics: dict[int, dict[str, float]], *, num_steps: int, num_rollouts: int) -> None:
    """Check steps of two environments, whose tokens the policy knows as the engine does."""
    steps = range(1, num_steps + 1)
    assert [step for step in metrics if "train/loss" in metrics[step]] == [*steps]
    for step in steps:
        assert metrics[step]["train/num_rollouts"] == num_rollouts
        for name in ("infra", "environment", "agent", "reward"):
            assert metrics[step][f"train/failures/{name}"] == 0
        for agent in (REASONING_GYM, MCQA):
            assert metrics[step][f"train/env/{agent}/num_rollouts"] > 0
            assert 0 <= metrics[step][f"train/env/{agent}/reward_mean"] <= 1
        assert metrics[step]["train/max_logprob_error"] <= 1e-4


@pytest.fixture(scope="module")
def reached() -> Iterator[tuple[str, ...]]:
    """Return overrides for a stack that is already running."""
    port = unused_port()
    with real_gym(f"http://127.0.0.1:{port}/v1") as head_url:
        yield "env.nemo_gym.config_paths=null", f"++env.nemo_gym.head_url={head_url}", f"++gateway.port={port}"


@pytest.fixture(scope="module")
def run(rows: Path, reached: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(rows, tmp_path_factory.mktemp("logs"), *reached)


@pytest.mark.slow  # the documented training starts its own
def test_a_stack_that_runs_already_is_trained_on(run: Run) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = run.metrics()
    check_steps(metrics, num_steps=2, num_rollouts=4 * 8)
    assert [metrics[step][f"train/env/{MCQA}/num_rollouts"] for step in (1, 2)] == [2 * 8, 2 * 8]
    assert metrics[2]["validation/num_failed"] == 0


@pytest.mark.slow  # as above
def test_rollouts_are_written_with_the_answer_that_gym_understood(run: Run) -> None:
    assert run.directory is not None
    written = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(written) == 2 * 4 * 8
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in written)
    assert all(row["rewards"].keys() == {"nemo_gym"} for row in written)
    assert any(row["answer"] for row in written)


@pytest.mark.slow  # test_collect.py kills one
def test_an_interrupted_collection_goes_on_and_survives_the_way_through_gyms_files(
    rows: Path, reached: tuple[str, ...], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shard = output / "rollouts-rs0.jsonl"
    first = start_collection(rows, output, "collect.concurrency=1", *reached)
    ends_at = time.monotonic() + DEADLINE_S
    while not (shard.exists() and shard.read_bytes().count(b"\n") >= 4):
        assert first.poll() is None
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 130, said
    stored = shard.read_bytes()
    assert 4 <= stored.count(b"\n") < NUM_TASKS * NUM_REPEATS

    second = start_collection(rows, output, *reached)
    said, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, said
    assert shard.read_bytes().startswith(stored)
    assert (output / "rollouts-rs0_failures.jsonl").read_bytes() == b""

    gyms, again = output / "gym" / "run.jsonl", tmp_path / "again"
    assert cli.run(["merge", str(output), "--to-nemo-gym", str(gyms)]) == 0
    merged = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    every = [(task, repeat) for task in range(NUM_TASKS) for repeat in range(NUM_REPEATS)]
    assert [(row["task_index"], row["rollout_index"]) for row in merged] == every
    exported = [json.loads(line) for line in gyms.read_text().splitlines()]
    assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in exported] == every
    assert {row["agent_ref"]["name"] for row in exported} == {REASONING_GYM, MCQA}
    assert {row["dataset"] for row in merged} == {REASONING_GYM, MCQA}
    said_in_gym = [row["response"]["output"][0]["content"][0]["text"] for row in exported]
    assert said_in_gym == [row["messages"][-1]["content"] for row in merged]

    assert cli.run(["merge", str(again), "--from-nemo-gym", str(gyms)]) == 0
    ours, back = ([*iter_task_rows(profile(directory))] for directory in (output, again))
    assert [statistics_of(row) for row in back] == [statistics_of(row) for row in ours]
    assert any(reward > 0 for row in ours for reward in row["rollout_rewards"])


def start_collection(rows: Path, output: Path, *overrides: str) -> "subprocess.Popen[str]":
    counts = (f"collect.limit={NUM_TASKS}", f"collect.num_repeats={NUM_REPEATS}", f"collect.output_dir={output}")
    return subprocess.Popen(
        [sys.executable, "-m", "nemo_rl", "collect", "--config", COLLECTION, *counts, "server.backend=hf", *overrides],
        cwd=ROOT,
        env={**environment(), "NEMO_GYM_DATA": str(rows)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def statistics_of(task: dict[str, Any]) -> dict[str, Any]:
    """Without what names the task and its data."""
    of_data = ("prompt_id", "task_name", "row")
    return {name: value for name, value in task.items() if name not in of_data}


@pytest.mark.parametrize("version", [pytest.param(VERSIONS[0], marks=pytest.mark.slow), VERSIONS[1]])
def test_the_documented_training_starts_and_stops_a_stack(version: str, fresh_directory: Path) -> None:
    gym_environment(version)
    run_documented(fresh_directory, "examples/nemo_gym/make_rows.py", "quickstart")
    few = ("grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.val_at_end=false", "grpo.max_val_samples=8")
    with collector() as (address, received):
        traced = ("logger.trace.enabled=true", f"logger.trace.otlp_endpoint={address}")
        options = (f"++env.nemo_gym.version={version}", *few, *traced, "weight_sync.verify=true")
        run_documented(fresh_directory, "examples/nemo_gym/run_grpo_nemo_gym.py", *options)
    directory = run_directory(fresh_directory / "runs")
    metrics = Run(0, "", "", directory).metrics()
    check_steps(metrics, num_steps=2, num_rollouts=8 * 8)
    assert directory is not None
    assert not stack_processes(directory / "nemo_gym" / "env.yaml")
    assert metrics[0]["validation/num_failed"] == 0
    check_traces(received, num_steps=2, num_rollouts=2 * 8 * 8)


def check_traces(received: list[Any], *, num_steps: int, num_rollouts: int) -> None:
    """Check that each rollout's trace, that of its step, has the spans of its servers and of the gateway."""
    spans = [*services_and_spans(received)]
    by_id = {each.span_id: each for _, each in spans}
    steps = {each.trace_id for _, each in spans if each.name == "total_step_time"}
    rollouts = {key: each for key, each in by_id.items() if each.name == "rollout" and each.trace_id in steps}
    assert (len(steps), len(rollouts)) == (num_steps, num_rollouts)
    services: dict[bytes, list[str]] = {key: [] for key in rollouts}
    for service, each in spans:
        ancestor = each
        while ancestor.span_id not in rollouts and ancestor.parent_span_id in by_id:
            ancestor = by_id[ancestor.parent_span_id]
        if ancestor.span_id in rollouts:
            services[ancestor.span_id].append(service)
            assert each.trace_id == rollouts[ancestor.span_id].trace_id
            if service == "nemo-rl" and attributes_of(each)["rl.track"] == "gateway" and each.name == "generation":
                services[ancestor.span_id].append("gateway")
    for key, found in services.items():
        agent = attributes_of(rollouts[key])["env"]
        servers = (agent, agent.removesuffix("_simple_agent"), "policy_model")
        assert {f"nemo-gym/{name}" for name in servers} < {*found}
        assert found.count("gateway") == 1


@pytest.mark.parametrize("version", [VERSIONS[0], pytest.param(VERSIONS[1], marks=pytest.mark.slow)])
def test_the_documented_collection_starts_and_stops_a_stack(version: str, fresh_directory: Path) -> None:
    gym_environment(version)
    run_documented(fresh_directory, "examples/nemo_gym/make_rows.py", "quickstart")
    arguments = ("--config", COLLECTION, f"++env.nemo_gym.version={version}", f"collect.limit={NUM_TASKS}")
    run_documented(fresh_directory, "-m", "nemo_rl", "collect", *arguments)
    output = fresh_directory / "collections" / "nemo_gym"
    rows = [json.loads(line) for line in (output / "rollouts-rs0.jsonl").read_text().splitlines()]
    assert sorted((row["task_index"], row["rollout_index"]) for row in rows) == [
        (task, repeat) for task in range(NUM_TASKS) for repeat in range(4)
    ]
    assert (output / "rollouts-rs0_failures.jsonl").read_bytes() == b""
    assert not stack_processes(output / "nemo_gym" / "nemo_gym" / "env.yaml")


@pytest.fixture
def fresh_directory(tmp_path: Path) -> Path:
    """A directory with the examples alone, as a fresh clone: its paths are relative, and nothing has run in it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run_documented(directory: Path, *command: str) -> None:
    """Run a command of docs/nemo_gym.md or docs/collecting.md."""
    inherited = {name: value for name, value in environment().items() if not name.startswith("NEMO_GYM_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
