"""examples/agents/swe_bench_tasks.py: rows of SWE-bench as tasks, rewarded by their hidden tests in a container."""

import json
import subprocess
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from tests.contracts.test_harbor import has_containers
from tests.contracts.test_harbor_harness import rollout

SCRIPT = Path(__file__).parents[2] / "examples" / "agents" / "swe_bench_tasks.py"
BROKEN, WORKING = "def double(n):\n    return n * n\n", "def double(n):\n    return n + n\n"
OLD_TEST = """import unittest
from maths import double


class Doubles(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
NEW_TEST = f"{OLD_TEST}\n    def test_three(self):\n        self.assertEqual(double(3), 6)\n"
FILES = {"maths.py": BROKEN, "checks/test_double.py": OLD_TEST, "checks/test_gone.py": "raise SystemExit\n"}
FAILING, PASSING = "checks.test_double.Doubles.test_three", "checks.test_double.Doubles.test_two"


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An instance of the repository ann/maths, whose bare clone is in `clones`."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    (source / "checks").mkdir(parents=True)
    git(source, "init", "--quiet")
    for name, text in FILES.items():
        (source / name).write_text(text)
    git(source, "add", ".")
    git(source, "commit", "--quiet", "-m", "base")
    commit = git(source, "rev-parse", "HEAD").strip()
    (source / "checks" / "test_double.py").write_text(NEW_TEST)
    (source / "checks" / "test_gone.py").unlink()
    (source / "checks" / "new.txt").write_text("new\n")
    git(source, "add", "-A")
    patch = git(source, "diff", "--cached")
    git(source, "commit", "--quiet", "-m", "later")
    git(tmp_path, "clone", "--quiet", "--bare", str(source), "clones/ann__maths")
    return {
        "instance_id": "ann__maths-1",
        "repo": "ann/maths",
        "base_commit": commit,
        "problem_statement": "double(3) is 9.",
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps([FAILING]),
        "PASS_TO_PASS": [PASSING],
    }


def convert(row: dict[str, Any]) -> int:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    places = ["--repositories", "clones", "--output", "tasks"]
    return run_path(str(SCRIPT))["main"](["rows.jsonl", *places, "--test-command", "python3 -m unittest"])


def test_a_task_has_the_files_of_its_commit_and_hides_the_tests(row: dict[str, Any], tmp_path: Path) -> None:
    assert convert(row) == 0
    task = tmp_path / "tasks" / "ann__maths-1"
    environment = task / "environment"
    found = {str(path.relative_to(environment)): path.read_text() for path in environment.rglob("*.*")}
    assert found == FILES
    assert (task / "instruction.md").read_text() == "double(3) is 9.\n"
    assert (task / "tests" / "removed.txt").read_text() == "checks/test_gone.py\n"
    files = sorted(str(path.relative_to(task / "tests" / "files")) for path in (task / "tests" / "files").rglob("*.*"))
    assert files == ["checks/new.txt", "checks/test_double.py"]


@pytest.mark.skipif(not has_containers(), reason="bubblewrap starts no container on this machine")
@pytest.mark.parametrize(
    ("work", "reward"),
    [
        ("pass", 0.0),
        (f"open('maths.py', 'w').write({WORKING!r})", 1.0),
        ("open('maths.py', 'w').write('def double(n):\\n    return 6\\n')", 0.0),  # breaks the test that passed
        ("os.makedirs('checks', exist_ok=True); open('checks/test_double.py', 'w').write('')", 0.0),
    ],
)
def test_the_hidden_tests_reward_what_the_harness_leaves(
    work: str, reward: float, row: dict[str, Any], tmp_path: Path
) -> None:
    assert convert(row) == 0
    trajectory = rollout(f'ask(settings["url"], "x")\n{work}\n', tmp_path / "tasks" / "ann__maths-1")
    assert (trajectory.failure, trajectory.rewards) == (None, {"harbor": reward})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"repo": "ann/other"}, "ann/other has no clone at clones/ann__other"),
        ({"repo": "../../etc"}, "repo is '../../etc'"),
        ({"instance_id": "../x"}, "instance_id is '../x'"),
        ({"base_commit": "--help"}, "base_commit is '--help'"),
        ({"base_commit": "0" * 40}, "git read-tree: fatal: "),
        ({"test_patch": "no patch"}, "git apply: error: "),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"PASS_TO_PASS": "x"}, "PASS_TO_PASS is 'x', not a list"),
        ({"problem_statement": None}, "problem_statement is None"),
    ],
)
def test_a_row_that_is_no_task_is_named(
    change: dict[str, Any], problem: str, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(row | change) == 1
    assert capsys.readouterr().err.startswith(f"DataError: rows.jsonl, row 1: {problem}")
    assert not Path("tasks").exists()
