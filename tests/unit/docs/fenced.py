"""The fenced commands of the pages by class (commands.yaml), and a directory in which they run as they are written."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.launch.project import write_project
from tests.unit.docs.pages import DOCS, PAGES, ROOT, commands, fenced_blocks

TABLE = Path(__file__).with_name("commands.yaml")
RECIPE = "defaults: quickstart\n"
FILES = {
    "my_recipe.yaml": RECIPE,
    "recipe.yaml": RECIPE,
    "rows.jsonl": '{"input": "a", "output": "b"}\n{"input" "c"}\n',
}
# `uv run` here: the options and the script or program, in this interpreter's environment.
UV = f"""#!/usr/bin/env bash
[[ $1 == run ]] || exit 64
shift
while [[ $1 == --extra || $1 == --group || $1 == --no-group || $1 == --project ]]; do shift 2; done
[[ $1 == *.py ]] && exec {sys.executable} "$@"
exec "$@"
"""
NEMO_RL = f"""#!/usr/bin/env bash
exec {sys.executable} -m nemo_rl "$@"
"""


@dataclass(frozen=True, slots=True)
class FencedCommand:
    """A command of a page that a job runs."""

    text: str
    exit_code: int | None = 0  # None: any
    suffix: str = ""  # appended, so that it ends sooner

    @property
    def shell(self) -> str:
        """The line that is run."""
        return f"{self.text} {self.suffix}".strip()


def load_class(name: str) -> list[FencedCommand]:
    """Return the commands of the class `quick` or `slow`, in the table's order."""
    found = []
    for row in yaml.safe_load(TABLE.read_text(encoding="utf-8"))[name]:
        keys: dict[str, Any] = {"run": row} if isinstance(row, str) else row
        code = keys.get("exit", 0)
        found.append(FencedCommand(keys["run"], None if code == "any" else code, keys.get("with", "")))
    return found


def load_elsewhere() -> dict[str, list[str]]:
    """Return the commands that no job of the pages runs, by the reason."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))["elsewhere"]


def find_commands() -> dict[str, set[str]]:
    """Return the pages of each fenced command; spaces do not tell two commands apart."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for command in commands(page.read_text(encoding="utf-8")):
            found.setdefault(normalize(command), set()).add(page.name)
    return found


def normalize(command: str) -> str:
    return " ".join(command.split())


def prepare(directory: Path) -> None:
    """Make a directory the reader's: a project of `nemo-rl init`, the files that the tutorials let them write, the
    checkout's scripts, and `uv` and `nemo-rl`, which run in this interpreter's environment.
    """
    write_project(directory)
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        for _, block in fenced_blocks(page.read_text(encoding="utf-8")):
            if match := re.match(r"# (\w+\.(?:py|yaml))\n", block):
                with (directory / match[1]).open("a", encoding="utf-8") as file:
                    file.write(f"\n\n{block}")
    for name, text in FILES.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "examples" / "nemo_gym").mkdir(parents=True)
    for path in (ROOT / "examples").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".env":
            target = directory / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    (directory / "scripts").symlink_to(ROOT / "scripts")
    (directory / "bin").mkdir()
    for name, text in {"uv": UV, "nemo-rl": NEMO_RL}.items():
        (directory / "bin" / name).write_text(text, encoding="utf-8")
        (directory / "bin" / name).chmod(0o755)


def run(command: FencedCommand, directory: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a prepared directory. Raises subprocess.TimeoutExpired."""
    variables = {
        **os.environ,
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{directory}",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    return subprocess.run(
        ["bash", "-c", command.shell],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
