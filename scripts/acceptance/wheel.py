"""Does the wheel train without the repository? Installed by pip alone and by uv alone; minutes and gigabytes each.

uv run scripts/acceptance/wheel.py pip        a clean virtual environment, pip alone
uv run scripts/acceptance/wheel.py uv         the same, uv alone

Builds the wheel twice (the two must be identical), installs it with the extra `cpu`, then runs nemo-rl init and
nemo-rl grpo in an empty directory; the held-out accuracies must reach the quickstart's bars.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from learning import GREEDY_END, GREEDY_GAIN, SAMPLED_END, SAMPLED_START_BELOW

ROOT = Path(__file__).parents[2]
SOURCE_DATE_EPOCH = "1700000000"


def build(directory: Path) -> Path:
    """Build the wheel twice; return one of the two, which are identical."""
    wheels = []
    for name in ("first", "second"):
        call("uv", "build", "--wheel", "-q", "-o", directory / name, cwd=ROOT)
        wheels.append(next((directory / name).glob("*.whl")))
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    if first != second:
        raise SystemExit(f"two builds differ: {first}, {second}")
    return wheels[0]


def install(installer: str, wheel: Path, directory: Path) -> Path:
    """Install the wheel and the engine in a clean environment; return its programs' directory."""
    programs = directory / "bin"
    call(*((sys.executable, "-m", "venv") if installer == "pip" else ("uv", "venv", "-q")), directory)
    to_python = ("--python", programs / "python") if installer == "uv" else ()
    pip = (programs / "pip", "install") if installer == "pip" else ("uv", "pip", "install", "--compile-bytecode")
    call(*pip, "-q", *to_python, f"nemo-rl[cpu] @ {wheel.as_uri()}")
    engine = call(programs / "nemo-rl", "constraints", "--engine", "cpu").strip()
    call(*pip, "-q", *to_python, "--no-deps", engine)
    return programs


def learn(programs: Path, directory: Path) -> bool:
    """Run a new project to its end; print and judge its accuracies."""
    call(programs / "nemo-rl", "init", "project", cwd=directory)
    started = time.monotonic()
    call(programs / "nemo-rl", "grpo", cwd=directory / "project", NEMO_RL_CACHE=str(directory / "cache"))
    seconds = time.monotonic() - started
    lines = next((directory / "project" / "runs").glob("exp_*/metrics.jsonl")).read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "validation/accuracy" in row]
    (s0, g0), (s1, g1) = (
        (row["validation/accuracy"], row["validation/greedy_accuracy"]) for row in (rows[0], rows[-1])
    )
    print(f"sampled {s0:.3f} -> {s1:.3f}, greedy {g0:.3f} -> {g1:.3f}, {seconds:.0f} s")
    return s0 < SAMPLED_START_BELOW and s1 >= SAMPLED_END and g1 - g0 >= GREEDY_GAIN and g1 >= GREEDY_END


def call(*words: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command without the repository on its path; return what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, "WANDB_MODE": "offline", **variables}
    return subprocess.run(words, cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("installer", choices=["pip", "uv"])
    chosen = parser.parse_args().installer
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        sys.exit(not learn(install(chosen, build(base), base / "environment"), base))
