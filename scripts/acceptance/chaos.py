"""Does anything get lost? Random faults into supervised runs (`nemo-rl run`), each compared with a run left in peace.

uv run scripts/acceptance/chaos.py --kills 100                   one process, the hf engine, equality to the bit
uv run scripts/acceptance/chaos.py --kills 20 --scenario ranks   two policy ranks and an engine on a local Ray cluster
uv run scripts/acceptance/chaos.py --kills 20 --scenario vllm    vLLM with its engine core in a process of its own
uv run scripts/acceptance/chaos.py --kills 20 --scenario agent   an agent through the gateway
uv run scripts/acceptance/chaos.py --kills 20 --scenario gym     a NeMo Gym stack that the run starts

The reference runs once; runs under faults follow each other until there were enough faults. After each of them
DIRECTORY/SCENARIO has a line in results.jsonl and the table so far (docs/reliability.md) in table.md. The clock of the
machine is not changed: the processes of the run see a shifted one (clock.c), where there is a C compiler.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from faults import inflict
from supervised_run import ROOT, Run
from survival import Fault, Result, compare, final_weights, format_results, read_results, trained_steps

STALL_TIMEOUT_S = 20.0  # of a rollout without progress, and of a call of the policy
END_DEADLINE_S = 1800.0  # for the reference, and for the steps after the last fault
DISK_BYTES = 256 << 20

SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_epochs=1000",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "data.train.size=400",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=1",
    "logger.progress=false",
    f"rollout.stall_timeout_s={STALL_TIMEOUT_S:g}",
    f"policy.call_timeout_s={STALL_TIMEOUT_S:g}",
)
HF = ("policy.generation.backend=hf",)
AGENT = (
    "++env.asker.type=agent",
    "++env.asker.function=examples.agents.single_turn:ask",
    "++env.asker.scored_by=reasoning_gym",
    f"++env.asker.timeout_s={STALL_TIMEOUT_S / 2:g}",
    "data.default.env_name=asker",
)
GYM = (
    "--config",
    "examples/nemo_gym/quickstart.yaml",
    "checkpointing.enabled=true",
    "rollout.stall_timeout_s=90",
    "++env.nemo_gym.timeout_s=80",
    "++env.nemo_gym.server_timeout_s=10",
)


def make_gym_rows(directory: Path) -> None:
    """Write the rows of examples/nemo_gym/quickstart.yaml, and have all runs read them."""
    os.environ["NEMO_GYM_DATA"] = str(directory / "rows")
    if not (directory / "rows").exists():
        subprocess.run([sys.executable, "examples/nemo_gym/make_rows.py", "quickstart"], cwd=ROOT, check=True)


@dataclass(frozen=True)
class Scenario:
    """A run and the faults that it meets, each with its weight."""

    arguments: tuple[str, ...]
    faults: Mapping[str, int]
    is_exact: bool = True  # the same batches give the same bits
    prepare: Callable[[Path], None] | None = None  # called with the scenario's directory before any run


@dataclass(frozen=True)
class Limits:
    """When a run under faults meets no more of them."""

    kills: int
    deadline: float  # time.monotonic()


KILLS = {"driver": 6, "driver in a save": 3, "driver at its start": 2, "driver stopped": 1}
SCENARIOS = {
    "hf": Scenario(HF, {**KILLS, "preloader": 1, "disk full": 1, "supervisor": 1, "clock jump": 1}),
    "short": Scenario(HF, {"driver": 2, "driver in a save": 1}),
    "ranks": Scenario(
        (*HF, "policy.dtensor_cfg.data_parallel_size=2"),
        {"driver": 2, "rank": 3, "rank stopped": 1, "ray head": 2, "raylet": 1},
    ),
    "vllm": Scenario(
        ("++policy.generation.vllm_cfg.in_process=false", '++cluster.env_vars.VLLM_ENABLE_V1_MULTIPROCESSING="1"'),
        {"driver": 2, "engine core": 3, "engine core stopped": 1},
        is_exact=False,
    ),
    "gym": Scenario(
        (*GYM, *HF),
        {
            "gym agent": 2,
            "gym resources server": 2,
            "gym model server": 1,
            "gym head": 2,
            "gym stack": 2,
            "gym agent stopped": 1,
            "gym resources server stopped": 1,
            "gym model server stopped": 1,
            "gym head stopped": 1,
            "driver": 2,
            "driver in a save": 1,
        },
        prepare=make_gym_rows,
    ),
    "agent": Scenario((*HF, *AGENT), {"driver": 2, "driver stopped": 1, "half-open connections": 2}, is_exact=False),
}


@contextlib.contextmanager
def small_disk(directory: Path, *, wanted: bool) -> Iterator[bool]:
    """Mount a tmpfs at a directory where that is wanted and allowed; return whether it is."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "nemo-rl-chaos", str(directory)]
    is_mounted = wanted and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)


def run_reference(scenario: Scenario, directory: Path, num_steps: int) -> Run:
    """Return the run left in peace; one that an earlier call has made is kept."""
    reference = Run(directory, (*SMALL, *scenario.arguments, f"grpo.max_num_steps={num_steps}"), directory / "saved")
    if not list(reference.checkpoints.glob(f"step_{num_steps}")):
        reference.start()
        if reference.finish(END_DEADLINE_S) != 0:
            raise RuntimeError(f"the reference has failed; see {directory / 'output'}")
    return reference


def torment(scenario: Scenario, reference: Run, choice: random.Random, directory: Path, limits: Limits) -> Result:
    """Run what the reference did under faults, until it ends or the limits are reached, and compare the two."""
    faults: list[Fault] = []
    with small_disk(directory / "saved", wanted="disk full" in scenario.faults) as has_disk:
        kinds = [kind for kind in scenario.faults if has_disk or kind != "disk full"]
        kinds = [kind for kind in kinds if shutil.which("cc") or kind != "clock jump"]
        weights = [scenario.faults[kind] for kind in kinds]
        run = Run(directory, reference.arguments, directory / "saved")
        run.start()
        try:
            while len(faults) < limits.kills and time.monotonic() < limits.deadline:
                kind = choice.choices(kinds, weights)[0]
                step = run.heartbeat.get("step", 0) + choice.randint(0, 1)
                if not run.wait_until(lambda step=step: run.is_training() and run.heartbeat.get("step", 0) >= step):
                    break
                time.sleep(choice.uniform(0.0, 1.0))  # anywhere in a step
                fault = inflict(run, kind, choice)
                if not fault.skipped and run.process.poll() is None:
                    faults.append(fault)
                    with (directory.parent / "faults.jsonl").open("a") as file:
                        file.write(json.dumps(asdict(fault)) + "\n")
            run.process.wait(END_DEADLINE_S)
        finally:
            run.process.terminate()
            run.process.wait(60)
        same = final_weights(reference.checkpoints) == final_weights(run.checkpoints)
        counts = compare(trained_steps(reference.directory / "logs"), trained_steps(directory / "logs"))
        left_over = len(run.left_over())
        return Result(**counts, same_weights=same, exit_code=run.process.returncode, left_over=left_over, faults=faults)


def torment_repeatedly(name: str, base: Path, parsed: argparse.Namespace) -> bool:
    """Run one scenario until it has met all faults; return whether there were that many and every run was clean."""
    directory, scenario = base / name, SCENARIOS[name]
    directory.mkdir(parents=True, exist_ok=True)
    if scenario.prepare is not None:
        scenario.prepare(directory)
    reference = run_reference(scenario, directory / "reference", parsed.steps)
    deadline = time.monotonic() + parsed.budget_s
    path = directory / "results.jsonl"
    results = read_results(path)
    while (done := sum(len(result.faults) for result in results)) < parsed.kills and time.monotonic() < deadline:
        choice = random.Random(f"{parsed.seed} {name} {len(results)}")
        one = directory / f"run_{len(list(directory.glob('run_*')))}"
        result = torment(scenario, reference, choice, one, Limits(parsed.kills - done, deadline))
        result.append_to(path)
        results.append(result)
        text = format_results(name, results, is_exact=scenario.is_exact)
        (directory / "table.md").write_text(text + "\n")
        print(text, flush=True)
        if result.is_clean(is_exact=scenario.is_exact) and not parsed.keep:
            shutil.rmtree(one)
    if done < parsed.kills:
        print(f"{name}: the budget of {parsed.budget_s:.0f} s ended after {done} of {parsed.kills} faults", flush=True)
        return False
    return all(result.is_clean(is_exact=scenario.is_exact) for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="faults of each scenario")
    parser.add_argument("--steps", type=int, default=40, help="of each run; there are as many runs as needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="default: hf")
    parser.add_argument("--budget-s", type=float, default=800.0, help="for each scenario; then no more faults")
    parser.add_argument("--directory", type=Path, help="kept, and continued by the next call; default: a temporary one")
    parser.add_argument("--keep", action="store_true", help="also the files of runs in which all was well")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    base = parsed.directory or Path(tempfile.mkdtemp(prefix="nemo_rl_chaos_"))
    try:
        clean = [torment_repeatedly(name, base, parsed) for name in parsed.scenario or ["hf"]]
        return 0 if all(clean) else 1
    finally:
        if parsed.directory is None:
            shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
