"""Is the planner right about runs that it does not know, and does its advice keep its promise? Real runs, real vLLM.

uv run scripts/acceptance/planner.py [--steps 20] [--runs sync,age1] [--advice judge,sequences] [--directory DIR]

Each run of the quickstart's model is traced. Plans: the work of one run is fitted, and the step of another, of other
values of its keys, planned; the bar is an error of 10 %. Advice: the first line of `nemo-rl trace` for a run with a
planted bottleneck must name its key, and a run that follows it must gain at least half of what is promised. For every
run: the share of a step's time that its spans account for, and what the spans cost. Steps of one run that differ a lot
tell of a machine with other work, where no plan can be held to the bar. Runs in `--directory` that have ended are used
again.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.trace.timeline import Timeline, read_last_start
from nemo_rl.tracing import SpanRecord
from nemo_rl.types import EnvStep, Message

ROOT = Path(__file__).parents[2]
MAX_ERROR = 0.10  # of a planned step
MIN_GAIN = 0.5  # of what an advice promises
MIN_COVERED = 0.98  # of a step's time
MAX_COST = 0.01
SPAN_S = 15e-6  # assumed; benchmarks/tracing.py measures it
TIMEOUT_S = 1800
CALL_S = 0.04  # of the slow judge and the slow tool

COMMON = (
    "grpo.num_prompts_per_step=16",
    "policy.train_micro_batch_size=16",  # several of different sizes in a step
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "logger.trace.enabled=true",
    "logger.progress=false",
)
ASYNC = "examples/configs/async.yaml"
SYNC = "examples/configs/quickstart.yaml"
JUDGE = (
    "++scorers.judge.type=planner:SlowJudge",
    "++scorers.judge.batching={enabled: true, max_batch_size: 1}",
    "++env.reasoning_gym.scorers=[judge]",
)
TOOL = (
    "++env.tool.type=planner:SlowTool",
    "++env.tool.batching={enabled: true, max_batch_size: 1}",
    "data.default.env_name=tool",
)
JUDGE_CALLS, TOOL_CALLS = "scorers.judge.batching.max_calls", "env.tool.batching.max_calls"
MAX_NUM_SEQS = "policy.generation.vllm_cfg.max_num_seqs"

RUNS: Mapping[str, tuple[str, ...]] = {
    "sync": (SYNC,),
    "half": (SYNC, "grpo.num_prompts_per_step=8"),
    "age1": (ASYNC, "grpo.async_grpo.max_trajectory_age_steps=1"),
    "age2": (ASYNC, "grpo.async_grpo.max_trajectory_age_steps=2"),
    "age4": (ASYNC, "grpo.async_grpo.max_trajectory_age_steps=4"),
    "judge": (SYNC, *JUDGE, f"++{JUDGE_CALLS}=4"),
    "slow judge": (SYNC, *JUDGE, f"++{JUDGE_CALLS}=2"),
    "tool": (SYNC, *TOOL, f"++{TOOL_CALLS}=4"),
    "slow tool": (SYNC, *TOOL, f"++{TOOL_CALLS}=2"),
    "few sequences": (SYNC, f"{MAX_NUM_SEQS}=4"),
}
FITTED_TO = {  # the run whose work is fitted, by the run that is planned
    "sync": "half",  # a run in the background does not tell how fast engine and trainer are without each other
    "age1": "age2",
    "age2": "age1",
    "age4": "age1",
    "slow judge": "judge",
    "slow tool": "tool",
}
ADVICE = {"judge": ("slow judge", JUDGE_CALLS), "sequences": ("few sequences", MAX_NUM_SEQS)}  # planted run, its key


class SlowJudge(Scorer):
    """A score of 0 after a while."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[float]:
        for _ in requests:
            await asyncio.sleep(CALL_S)
        return [0.0] * len(requests)

    async def close(self) -> None:
        """Do nothing."""


class SlowTool:
    """The reward of the quickstart, after a while."""

    async def step(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> EnvStep:
        await asyncio.sleep(CALL_S)
        return EnvStep(rewards={"spelled": float(conversation[-1].content.strip() == state["entry"]["answer"])})


class Runs:
    """Traced runs by name, each made once."""

    def __init__(self, directory: Path, num_steps: int) -> None:
        self._directory, self._num_steps = directory, num_steps

    def get(self, name: str, arguments: Sequence[str] = ()) -> Path:
        """Return the directory of a run, which is made unless it has ended before."""
        log_dir = self._directory / name.replace(" ", "_")
        done = log_dir / "done"
        if not done.exists():
            log_dir.mkdir(parents=True, exist_ok=True)
            config, *own = arguments or RUNS[name]
            steps = f"grpo.max_num_steps={self._num_steps}"
            command = ["examples/run_grpo.py", "--config", config, *COMMON, *own, steps, f"logger.log_dir={log_dir}"]
            with (log_dir / "output.txt").open("w") as output:
                status = subprocess.run(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "WANDB_MODE": "offline"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                    check=False,
                ).returncode
            if status:
                sys.exit(f"{name}: " + (log_dir / "output.txt").read_text()[-4000:])
            done.touch()
        return max(log_dir.glob("exp_*"))


def ask(*arguments: str) -> Any:
    """Return what a command of nemo-rl prints as JSON."""
    command = [sys.executable, "-m", "nemo_rl", *arguments, "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def check_plans(runs: Runs, names: Sequence[str]) -> bool:
    """Print what is planned for runs beside what they took; return whether all errors are within the bar."""
    print("| run | fitted to | planned | took | error |\n|---|---|---|---|---|")
    is_right = True
    for name in names:
        fitted = FITTED_TO[name]
        answer = ask("plan", str(runs.get(fitted)), "--against", str(runs.get(name)))[-1]
        is_right &= abs(answer["error"]) <= MAX_ERROR
        steps = [step.seconds for step in Timeline.read(runs.get(name)).steps[1:]]  # the first one compiles
        spread = f"{min(steps):.3f} to {max(steps):.3f}"
        seconds = f"{answer['planned_s']:.3f} s | {answer['measured_s']:.3f} s ({spread})"
        print(f"| {name} | {fitted} | {seconds} | {answer['error']:+.1%} [{MAX_ERROR:.0%}] |", flush=True)
    return is_right


def check_advice(runs: Runs, names: Sequence[str]) -> bool:
    """Follow the first advice on runs with a planted bottleneck; return whether each keeps half of its promise."""
    print("| run | advice | step before | after | gained of the promise |\n|---|---|---|---|---|")
    is_kept = True
    for name in names:
        planted, key = ADVICE[name]
        before = ask("trace", str(runs.get(planted)))
        first = next(iter(before["advice"]), {"change": "no advice", "values": {}})
        if key not in first["values"]:
            print(f"| {planted} | {first['change']}, not {key} | | | |")
            is_kept = False
            continue
        values = [f"{each}={value}" for each, value in first["values"].items()]
        after = ask("trace", str(runs.get(f"{planted} followed", (*RUNS[planted], *values))))
        before_s, after_s = before["bubbles"]["step_s"], after["bubbles"]["step_s"]
        share = (before_s - after_s) / first["gain_s"]
        is_kept &= share >= MIN_GAIN
        row = f"{before_s:.3f} s | {after_s:.3f} s | {share:.0%} [{MIN_GAIN:.0%}] of {first['gain_s']:.3f} s"
        print(f"| {planted} | {first['change']} | {row} |", flush=True)
    return is_kept


def check_spans(path: Path) -> bool:
    """Print how much of the steps' time the spans of a run account for, and what they cost."""
    spans = [each for each in read_last_start(path) if isinstance(each, SpanRecord)]
    steps = Timeline.of_spans(spans).steps[1:]  # the first one compiles
    covered = min(step.covered_share for step in steps)
    window = steps[0].start_ns, steps[-1].end_ns
    count = sum(window[0] < each.end_ns <= window[1] for each in spans) / len(steps)
    cost = count * SPAN_S / statistics.fmean(step.seconds for step in steps)
    bars = f"[{MIN_COVERED:.0%}], at most {cost:.2%} [{MAX_COST:.0%}] at {SPAN_S * 1e6:.0f} us for each of"
    print(f"{path.parent.name}: spans account for {covered:.1%} {bars} {count:.0f} spans a step")
    return covered >= MIN_COVERED and cost <= MAX_COST


def read_names(text: str, known: Mapping[str, Any]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", default=",".join(FITTED_TO), help="that are planned; default: all")
    parser.add_argument("--advice", default=",".join(ADVICE), help="that is followed; default: all")
    parser.add_argument("--directory", type=Path, help="for the runs; default: one that is removed at the end")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (parsed.directory or Path(temporary)).absolute()
        runs = Runs(directory, parsed.steps)
        checks = [
            check_plans(runs, read_names(parsed.runs, FITTED_TO)),
            check_advice(runs, read_names(parsed.advice, ADVICE)),
            *(check_spans(runs.get(each.parent.name)) for each in sorted(directory.glob("*/done"))),
        ]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
