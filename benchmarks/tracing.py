"""Measurement of what a trace costs: a span, and 4,096 rollouts at once over a fake engine with and without a trace.

The paired part alternates rounds without and with a tracer that writes a file, and reports the ratio of their sums, the
microseconds per span by which they differ, and the peak memory that the tracer adds.

    python benchmarks/tracing.py [--rollouts 4096] [--rounds 6]
"""

import argparse
import asyncio
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
from nemo_rl.tracing import SpanRecord, Tracer, span
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, jobs

NUM_SPANS = 100_000


def seconds_per_span(path: Path | None) -> float:
    """Return the CPU time of a span, its writing included; None: without a tracer."""
    start = time.process_time()
    with nullcontext() if path is None else Tracer([TraceFile(path)]):
        for _ in range(NUM_SPANS):
            with span("generation", count=1):
                pass
    return (time.process_time() - start) / NUM_SPANS


def run_rollouts(count: int, path: Path | None) -> float:
    """Return the CPU seconds of rollouts that all run at once, the writing of their trace included."""
    environments = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment()})
    asked = jobs(count)
    start = time.process_time()
    with nullcontext() if path is None else Tracer([TraceFile(path)]):
        asyncio.run(run_async_multi_turn_rollout(asked, environments, OPTIONS))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=6)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / TRACE_FILE
        print(f"a span: {1e6 * seconds_per_span(None):.2f} us off, {1e6 * seconds_per_span(path):.2f} us on")
        path.unlink()
        run_rollouts(parsed.rollouts, None)  # warms up
        off = on = 0.0
        with tuned_garbage_collection():  # as a run does once everything is loaded
            for _ in range(parsed.rounds):
                off += run_rollouts(parsed.rollouts, None)
                on += run_rollouts(parsed.rollouts, path)
        num_spans = sum(isinstance(record, SpanRecord) for records in read_trace(path) for record in records)
        size = path.stat().st_size
        print(
            f"{parsed.rollouts} rollouts at once: ratio {on / off:.3f}, {1e6 * (on - off) / num_spans:.1f} us per span"
        )
        print(f"{num_spans} spans in {size / 1e6:.2f} MB, {size / num_spans:.0f} bytes each")
        peaks = []
        for each in (None, path):
            tracemalloc.start()
            run_rollouts(parsed.rollouts, each)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        print(f"peak memory: {peaks[0] / 2**20:.0f} MiB off, {peaks[1] / 2**20:.0f} MiB on")


if __name__ == "__main__":
    main()
