"""Is the planner right about runs that it does not know, and does its advice keep its promise? Real runs, real vLLM.

uv run scripts/acceptance/planner.py [--steps 16] [--runs sync,age1] [--advice judge,sequences] [--directory DIR]

Each run of the quickstart's model is traced. Plans: the work of one run is fitted, and the step of another, of other
values of its keys, planned; the bar is an error of 10 %. Advice: the first line of `nemo-rl trace` for a run with a
planted bottleneck must name its key, and a run that follows it must gain at least half of what is promised.

All runs are made once per round, so that those that are compared follow each other; figures are medians over as many
rounds as fit into `--plan-minutes` and `--advice-minutes`, at least one. "Between rounds" is how much the same run's
steps differ: more than the bar tells of a machine with other work. Runs in `--directory` that have ended are kept.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.cli import run as command_line
from nemo_rl.command_line import ExitCode
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import EnvStep, Message

ROOT = Path(__file__).parents[2]
MAX_ERROR = 0.10  # of a planned step
MIN_GAIN = 0.5  # of what an advice promises
TIMEOUT_S = 1800
CALL_S = 0.02  # of the slow judge and the slow tool

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
    "sync": "half",
    "age1": "age2",
    "age2": "age1",
    "age4": "age1",
    "slow judge": "judge",
    "slow tool": "tool",
}
ALSO_FITTED_TO = {"age1": "sync", "sync": "age1"}  # without a bar: one trace cannot tell what the other run is like
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
    """Traced runs of one round by name, each made once."""

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
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if command_line([*arguments, "--json"]) is not ExitCode.DONE:
            sys.exit(" ".join(arguments))
    return json.loads(output.getvalue())


def make_rounds(directory: Path, num_steps: int, minutes: float, make: Callable[[Runs], None]) -> None:
    """Make rounds while another one as long as the last ends within the time."""
    start = time.monotonic()
    number, round_s = 0, 0.0
    while number == 0 or time.monotonic() - start + round_s <= 60 * minutes:
        number, begun = number + 1, time.monotonic()
        make(Runs(directory / f"round_{number}", num_steps))
        round_s = time.monotonic() - begun


def check_plans(directory: Path, num_steps: int, minutes: float, names: Sequence[str]) -> bool:
    """Print what is planned for runs beside what they took; return whether all errors are within the bar."""
    pairs = [(name, FITTED_TO[name]) for name in names]
    pairs += [(name, fitted) for name, fitted in ALSO_FITTED_TO.items() if {name, fitted} <= {*sum(pairs, ())}]
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}

    def make(runs: Runs) -> None:
        for name, fitted in pairs:
            answers[name, fitted].append(ask("plan", str(runs.get(fitted)), "--against", str(runs.get(name)))[-1])
            print(f"{name} from {fitted}: {answers[name, fitted][-1]['error']:+.1%}", file=sys.stderr, flush=True)

    make_rounds(directory, num_steps, minutes, make)
    print("| run | fitted to | planned | took | error | rounds | between rounds |\n|---|---|---|---|---|---|---|")
    is_right = True
    for (name, fitted), found in answers.items():
        planned_s, took_s, error = (
            statistics.median(each[key] for each in found) for key in ("planned_s", "measured_s", "error")
        )
        has_bar = FITTED_TO[name] == fitted
        is_right &= abs(error) <= MAX_ERROR or not has_bar
        took = [each["measured_s"] for each in found]
        bar = f"[{MAX_ERROR:.0%}]" if has_bar else "[no bar]"
        rounds = ", ".join(f"{each['error']:+.1%}" for each in found)
        row = f"{planned_s:.3f} s | {took_s:.3f} s | {error:+.1%} {bar} | {rounds} | {max(took) / min(took) - 1:.1%}"
        print(f"| {name} | {fitted} | {row} |")
    return is_right


def check_advice(directory: Path, num_steps: int, minutes: float, names: Sequence[str]) -> bool:
    """Follow the first advice on runs with a planted bottleneck; return whether each keeps half of its promise."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}  # before, after, promised

    def make(runs: Runs) -> None:
        for name in names:
            planted, key = ADVICE[name]
            before = ask("trace", str(runs.get(planted)))
            first = next(iter(before["advice"]), {"change": "no advice", "values": {}})
            if key not in first["values"]:
                print(f"{planted}: the first advice is {first['change']!r}, not {key}", file=sys.stderr)
                found[name].append((before["bubbles"]["step_s"], before["bubbles"]["step_s"], 1.0))
                continue
            values = [f"{each}={value}" for each, value in first["values"].items()]
            after = ask("trace", str(runs.get(f"{planted} followed", (*RUNS[planted], *values))))
            found[name].append((before["bubbles"]["step_s"], after["bubbles"]["step_s"], first["gain_s"]))

    make_rounds(directory, num_steps, minutes, make)
    print("| run | key | step before | after | gained of the promise | rounds |\n|---|---|---|---|---|---|")
    is_kept = True
    for name, rounds in found.items():
        planted, key = ADVICE[name]
        before_s, after_s, promised_s = (statistics.median(each) for each in zip(*rounds, strict=True))
        shares = [(before - after) / promised for before, after, promised in rounds]
        is_kept &= statistics.median(shares) >= MIN_GAIN
        share = f"{statistics.median(shares):.0%} [{MIN_GAIN:.0%}] of {promised_s:.3f} s"
        each = ", ".join(f"{share:.0%}" for share in shares)
        print(f"| {planted} | {key} | {before_s:.3f} s | {after_s:.3f} s | {share} | {each} |")
    return is_kept


def read_names(text: str, known: Mapping[str, Any]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--runs", default=",".join(FITTED_TO), help="that are planned; default: all")
    parser.add_argument("--advice", default=",".join(ADVICE), help="that is followed; default: all")
    parser.add_argument("--plan-minutes", type=float, default=11)
    parser.add_argument("--advice-minutes", type=float, default=7)
    parser.add_argument("--directory", type=Path, help="for the runs; default: one that is removed at the end")
    parsed = parser.parse_args()
    planned, followed = read_names(parsed.runs, FITTED_TO), read_names(parsed.advice, ADVICE)
    with tempfile.TemporaryDirectory() as temporary:
        directory = (parsed.directory or Path(temporary)).absolute()
        is_right = not planned or check_plans(directory, parsed.steps, parsed.plan_minutes, planned)
        is_kept = not followed or check_advice(directory, parsed.steps, parsed.advice_minutes, followed)
    return 0 if is_right and is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
