"""The real `nemo-rl collect`, killed and continued; scripts/acceptance/collect.py does it at full size."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.functional.cli import DEADLINE_S, ROOT, environment

pytestmark = pytest.mark.timeout(1200)  # three starts one after the other, perhaps beside other work
CODE = "import sys; from nemo_rl.cli import run; sys.exit(run(sys.argv[1:]))"
TASKS, REPEATS = 60, 4


def command(output: Path, *overrides: str) -> list[str]:
    given = [f"collect.output_dir={output}", f"collect.limit={TASKS}", f"collect.num_repeats={REPEATS}"]
    quick = ["collect.concurrency=16", "server.backend=hf", "logger.progress=false"]
    return [sys.executable, "-c", CODE, "collect", *given, *quick, *overrides]


def run(output: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(output, *overrides),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_killed_collection_goes_on_to_each_rollout_once(tmp_path: Path) -> None:
    output = tmp_path / "out"
    rollouts = output / "rollouts-rs0.jsonl"
    process = subprocess.Popen(
        command(output),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    ends_at = time.monotonic() + DEADLINE_S
    while not (rollouts.exists() and rollouts.read_bytes().count(b"\n") >= 16):
        assert process.poll() is None
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    stored = rollouts.read_bytes()
    stored = stored[: stored.rfind(b"\n") + 1]

    continued = run(output)
    assert continued.returncode == 0, continued.stderr
    assert f"{TASKS * REPEATS} of {TASKS * REPEATS} in {output}" in continued.stdout
    assert rollouts.read_bytes().startswith(stored)
    keys = [(row["task_index"], row["rollout_index"]) for row in map(json.loads, rollouts.read_text().splitlines())]
    assert len(keys) == len(set(keys)) == TASKS * REPEATS
    assert (output / "rollouts-rs0.jsonl.done").exists()

    refused = run(output, "policy.generation.temperature=0.5")
    assert refused.returncode == 2
    assert "run.config.generation.temperature: was 1.0, is 0.5" in refused.stderr
