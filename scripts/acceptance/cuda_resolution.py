"""Does the extra `cuda` resolve to packages of one CUDA version? For Python 3.11 and 3.12, on any machine; a minute.

uv run scripts/acceptance/cuda_resolution.py

Resolves pyproject.toml with `uv pip compile` for Linux on x86-64 and downloads no package. Packages of two CUDA
versions write the same files. If the index cannot be reached the check is skipped, and says so.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12")
DEADLINE_S = 900.0
VERSIONED = frozenset({"cuda-bindings", "cuda-python", "cuda-toolkit"})  # major version: that of CUDA
IN_NAME = re.compile(r"-cu(\d{2})$")
BOTH = frozenset({"nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"})  # nvidia-cutlass-dsl requires both
UNREACHABLE = ("dns error", "error sending request", "Failed to fetch", "timed out", "Connection refused")


def cuda_majors(requirements: Iterable[str]) -> dict[str, int]:
    """Return the CUDA major version of each resolved package that has one: cuda-python==13.4 has 13."""
    found: dict[str, int] = {}
    for line in requirements:
        name, separator, version = line.strip().partition("==")
        if not separator or name in BOTH:
            continue
        if suffix := IN_NAME.search(name):
            found[name] = int(suffix[1])
        elif name in VERSIONED:
            found[name] = int(version.partition(".")[0])
    return found


def resolve(python: str) -> list[str] | None:
    """Return the extra's resolved requirements, None if the index cannot be reached."""
    command = [
        "uv",
        "pip",
        "compile",
        "-q",
        "--no-header",
        "--no-annotate",
        "--extra",
        "cuda",
        "--python-version",
        python,
    ]
    command += ["--python-platform", "x86_64-unknown-linux-gnu", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode == 0:
        return done.stdout.splitlines()
    if any(text in done.stderr for text in UNREACHABLE):
        return None
    raise SystemExit(f"Python {python}: the extra cuda does not resolve: {done.stderr.strip()}")


def main() -> int:
    failed = False
    for python in PYTHONS:
        requirements = resolve(python)
        if requirements is None:
            print(f"SKIPPED Python {python}: the package index cannot be reached")
            continue
        majors = cuda_majors(requirements)
        is_one = len(set(majors.values())) == 1 and majors.keys() >= VERSIONED
        failed |= not is_one
        shown = ", ".join(f"{name} {major}" for name, major in sorted(majors.items()))
        print(f"{'ok' if is_one else 'FAILED'} Python {python}: {shown}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
