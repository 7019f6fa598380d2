"""Harbor tasks from rows of SWE-bench: a directory per instance, whose hidden tests decide the reward.

swe_bench_tasks.py rows.jsonl --repositories clones --output tasks

A row has SWE-bench's fields `instance_id`, `repo`, `base_commit`, `problem_statement`, `test_patch`, `FAIL_TO_PASS` and
`PASS_TO_PASS`. A repository owner/name is a clone at clones/owner__name, bare or not, which stays as it is. The reward
is 1 if all of these tests pass with the test files of `test_patch`, whatever the policy left in their place.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import DataError

TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch")
PATTERNS = {
    "instance_id": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),  # names a directory
    "repo": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+"),
    "base_commit": re.compile(r"[0-9a-f]{7,64}"),
}
TASK = 'version = "1.0"\n'
TEST_SCRIPT = """cd /app
while IFS= read -r path; do rm -rf -- "$path"; done </tests/removed.txt
cp -r --remove-destination /tests/files/. .
mapfile -t names </tests/names.txt
reward=0
{command} "${{names[@]}}" && reward=1
echo "$reward" >/logs/verifier/reward.txt
"""
GIT_TIMEOUT_S = 600.0


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        for index, row in enumerate(read_jsonl(parsed.rows)):
            try:
                write_task(read_instance(row), parsed.repositories, parsed.output, parsed.test_command)
            except DataError as error:
                raise DataError(f"{parsed.rows}, row {index + 1}: {error}") from error
    except DataError as error:
        sys.stderr.write(f"DataError: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSON Lines, as the dataset's files have them")
    parser.add_argument("--repositories", type=Path, required=True, help="directory of clones")
    parser.add_argument("--output", type=Path, required=True, help="directory of the tasks")
    parser.add_argument(
        "--test-command", default="python3 -m pytest -q", help="a shell command that takes tests' names"
    )
    return parser


@dataclass(frozen=True, slots=True)
class Instance:
    """One row."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    test_patch: str
    tests: tuple[str, ...]  # that must pass


def read_instance(row: Mapping[str, Any]) -> Instance:
    """Return the fields of a row; raises DataError for one that is missing or malformed."""
    texts: dict[str, str] = {}
    for name in TEXTS:
        value = row.get(name)
        if not isinstance(value, str) or (name in PATTERNS and not PATTERNS[name].fullmatch(value)):
            raise DataError(f"{name} is {value!r:.80}" if name in row else f"{name} is missing")
        texts[name] = value
    failing, passing = (_read_names(row, name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not failing:
        raise DataError("FAIL_TO_PASS is empty: any patch would be right")
    return Instance(**texts, tests=(*failing, *passing))


def _read_names(row: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of tests, which the dataset's files hold as JSON text."""
    value = row.get(key)
    try:
        names = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and "\n" not in name for name in names):
        raise DataError(f"{key} is {value!r:.80}, not a list of tests' names")
    return names


def write_task(instance: Instance, repositories: Path, output: Path, test_command: str) -> None:
    """Write the directory of a task; raises DataError if its clone lacks the commit or the patch does not apply."""
    clone = repositories / instance.repo.replace("/", "__")
    if not clone.is_dir():
        raise DataError(f"{instance.repo} has no clone at {clone}")
    task = output / instance.instance_id
    environment, tests = task / "environment", task / "tests"
    if task.exists():
        raise DataError(f"{task} exists")
    with tempfile.TemporaryDirectory() as temporary:
        patched = Path(temporary) / "patched"
        git = Git(clone, patched, Path(temporary) / "index")
        git.check_out(instance.base_commit)
        changed = git.apply(instance.test_patch)
        git.run("checkout-index", "--all", f"--prefix={environment.absolute()}/")
        removed = []
        for path in changed:
            if (patched / path).exists():
                target = tests / "files" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                (patched / path).rename(target)
            else:
                removed.append(path)
    (tests / "files").mkdir(parents=True, exist_ok=True)
    (tests / "removed.txt").write_text("".join(f"{path}\n" for path in removed))
    (tests / "names.txt").write_text("".join(f"{name}\n" for name in instance.tests))
    (tests / "test.sh").write_text(TEST_SCRIPT.format(command=test_command))
    (task / "instruction.md").write_text(instance.problem_statement + "\n")
    (task / "task.toml").write_text(TASK)


class Git:
    """A work tree and an index of their own over the objects of a clone."""

    def __init__(self, clone: Path, work_tree: Path, index: Path) -> None:
        work_tree.mkdir()
        self._work_tree = work_tree
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        git_dir = clone / ".git" if (clone / ".git").exists() else clone
        own = {"GIT_DIR": git_dir.absolute(), "GIT_WORK_TREE": work_tree, "GIT_INDEX_FILE": index}
        self._environment = inherited | {name: str(path) for name, path in own.items()}

    def check_out(self, commit: str) -> None:
        self.run("read-tree", commit)
        self.run("checkout-index", "--all")

    def apply(self, patch: str) -> list[str]:
        """Apply a patch to the work tree; return the paths that it adds, changes or removes."""
        self.run("apply", "--whitespace=nowarn", "-", text=patch)
        changed = self.run("ls-files", "-z", "--modified", "--deleted", "--others")
        return sorted({path for path in changed.split("\0") if path})

    def run(self, *arguments: str, text: str = "") -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self._work_tree,
            env=self._environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise DataError(f"git {arguments[0]}: {done.stderr.strip()[:300]}")
        return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
