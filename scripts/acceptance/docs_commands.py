"""The slow fenced commands of README.md and docs/, as they are written, in one directory; minutes each, nightly.

PYTHONPATH=. uv run scripts/acceptance/docs_commands.py                    all of them, in the order of commands.yaml
PYTHONPATH=. uv run scripts/acceptance/docs_commands.py --only run_eval    those whose text has a word
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.docs.fenced import FencedCommand, load_class, prepare, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the commands to run")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="of each command")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        chosen = [command for command in load_class("slow") if arguments.only in command.text]
        failed = [command for command in chosen if not _passes(command, directory, arguments.deadline_s)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} passed")
    return int(bool(failed) or not chosen)


def _passes(command: FencedCommand, directory: Path, deadline_s: float) -> bool:
    started = time.monotonic()
    try:
        done = run(command, directory, deadline_s)
    except subprocess.TimeoutExpired:
        print(f"FAILED  no end in {deadline_s:.0f} s  {command.shell}", flush=True)
        return False
    is_right = command.exit_code is None or done.returncode == command.exit_code
    print(f"{'ok    ' if is_right else 'FAILED'}  {time.monotonic() - started:.0f} s  {command.shell}", flush=True)
    if not is_right:
        print(f"exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", flush=True)
    return is_right


if __name__ == "__main__":
    sys.exit(main())
