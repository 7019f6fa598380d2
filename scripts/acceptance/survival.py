"""What a run under faults (chaos.py) has kept, compared with a run left in peace, and the table of it."""

import contextlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMPARED = ("train/loss", "train/reward", "train/grad_norm", "train/total_num_tokens")


@dataclass
class Fault:
    """One fault and what followed; times in seconds after it."""

    kind: str
    at: float  # time.monotonic()
    noticed_s: float | None = None
    training_s: float | None = None  # until the next start had resumed
    recovered_s: float | None = None  # until the first training step of the next start had ended
    cpu_s: float | None = None  # of the driver until then: says more than the clock on a machine that does other work
    load: float = 0.0  # of the machine, in processes, over the minute before the fault
    orphans: int = 0
    skipped: str = ""


@dataclass
class Result:
    """One run under faults, compared with the reference."""

    steps: int
    lost: int
    trained_twice: int
    invented_rewards: int
    different_steps: int
    same_weights: bool
    largest_difference: float
    exit_code: int
    left_over: int  # processes after its end
    faults: list[Fault] = field(default_factory=list)

    def is_clean(self, *, is_exact: bool) -> bool:
        """Return whether nothing was lost, repeated, invented or left behind, and the run ended as it should."""
        equal = self.same_weights and not self.different_steps
        losses = self.lost + self.trained_twice + self.invented_rewards + self.left_over
        return (equal or not is_exact) and not losses and not sum(f.orphans for f in self.faults) and not self.exit_code

    def append_to(self, path: Path) -> None:
        """Write one line of JSON, which `read_results` reads."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def read_results(path: Path) -> list[Result]:
    """Return what `append_to` has written."""
    results = []
    for row in _json_lines(path):
        faults = [Fault(**fault) for fault in row.pop("faults")]
        results.append(Result(**row, faults=faults))
    return results


@dataclass
class TrainedStep:
    """Metrics and rollouts of one training step."""

    metrics: tuple[float, ...]
    rows: list[dict[str, Any]]

    @property
    def prompts(self) -> Counter[str]:
        return Counter({row["prompt_id"] for row in self.rows})

    @property
    def rewards(self) -> dict[tuple[str, int], float | None]:
        return {(row["prompt_id"], row["generation_index"]): row["reward"] for row in self.rows}


def trained_steps(logs: Path) -> dict[int, TrainedStep]:
    """Return each step as the last start that ended it has trained it: later starts repeat what earlier ones lost."""
    steps: dict[int, TrainedStep] = {}
    for directory in sorted(logs.glob("exp_*")):
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in _json_lines(directory / "rollouts" / "train.jsonl"):
            rows.setdefault(row["step"], []).append(row)
        for line in _json_lines(directory / "metrics.jsonl"):
            if COMPARED[0] in line:
                steps[line["step"]] = TrainedStep(tuple(line[name] for name in COMPARED), rows.get(line["step"], []))
    return steps


def final_weights(checkpoints: Path) -> bytes:
    """Return the bytes of the last checkpoint's weights; equal files are equal to the bit."""
    steps = sorted(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    files = sorted((steps[-1] / "policy" / "weights").glob("*.safetensors")) if steps else []
    return b"".join(path.read_bytes() for path in files)


def compare(expected: dict[int, TrainedStep], actual: dict[int, TrainedStep]) -> dict[str, Any]:
    """Return the counts of a `Result` from the steps of the reference and of the run under faults."""
    missing = expected.keys() - actual.keys()
    lost = sum(len(expected[step].prompts) for step in missing)
    twice = invented = 0
    different, largest = len(missing), 0.0
    for step in expected.keys() & actual.keys():
        wanted, found = expected[step], actual[step]
        lost += len(wanted.prompts - found.prompts)
        twice += sum((found.prompts - wanted.prompts).values())
        invented += sum(1 for row in found.rows if row["failure"] and row["reward"] is not None)
        largest = max(largest, *(abs(a - b) for a, b in zip(wanted.metrics, found.metrics, strict=True)))
        different += wanted.metrics != found.metrics or wanted.rewards != found.rewards
    return {
        "steps": len(actual),
        "lost": lost,
        "trained_twice": twice,
        "invented_rewards": invented,
        "different_steps": different,
        "largest_difference": largest,
    }


def format_results(name: str, results: Sequence[Result], *, is_exact: bool) -> str:
    """Return the survival table of a scenario in Markdown."""
    faults = [fault for result in results for fault in result.faults]
    steps, different = sum(r.steps for r in results), sum(r.different_steps for r in results)
    lines = [
        f"## {name}: {len(faults)} faults in {len(results)} runs of {steps} steps",
        "",
        "| fault | number | noticed after, p50 and most | first step after, p50 and most | CPU of the driver |",
        "|---|---|---|---|---|",
    ]
    for kind, count in sorted(Counter(fault.kind for fault in faults).items()):
        of_kind = [fault for fault in faults if fault.kind == kind]
        cells = [_times(of_kind, attribute) for attribute in ("noticed_s", "recovered_s", "cpu_s")]
        lines.append(f"| {kind} | {count} | {' | '.join(cells)} |")
    recovered = sorted(fault.recovered_s for fault in faults if fault.recovered_s is not None)
    differing = f"steps that differ {different} of {steps}"
    if not is_exact:
        largest = max((result.largest_difference for result in results), default=0.0)
        differing += f" (by up to {largest:.2g}; this engine is not exact to the bit)"
    lines += [
        "",
        f"prompts lost {sum(r.lost for r in results)}, trained twice {sum(r.trained_twice for r in results)}, "
        f"failures that became rewards {sum(r.invented_rewards for r in results)}",
        f"{differing}; runs with equal final weights {sum(r.same_weights for r in results)} of {len(results)}",
        f"orphans {sum(f.orphans for f in faults) + sum(r.left_over for r in results)}, "
        f"exit codes other than 0: {sum(r.exit_code != 0 for r in results)}",
    ]
    if recovered:
        p50, p99 = statistics.median(recovered), recovered[math.ceil(0.99 * len(recovered)) - 1]
        loads = [fault.load for fault in faults]
        lines.append(f"recovery of {len(recovered)}: p50 {p50:.1f} s, p99 {p99:.1f} s")
        lines.append(
            f"load of the machine: {min(loads):.0f} to {max(loads):.0f}, median {statistics.median(loads):.0f}"
        )
    return "\n".join(lines)


def _times(faults: Sequence[Fault], attribute: str) -> str:
    values = [value for fault in faults if (value := getattr(fault, attribute)) is not None]
    return f"{statistics.median(values):.1f} s, {max(values):.1f} s" if values else ""


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the last line of a killed start
            yield json.loads(line)
