"""Does it learn, and only what it should? Whole runs of the quickstart, minutes each; figures for docs/benchmarks.md.

uv run scripts/acceptance/learning.py               the quickstart on three seeds, models of their own
uv run scripts/acceptance/learning.py agent         the same through an agent that knows only a base URL,
                                                    in each API; --api messages: in one
uv run scripts/acceptance/learning.py async         with rollouts in the background (async.yaml)
uv run scripts/acceptance/learning.py ranks         the same over two policy ranks and two engines, on Ray
uv run scripts/acceptance/learning.py megatron      on two stages of Megatron-core
uv run scripts/acceptance/learning.py lora          adapters alone (lora.yaml)
uv run scripts/acceptance/learning.py experts       a mixture of experts under replay of routes (moe.yaml)
uv run scripts/acceptance/learning.py vision        pictures of squares to count (vision.yaml)
uv run scripts/acceptance/learning.py frozen        the same with the vision tower as it was made
uv run scripts/acceptance/learning.py controls      random rewards, and rewards turned round

`nemo-rl check` reads every run that learns, and must raise no alarm. `--steps N` ends a run early, to see that it runs
at all: then no bar is held.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHONPATH = [path] if (path := os.environ.get("PYTHONPATH")) else []

SEEDS = (0, 1, 2)
SAMPLED_START_BELOW, SAMPLED_END = 0.35, 0.85
GREEDY_GAIN, GREEDY_END = 0.2, 0.9

AGENTS = {
    "chat": "examples.agents.single_turn:ask",
    "responses": "examples.agents.other_apis:ask_with_responses",
    "messages": "examples.agents.other_apis:ask_with_messages",
    "gemini": "examples.agents.with_gemini:ask",
}
AGENT = (
    "++env.asker.type=agent",
    "++env.asker.scored_by=reasoning_gym",
    "++env.asker.max_concurrency=256",  # a step's rollouts, as without an agent
    "data.default.env_name=asker",
)

ASYNC = ("--config", "async.yaml")

RANKS = ("policy.dtensor_cfg.data_parallel_size=2", "policy.generation.num_replicas=2")

MEGATRON = ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.pipeline_model_parallel_size=2")

LORA = ("--config", "lora.yaml")

EXPERTS = ("--config", "moe.yaml")

VISION = ("--config", "vision.yaml", "grpo.val_greedy=true")
# At the recipe's rate the projector alone settles on few answers before it tells the pictures apart.
FROZEN = (*VISION, "policy.freeze_vision=true", "policy.optimizer.kwargs.lr=1.0e-3", "grpo.max_num_steps=250")


@dataclass(frozen=True)
class Outcome:
    """Accuracies on the held-out prompts, before and after."""

    name: str
    sampled: tuple[float, float]
    greedy: tuple[float, float]
    seconds: float
    alarms: tuple[str, ...]  # of `nemo-rl check`

    def row(self, verdict: bool) -> str:
        (s0, s1), (g0, g1) = self.sampled, self.greedy
        alarms = ", ".join(self.alarms) or "none"
        return (
            f"| {self.name} | {s0:.3f} -> {s1:.3f} | {g0:.3f} -> {g1:.3f} | {self.seconds:.0f} | {alarms} | {verdict} |"
        )


def run(name: str, *arguments: str) -> Outcome:
    """One run in a process of its own; its time includes the start and the making of the model."""
    with tempfile.TemporaryDirectory() as log_dir, tempfile.TemporaryDirectory() as cache:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "examples/run_grpo.py", *arguments, f"logger.log_dir={log_dir}"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NEMO_RL_CACHE": cache, "PYTHONPATH": os.pathsep.join([str(HERE), *PYTHONPATH])},
            timeout=3600,
        )
        seconds = time.monotonic() - started
        run_dir = next(Path(log_dir).glob("exp_*"))
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        alarms = find_alarms(run_dir)
    validations = [row for row in map(json.loads, lines) if "validation/accuracy" in row]
    first, last = validations[0], validations[-1]
    return Outcome(
        name,
        (first["validation/accuracy"], last["validation/accuracy"]),
        (first["validation/greedy_accuracy"], last["validation/greedy_accuracy"]),
        seconds,
        alarms,
    )


def find_alarms(run_dir: Path) -> tuple[str, ...]:
    """Return the names of what `nemo-rl check` finds alarming; its warnings are printed."""
    command = [sys.executable, "-m", "nemo_rl", "check", str(run_dir), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"nemo-rl check exits with {done.returncode}: {done.stderr}")
    findings = json.loads(done.stdout)
    for finding in findings:
        print(f"{finding['severity']}: {finding['name']}: {finding['evidence']}", file=sys.stderr)
    return tuple(finding["name"] for finding in findings if finding["severity"] == "alarm")


def learning(
    seeds: tuple[int, ...],
    name: str = "quickstart",
    arguments: tuple[str, ...] = (),
    *,
    model: str = "nemo_rl/quickstart",
    steps: int | None = None,
) -> bool:
    passed = True
    if steps is not None:
        arguments = (*arguments, f"grpo.max_num_steps={steps}", f"grpo.val_period={steps}")
    for seed in seeds:
        of_seed = f"policy.model_name={model}-{seed}"
        outcome = run(f"{name}, seed {seed}", *arguments, f"grpo.seed={seed}", of_seed)
        verdict = steps is not None or (
            outcome.sampled[0] < SAMPLED_START_BELOW
            and outcome.sampled[1] >= SAMPLED_END
            and outcome.greedy[1] - outcome.greedy[0] >= GREEDY_GAIN
            and outcome.greedy[1] >= GREEDY_END
            and not outcome.alarms
        )
        passed &= verdict
        print(outcome.row(verdict), flush=True)
    return passed


def controls() -> bool:
    """Random rewards must not raise the held-out accuracy; rewards turned round must lower it."""
    random = run(
        "random rewards",
        "++env.coin.type=rewards:coin",
        "++data.train.env_name=coin",
        "grpo.max_num_steps=60",
        "grpo.val_period=60",
    )
    does_not_rise = random.sampled[1] <= random.sampled[0] + 0.05
    print(random.row(does_not_rise), flush=True)
    turned = run(
        "rewards turned round",
        "++grpo.reward_scaling.enabled=true",
        "++grpo.reward_scaling.target_min=1",
        "++grpo.reward_scaling.target_max=0",
        "grpo.max_num_steps=60",
        "grpo.val_period=60",
    )
    falls = turned.sampled[1] < turned.sampled[0] - 0.05 and turned.greedy[1] < turned.greedy[0]
    print(turned.row(falls), flush=True)
    return does_not_rise and falls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="?",
        choices=["learning", "agent", "ranks", "async", "megatron", "lora", "experts", "vision", "frozen", "controls"],
        default="learning",
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--api", choices=list(AGENTS), nargs="*", default=list(AGENTS), help="of `agent`")
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    print("| run | sampled | greedy | s | alarms | as it should |\n|---|---|---|---|---|---|", flush=True)
    if arguments.what == "controls":
        passed = controls()
    elif arguments.what == "agent":
        passed = True
        for api in arguments.api:
            agent = (*AGENT, f"++env.asker.function={AGENTS[api]}")
            passed &= learning(tuple(arguments.seeds), f"through an agent, {api}", agent, steps=arguments.steps)
    elif arguments.what == "ranks":
        passed = learning(tuple(arguments.seeds), "two ranks, two engines", RANKS, steps=arguments.steps)
    elif arguments.what == "megatron":
        passed = learning(tuple(arguments.seeds), "two stages of Megatron", MEGATRON, steps=arguments.steps)
    elif arguments.what == "lora":
        passed = learning(tuple(arguments.seeds), "LoRA", LORA, steps=arguments.steps)
    elif arguments.what == "experts":
        experts = "nemo_rl/quickstart-moe"
        passed = learning(tuple(arguments.seeds), "experts", EXPERTS, model=experts, steps=arguments.steps)
    elif arguments.what in ("vision", "frozen"):
        own, name = (VISION, "pictures") if arguments.what == "vision" else (FROZEN, "pictures, frozen tower")
        pictures = "nemo_rl/quickstart-vision"
        passed = learning(tuple(arguments.seeds), name, own, model=pictures, steps=arguments.steps)
    elif arguments.what == "async":
        passed = learning(tuple(arguments.seeds), "async", ASYNC, steps=arguments.steps)
    else:
        passed = learning(tuple(arguments.seeds), steps=arguments.steps)
    sys.exit(0 if passed else 1)
