"""A copy of the package without a leaf still runs: its command says what is missing, the others work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.quick import quick

ROOT = Path(__file__).parents[2]
VERBS = {"viewer": "view", "jobs": "submit", "doctor": "doctor", "trained": "export"}
CHECK = """
from nemo_rl import cli
assert cli.run(["--help"]) == 0
for package, verb in {verbs}.items():
    assert cli.run([verb, "--help"]) == 2, verb
assert cli.run(["config", "schema"]) == 0
assert cli.run(["config", "explain", "grpo.seed"]) == 0
assert cli.run(["grpo", "--config", "quickstart", "--dry-run"]) == 0
"""


@pytest.mark.parametrize("leaves", quick([*([leaf] for leaf in VERBS), list(VERBS)], [list(VERBS)]), ids="+".join)
def test_a_deleted_leaf_leaves_a_working_package(leaves: list[str], tmp_path: Path) -> None:
    for name in ("nemo_rl", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", *leaves))
    code = CHECK.format(verbs={leaf: VERBS[leaf] for leaf in leaves})
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for leaf in leaves:
        assert f"nemo-rl {VERBS[leaf]}: this installation lacks the package nemo_rl.{leaf}\n" in done.stderr
