#!/usr/bin/env python3
"""The first day on a machine with GPUs: real runs in order of their worth, within a budget of minutes.

scripts/acceptance/gpu.py                 one GPU and a network: at most 25 minutes
scripts/acceptance/gpu.py more            what else one GPU can show: at most an hour
scripts/acceptance/gpu.py eight           eight GPUs: at most 40 minutes
scripts/acceptance/gpu.py offline         one GPU without a network: this Python, models that are made here; 9.5 minutes
scripts/acceptance/gpu.py LIST --list     each line: its name, its limit, what it decides
scripts/acceptance/gpu.py LIST --dry-run  the commands, which are not run

A failed line does not stop the others. Afterwards gpu_acceptance/figures.md is one page of outcomes and figures, and
gpu_acceptance/to_send.tar.gz holds that page, the logs and the metrics. The exit code is 0 if every line passed or has
no use on this machine, 1 if one failed or found no time, 2 for wrong arguments. Standard library only.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_figures
from gpu_lines import Line, LineList, named_lists

ROOT = Path(__file__).resolve().parents[2]
LEAST_S = 5.0  # a line that would have less is not begun
STOP_S = 10.0  # for a line to end by itself
PASSED, SKIPPED, FAILED, TIMED_OUT, NOT_RUN = "passed", "skipped", "FAILED", "TIMED OUT", "NOT RUN"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a line ended."""

    line: Line
    status: str
    detail: str = ""
    seconds: float = 0.0


def main() -> int:
    arguments = parse_arguments()
    lists = named_lists(sys.executable, engine=arguments.engine or installed_engine())
    chosen = lists[arguments.list_name]
    lines = lines_from(chosen.lines, arguments.start)
    if arguments.list:
        for line in lines:
            print(f"{line.name:20} {line.limit_s:4d} s  {line.decides}")
        return 0
    directory = arguments.out.resolve()
    if arguments.dry_run:
        for line in lines:
            print(f"{line.name}: {shlex.join(command_of(line, directory))}")
        return 0
    gpus = count_gpus() if arguments.gpus is None else arguments.gpus
    if gpus < chosen.gpus:
        print(f"gpu.py: the list {arguments.list_name} needs {chosen.gpus} GPUs; this machine has {gpus}")
        return 2
    return run_list(chosen, lines, directory, budget_s=60 * (arguments.minutes or chosen.minutes))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(named_lists(sys.executable, engine="hf"))
    parser.add_argument("list_name", metavar="LIST", nargs="?", choices=names, default=names[0], help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="print the lines")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--from", dest="start", metavar="NAME", help="begin at a line, after a repair")
    parser.add_argument("--minutes", type=float, help="budget of all lines; above the list's, limits grow with it")
    parser.add_argument("--gpus", type=int, help="default: what nvidia-smi lists")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="of the list offline; default: vllm if installed")
    parser.add_argument("--out", type=Path, default=Path("gpu_acceptance"), help="default: gpu_acceptance")
    parsed = parser.parse_args()
    if parsed.minutes is not None and not 0 < parsed.minutes < float("inf"):
        parser.error(f"--minutes {parsed.minutes}: must be above 0")
    return parsed


def installed_engine() -> str:
    return "hf" if importlib.util.find_spec("vllm") is None else "vllm"


def count_gpus() -> int:
    return gpu_figures.query_gpu("name").count("\n")


def lines_from(lines: tuple[Line, ...], start: str | None) -> tuple[Line, ...]:
    """Return the lines from `start` on; an unknown name ends the program."""
    names = [line.name for line in lines]
    if start is None:
        return lines
    if start not in names:
        print(f"gpu.py: --from {start}: no such line; allowed: {' '.join(names)}", file=sys.stderr)
        sys.exit(2)
    return lines[names.index(start) :]


def run_list(chosen: LineList, lines: Sequence[Line], directory: Path, *, budget_s: float) -> int:
    """Run lines within a budget, write the page after each, and print a summary; return the exit code."""
    deadline = time.monotonic() + budget_s
    scale = max(1.0, budget_s / (60 * chosen.minutes))
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    is_interrupted = False
    for line in lines:
        limit_s = min(scale * line.limit_s, deadline - time.monotonic())
        try:
            outcomes.append(run_line(line, directory, outcomes, limit_s))
        except KeyboardInterrupt:
            outcomes.append(Outcome(line, FAILED, "interrupted"))
            is_interrupted = True
        print(f"{outcomes[-1].status} {line.name} {outcomes[-1].detail}".rstrip(), flush=True)
        write_results(directory, outcomes, chosen.gpus)
        if is_interrupted:
            return 130
    return summarize(outcomes, directory)


def run_line(line: Line, directory: Path, earlier: Sequence[Outcome], limit_s: float) -> Outcome:
    """Run one line for at most `limit_s`, or say why it is not run."""
    unmet = next((o for o in earlier if o.line.name == line.needs and o.status != PASSED), None)
    if unmet is not None:
        return Outcome(line, NOT_RUN, f"(needs {line.needs}: {unmet.status})")
    if line.package and not is_installed(line.package):
        return Outcome(line, SKIPPED, f"({line.package} is not installed)")
    if limit_s < LEAST_S:
        return Outcome(line, NOT_RUN, "(no time left)")
    print(f"RUNNING {line.name} for at most {limit_s:.0f} s: {line.decides}", flush=True)
    start = time.monotonic()
    code = run_command(line, directory, limit_s)
    seconds = time.monotonic() - start
    if code is None:
        return Outcome(line, TIMED_OUT, f"(after {seconds:.0f} s)", seconds)
    return Outcome(line, FAILED if code else PASSED, f"(exit code {code})" if code else "", seconds)


def run_command(line: Line, directory: Path, limit_s: float) -> int | None:
    """Return the exit code of a line's command, whose output goes to a log; None: it was stopped at its limit."""
    set_here = {name: value.replace("{out}", str(directory)) for name, value in line.environment.items()}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **set_here}
    with gpu_figures.watch_memory(directory / "logs" / f"{line.name}.memory"), log_of(directory, line).open("w") as log:
        try:
            process = subprocess.Popen(
                command_of(line, directory), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            log.write(f"{error}\n")
            return 127
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop_group(process)


def stop_group(process: "subprocess.Popen[bytes]") -> None:
    """End what a command has started and left in its process group, which would keep memory of the GPU."""
    for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                return
            number = 0  # then only asks whether there is a process left
            process.poll()
            time.sleep(0.1)


def command_of(line: Line, directory: Path) -> list[str]:
    return [word.replace("{out}", str(directory)) for word in line.command]


def log_of(directory: Path, line: Line) -> Path:
    return directory / "logs" / f"{line.name}.log"


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def write_results(directory: Path, outcomes: Sequence[Outcome], num_gpus: int) -> None:
    """Write figures.md and to_send.tar.gz from what is there so far."""
    rows = [
        {"name": o.line.name, "status": o.status, "detail": o.detail, "seconds": round(o.seconds, 1),
         "decides": o.line.decides, "command": shlex.join(command_of(o.line, directory))}
        for o in outcomes
    ]  # fmt: skip
    (directory / "outcomes.json").write_text(json.dumps({"gpus": num_gpus, "lines": rows}, indent=1))
    (directory / "figures.md").write_text(gpu_figures.page(directory))
    gpu_figures.write_archive(directory)


def summarize(outcomes: Sequence[Outcome], directory: Path) -> int:
    """Print what did not pass and where the page is; return the exit code."""
    bad = [o for o in outcomes if o.status not in (PASSED, SKIPPED)]
    passed = sum(o.status == PASSED for o in outcomes)
    print(f"\n{passed} of {len(outcomes)} lines passed in {sum(o.seconds for o in outcomes) / 60:.1f} minutes")
    for outcome in bad:
        print(f"  {outcome.status} {outcome.line.name} {outcome.detail}: {outcome.line.decides}")
    print(f"page: {directory / 'figures.md'}\nto send: {directory / 'to_send.tar.gz'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
