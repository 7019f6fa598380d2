"""NeMo Gym's own servers, trained through the command line: real vLLM, the quickstart's model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.real_gym import MCQA, REASONING_GYM, real_gym, unused_port
from tests.functional.cli import ROOT, Run, environment, run_command_line

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym and makes the quickstart's model

SCRIPT = ROOT / "examples" / "nemo_gym" / "run_grpo_nemo_gym.py"
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
    folder = tmp_path_factory.mktemp("rows")
    command = [sys.executable, "examples/nemo_gym/make_rows.py", "quickstart", "--folder", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=environment(), timeout=120)
    return folder


def train(rows: Path, log_dir: Path, *overrides: str) -> Run:
    return run_command_line(SCRIPT, log_dir, *SMALL, *overrides, NEMO_GYM_DATA=str(rows))


def check(run: Run) -> None:
    """Two steps of two environments, whose tokens the policy knows as the engine does."""
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = run.metrics()
    assert [step for step in metrics if "train/loss" in metrics[step]] == [1, 2]
    for step in (1, 2):
        assert metrics[step]["train/num_rollouts"] == 4 * 8
        for name in ("infra", "environment", "agent", "reward"):
            assert metrics[step][f"train/failures/{name}"] == 0
        for agent in (REASONING_GYM, MCQA):
            assert metrics[step][f"train/env/{agent}/num_rollouts"] == 2 * 8
            assert 0 <= metrics[step][f"train/env/{agent}/reward_mean"] <= 1
        assert metrics[step]["train/max_logprob_error"] <= 1e-4
    assert metrics[2]["validation/num_failed"] == 0


@pytest.fixture(scope="module")
def run(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    port = unused_port()
    with real_gym(f"http://127.0.0.1:{port}/v1") as head_url:
        reached = ("env.nemo_gym.config_paths=null", f"++env.nemo_gym.head_url={head_url}", f"++gateway.port={port}")
        yield train(rows, tmp_path_factory.mktemp("logs"), *reached)


def test_a_stack_that_runs_already_is_trained_on(run: Run) -> None:
    check(run)


def test_rollouts_are_written_with_the_answer_that_gym_understood(run: Run) -> None:
    assert run.directory is not None
    written = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(written) == 2 * 4 * 8
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in written)
    assert all(row["rewards"].keys() == {"nemo_gym"} for row in written)
    assert any(row["answer"] for row in written)


@pytest.mark.slow
def test_a_stack_is_started_and_stopped_with_the_run(rows: Path, tmp_path: Path) -> None:
    check(train(rows, tmp_path))
