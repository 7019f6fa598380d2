"""A trace from plain values, as a traced run writes it."""

from collections.abc import Iterator
from pathlib import Path

from nemo_rl.observability.trace_file import TRACE_FILE, TraceFile
from nemo_rl.tracing import SpanRecord

STEP_MS = 1000
PHASES = {"generation": (0, 600), "policy_training": (600, 900), "weight_sync": (900, 1000)}  # of a step, in ms


def write_trace(run: Path, *, num_steps: int = 3, num_rollouts: int = 4, env: str = "math") -> None:
    """Write steps of a second: rollouts of 200 ms to 500 ms with their phases, training and a refit."""
    file = TraceFile(run / TRACE_FILE)
    file.write([span for number in range(1, num_steps + 1) for span in _step(number, num_rollouts, env)])
    file.close()


def _step(number: int, num_rollouts: int, env: str) -> Iterator[SpanRecord]:
    start = (number - 1) * STEP_MS
    for index in range(num_rollouts):
        end, span_id = 500 - 300 * index // num_rollouts, 1000 * number + index
        values = {"env": env, "group": "g", "generation": index, "num_sampled_tokens": 50}
        yield _span("rollout", "rollouts", index, start, start + end, span_id, 0, **values)
        yield _span("generation", "rollouts", index, start, start + end, 10_000 + span_id, span_id)
        yield _span("queue", "rollouts", index, start, start + 20, 20_000 + span_id, 10_000 + span_id)
        yield _span("prefill", "rollouts", index, start + 20, start + 50, 30_000 + span_id, 10_000 + span_id)
        yield _span("decode", "rollouts", index, start + 50, start + end, 40_000 + span_id, 10_000 + span_id)
    for place, (name, (begin, end)) in enumerate(PHASES.items()):
        yield _span(name, "driver", 0, start + begin, start + end, 90_000 + 10 * number + place, 0, step=number)
    yield _span("engines paused", "engines", 0, start + 910, start + 990, 95_000 + number, 0)
    yield _span("train_step", "policy rank 0", 0, start + 605, start + 895, 96_000 + number, 0)
    yield _span("total_step_time", "driver", 0, start, start + STEP_MS, 97_000 + number, 0, step=number)


def _span(
    name: str, track: str, lane: int, start_ms: int, end_ms: int, span_id: int, parent: int, **values: str | int
) -> SpanRecord:
    return SpanRecord(name, track, lane, start_ms * 10**6, end_ms * 10**6, 7, span_id, parent, values)
