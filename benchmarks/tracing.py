"""Measurement of what a trace costs: a span, 4,096 rollouts at once over a fake engine, and steps of the quickstart.

The paired parts alternate rounds without and with a tracer that writes a file, and report by how much their CPU time
differs in the median of the rounds: per span, per part of a span (a phase that the engine has timed), and per span of
rollouts, with the peak memory that the tracer adds. The quickstart is a worst case: its model of 0.7M parameters makes
the shortest steps. Its spans and parts per step, at the first two figures, are the share of a step that a trace costs.

    python benchmarks/tracing.py [--rollouts 4096] [--rounds 6] [--steps 12]
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.launch.training import tuned_garbage_collection
from nemo_rl.observability.trace_file import TRACE_FILE, TraceFile, read_trace
from nemo_rl.trace.timeline import Timeline, read_last_start
from nemo_rl.tracing import SpanRecord, Tracer, now_ns, record_part, span
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, jobs

ROOT = Path(__file__).resolve().parents[1]
NUM_SPANS, NUM_PARTS = 100_000, 3
MAX_SPAN_US, MAX_SHARE, MIN_COVERED, MAX_MEMORY_MIB = 15.0, 0.01, 0.98, 100.0  # bars
QUICKSTART = (
    "examples/run_grpo.py",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "logger.trace.enabled=true",
    "logger.progress=false",
)


def us_of_span(num_parts: int, path: Path | None) -> float:
    """Return the microseconds of CPU time of a span, its writing included; None: without a tracer."""
    start = time.process_time()
    with nullcontext() if path is None else Tracer([TraceFile(path)]):
        for _ in range(NUM_SPANS):
            with span("generation", count=1):
                for _ in range(num_parts):
                    at = now_ns()
                    record_part("decode", at, at)
    return 1e6 * (time.process_time() - start) / NUM_SPANS


def paired_us(rounds: int, path: Path) -> tuple[float, float]:
    """Return the microseconds of CPU time that a span and a part add, and print them."""
    added: dict[int, list[float]] = {0: [], NUM_PARTS: []}
    for _ in range(rounds):
        for num_parts, found in added.items():
            found.append(us_of_span(num_parts, path) - us_of_span(num_parts, None))
            path.unlink()
    parts = [(more - less) / NUM_PARTS for less, more in zip(*added.values(), strict=True)]
    us, us_of_part = statistics.median(added[0]), statistics.median(parts)
    print(
        f"a span: {us:.1f} us [{MAX_SPAN_US:.0f}], {min(added[0]):.1f} to {max(added[0]):.1f}; a part: {us_of_part:.1f}"
    )
    return us, us_of_part


def run_rollouts(count: int, path: Path | None) -> float:
    """Return the CPU seconds of rollouts that all run at once, the writing of their trace included."""
    environments = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment()})
    asked = jobs(count)
    start = time.process_time()
    with nullcontext() if path is None else Tracer([TraceFile(path)]):
        asyncio.run(run_async_multi_turn_rollout(asked, environments, OPTIONS))
    return time.process_time() - start


def print_us_per_span(rollouts: int, rounds: int, path: Path) -> None:
    """Print the microseconds of CPU time that a span of rollouts adds, and the sizes of spans."""
    run_rollouts(rollouts, None)  # warms up
    pairs = []
    with tuned_garbage_collection():  # as a run does once everything is loaded
        for number in range(rounds):
            first, second = (None, path) if number % 2 else (path, None)
            seconds = {each: run_rollouts(rollouts, each) for each in (first, second)}
            pairs.append((seconds[None], seconds[path]))
    num_spans = sum(isinstance(record, SpanRecord) for records in read_trace(path) for record in records) / rounds
    differences = [1e6 * (on - off) / num_spans for off, on in pairs]
    found = statistics.median(differences)
    print(f"{rollouts} rollouts at once: {found:.1f} us per span [{MAX_SPAN_US:.0f}], in the rounds", end=" ")
    print(", ".join(f"{each:.1f}" for each in differences))
    print(f"{num_spans:.0f} spans of {path.stat().st_size / num_spans / rounds:.0f} bytes")


def print_memory(rollouts: int, path: Path) -> None:
    """Print the peak memory that a tracer adds."""
    peaks = []
    for each in (None, path):
        tracemalloc.start()
        run_rollouts(rollouts, each)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    print(f"peak memory: {peaks[1] - peaks[0]:.0f} MiB more [{MAX_MEMORY_MIB:.0f}]")


def print_share_of_a_step(num_steps: int, us: float, us_of_part: float, directory: Path) -> None:
    """Print the share of the quickstart's steps that their spans cost, and the share that they account for."""
    steps = f"grpo.max_num_steps={num_steps}"
    command = [sys.executable, *QUICKSTART, steps, f"logger.log_dir={directory}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (run,) = directory.glob("exp_*")
    spans = [each for each in read_last_start(run) if isinstance(each, SpanRecord)]
    timed = Timeline.of_spans(spans).steps[1:]  # the first one compiles
    seconds = sum(step.seconds for step in timed)
    covered = sum(step.seconds * step.covered_share for step in timed) / seconds
    found = [each for each in spans if timed[0].start_ns < each.end_ns <= timed[-1].end_ns]
    num_spans = sum(each.span_id > 0 for each in found)
    num_parts = len(found) - num_spans
    print(f"a step of the quickstart: {seconds / len(timed):.3f} s", end=", ")
    print(f"{num_spans / len(timed):.0f} spans and {num_parts / len(timed):.0f} parts")
    share = 1e-6 * (us * num_spans + us_of_part * num_parts) / seconds
    print(f"its spans cost {share:.2%} [{MAX_SHARE:.0%}]", end=" ")
    print(f"and account for {covered:.1%} [{MIN_COVERED:.0%}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / TRACE_FILE
        us, us_of_part = paired_us(parsed.rounds, path)
        print_us_per_span(parsed.rollouts, parsed.rounds, path)
        print_memory(parsed.rollouts, path)
        print_share_of_a_step(parsed.steps, us, us_of_part, Path(directory) / "quickstart")


if __name__ == "__main__":
    main()
