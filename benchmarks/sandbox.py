"""Cost of a call of the sandbox: own launcher, bubblewrap, and an earlier revision's launcher, in turns.

uv run benchmarks/sandbox.py --before cb434dd --calls 200

A call prints one number. Wall time is what an episode waits; CPU time, of the calling process and of the one that it
starts, says more on a machine that does other work. The bare interpreter is `python -I -c pass`.
"""

import argparse
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_rl.environments import sandbox

ROOT = Path(__file__).parents[1]
FILES = ("sandbox.py", "sandbox_launcher.py")
CODE, OUTPUT = "print(6 * 7)", "42"
LIMITS = sandbox.SandboxLimits(cpu_s=20, wall_s=60)
BAR_RATIO = 1.15

Call = Callable[[], str]


def current(without: str) -> Call:
    """Return the call of this revision, without some layers of the sandbox."""
    os.environ[sandbox.WITHOUT_VARIABLE] = without
    sandbox.isolation.cache_clear()
    isolation = sandbox.isolation()
    print(f"without {without or 'nothing'}: {isolation}")

    def call() -> str:
        os.environ[sandbox.WITHOUT_VARIABLE] = without
        sandbox.isolation = lambda: isolation
        return sandbox.run_python(CODE, LIMITS)

    return call


def bare_interpreter() -> str:
    """Start the interpreter, for nothing."""
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    return OUTPUT


def earlier(revision: str, directory: Path) -> Call:
    """Return the call of another revision, whose two files are written to `directory`."""
    for name in FILES:
        path = f"{revision}:nemo_rl/environments/{name}"
        (directory / name).write_bytes(subprocess.run(["git", "show", path], cwd=ROOT, check=True, stdout=-1).stdout)
    spec = importlib.util.spec_from_file_location("earlier_sandbox", directory / FILES[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    limits = module.SandboxLimits(cpu_s=20, wall_s=60)
    return lambda: module.run_python(CODE, limits)


def measure(calls: Mapping[str, Call], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of every call, by name; each round has one call of each."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), _cpu_s()
            output = call()
            seconds[name].append((time.perf_counter() - wall, _cpu_s() - cpu))
            if output != OUTPUT:
                raise RuntimeError(f"{name}: {output!r} instead of {OUTPUT!r}")
    return seconds


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="of each kind")
    parser.add_argument("--before", help="a git revision to compare with")
    parsed = parser.parse_args()
    calls = {"bare interpreter": bare_interpreter, "own launcher": current("bubblewrap")}
    if shutil.which("bwrap"):
        calls["bubblewrap"] = current("")
    with tempfile.TemporaryDirectory() as directory:
        if parsed.before:
            calls[f"launcher of {parsed.before}"] = earlier(parsed.before, Path(directory))
        measure(calls, 2)
        seconds = measure(calls, parsed.calls)
    print("| call | wall p50 | wall p99 | CPU p50 | CPU p99 |\n|---|---|---|---|---|")
    for name, pairs in seconds.items():
        columns = [sorted(column) for column in zip(*pairs, strict=True)]
        cells = [f"{1000 * column[int(q * (len(column) - 1))]:.0f} ms" for column in columns for q in (0.5, 0.99)]
        print(f"| {name} | {' | '.join(cells)} |")
    if not parsed.before:
        return 0
    now, before = ([cpu for _, cpu in seconds[name]] for name in ("own launcher", f"launcher of {parsed.before}"))
    ratio = statistics.median(a / b for a, b in zip(now, before, strict=True))
    print(f"CPU of the own launcher / before, median of {len(now)} pairs: {ratio:.2f} (bar: {BAR_RATIO})")
    return 0 if ratio <= BAR_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
