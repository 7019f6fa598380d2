"""Kills of a supervised run lose nothing: the cheapest scenario of scripts/acceptance/chaos.py, a few times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.acceptance.survival import TrainedStep, compare
from tests.functional.cli import DEADLINE_S, ROOT, environment

KILLS = 3


def rollout(prompt_id: str, reward: float | None = 1.0, failure: str | None = None) -> dict[str, object]:
    return {"prompt_id": prompt_id, "generation_index": 0, "reward": reward, "failure": failure}


def test_the_comparison_counts_what_is_lost_repeated_and_invented() -> None:
    wanted = {1: TrainedStep((0.5,), [rollout("a"), rollout("b")]), 2: TrainedStep((0.25,), [rollout("c")])}
    assert set(compare(wanted, wanted).values()) == {2, 0}
    found = {1: TrainedStep((0.75,), [rollout("a", 1.0, "it died"), rollout("d")])}
    assert compare(wanted, found) == {
        "steps": 1,
        "lost": 2,  # b, and c with its step
        "trained_twice": 1,  # d, which is of no step of the reference here
        "invented_rewards": 1,
        "different_steps": 2,
        "largest_difference": 0.25,
    }


@pytest.mark.slow  # two whole runs; test_interrupt_and_resume.py kills one
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_that_is_killed_trains_on_the_same_as_one_in_peace(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "acceptance" / "chaos.py")
    options = f"--scenario short --seed 4 --kills {KILLS} --steps 20 --budget-s {DEADLINE_S} --directory".split()
    done = subprocess.run(
        [sys.executable, script, *options, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1.5 * DEADLINE_S,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "short" / "results.jsonl").read_text().splitlines()]
    faults = [fault for result in results for fault in result["faults"]]
    assert len(faults) == KILLS
    assert all(fault["recovered_s"] is not None for fault in faults)
    for result in results:
        assert result["steps"] == 20
        assert (result["lost"], result["trained_twice"], result["invented_rewards"]) == (0, 0, 0)
        assert (result["different_steps"], result["same_weights"], result["left_over"]) == (0, True, 0)
