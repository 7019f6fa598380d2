"""Does it learn, and only what it should? Whole runs of the quickstart, minutes each; figures for docs/benchmarks.md.

uv run scripts/acceptance/learning.py               the quickstart on three seeds, models of their own
uv run scripts/acceptance/learning.py agent         the same through an agent that knows only a base URL,
                                                    in each API; --api messages: in one
uv run scripts/acceptance/learning.py async         with rollouts in the background (async.yaml)
uv run scripts/acceptance/learning.py ranks         the same over two policy ranks and two engines, on Ray
uv run scripts/acceptance/learning.py megatron      on two stages of Megatron-core
uv run scripts/acceptance/learning.py lora          adapters alone (lora.yaml)
uv run scripts/acceptance/learning.py experts       a mixture of experts (moe.yaml): with replay of routes and without,
                                                    experts over two ranks of FSDP2 and of Megatron-core; --layout
uv run scripts/acceptance/learning.py moved         one run of moe.yaml that each of these continues in turn
uv run scripts/acceptance/learning.py vision        pictures of squares to count (vision.yaml)
uv run scripts/acceptance/learning.py frozen        the same with the vision tower as it was made
uv run scripts/acceptance/learning.py controls      random rewards, and rewards turned round

`nemo-rl check` reads every run that learns, and must raise no alarm that is not expected. `--steps N` ends a run early,
to see that it runs at all: then no bar is held.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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

MODEL, EXPERTS_MODEL, VISION_MODEL = (f"nemo_rl/quickstart{kind}" for kind in ("", "-moe", "-vision"))

EXPERTS = ("--config", "moe.yaml")
LAYOUTS = {
    "replay": (),
    "live": ("policy.router_replay.enabled=false",),
    "fsdp2": ("policy.dtensor_cfg.data_parallel_size=2", "policy.dtensor_cfg.expert_parallel_size=2"),
    "megatron": (
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.data_parallel_size=2",
        "policy.megatron_cfg.expert_model_parallel_size=2",
    ),
}
VISION = ("--config", "vision.yaml", "grpo.val_greedy=true")
# At the recipe's rate the projector alone settles on few answers before it tells the pictures apart.
FROZEN = (*VISION, "policy.freeze_vision=true", "policy.optimizer.kwargs.lr=1.0e-3", "grpo.max_num_steps=250")

EXPECTED_ALARMS = {VISION_MODEL: {"truncation"}}  # its answers are right without an end

LEG_STEPS = 50  # of each layout, in a run that moves between them

# name of a run: its arguments and its model, for each kind
KINDS = {
    "learning": {"quickstart": ((), MODEL)},
    "agent": {
        f"through an agent, {api}": ((*AGENT, f"++env.asker.function={function}"), MODEL)
        for api, function in AGENTS.items()
    },
    "ranks": {"two ranks, two engines": (RANKS, MODEL)},
    "async": {"async": (("--config", "async.yaml"), MODEL)},
    "megatron": {"two stages of Megatron": (MEGATRON, MODEL)},
    "lora": {"LoRA": (("--config", "lora.yaml"), MODEL)},
    "experts": {f"experts, {name}": ((*EXPERTS, *layout), EXPERTS_MODEL) for name, layout in LAYOUTS.items()},
    "vision": {"pictures": (VISION, VISION_MODEL)},
    "frozen": {"pictures, frozen tower": (FROZEN, VISION_MODEL)},
}


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


def run(name: str, *legs: Sequence[str]) -> Outcome:
    """One run, each leg in a process of its own from the checkpoint of the one before, with the arguments of the leg.

    Its time includes the starts and the making of the model.
    """
    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        for arguments in legs:
            train(Path(directory), arguments)
        seconds = time.monotonic() - started
        run_dirs = sorted(Path(directory, "logs").glob("exp_*"))
        lines = [line for run_dir in run_dirs for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        alarms = [alarm for run_dir in run_dirs for alarm in find_alarms(run_dir)]
    validations = [row for row in map(json.loads, lines) if "validation/accuracy" in row]
    first, last = validations[0], validations[-1]
    return Outcome(
        name,
        (first["validation/accuracy"], last["validation/accuracy"]),
        (first["validation/greedy_accuracy"], last["validation/greedy_accuracy"]),
        seconds,
        tuple(alarms),
    )


def train(directory: Path, arguments: Sequence[str]) -> None:
    places = (f"logger.log_dir={directory / 'logs'}", f"checkpointing.checkpoint_dir={directory / 'checkpoints'}")
    environment = {
        **os.environ,
        "NEMO_RL_CACHE": str(directory / "cache"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *PYTHONPATH]),
    }
    subprocess.run(
        [sys.executable, "examples/run_grpo.py", *arguments, *places],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
        timeout=3600,
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


def learning(name: str, *legs: Sequence[str], model: str, seed: int, steps: int | None) -> bool:
    """Print the row of one run; whether it reached the bars, or True if `steps` ends it before it can."""
    of_seed = (f"grpo.seed={seed}", f"policy.model_name={model}-{seed}")
    end = () if steps is None else (f"grpo.max_num_steps={steps}", f"grpo.val_period={steps}")
    outcome = run(f"{name}, seed {seed}", *((*leg, *of_seed, *end) for leg in legs))
    verdict = steps is not None or (
        outcome.sampled[0] < SAMPLED_START_BELOW
        and outcome.sampled[1] >= SAMPLED_END
        and outcome.greedy[1] - outcome.greedy[0] >= GREEDY_GAIN
        and outcome.greedy[1] >= GREEDY_END
        and set(outcome.alarms) <= EXPECTED_ALARMS.get(model, set())
    )
    print(outcome.row(verdict), flush=True)
    return verdict


def moved(seed: int) -> bool:
    """One run that each layout of experts continues from the checkpoint of another."""
    legs = [
        (*EXPERTS, *layout, f"grpo.max_num_steps={LEG_STEPS * (index + 1)}")
        for index, layout in enumerate(LAYOUTS.values())
    ]
    return learning("experts, " + " -> ".join(LAYOUTS), *legs, model=EXPERTS_MODEL, seed=seed, steps=None)


def controls() -> bool:
    """Random rewards must not raise the held-out accuracy; rewards turned round must lower it."""
    random = run(
        "random rewards",
        (
            "++env.coin.type=rewards:coin",
            "++data.train.env_name=coin",
            "grpo.max_num_steps=60",
            "grpo.val_period=60",
        ),
    )
    does_not_rise = random.sampled[1] <= random.sampled[0] + 0.05
    print(random.row(does_not_rise), flush=True)
    turned = run(
        "rewards turned round",
        (
            "++grpo.reward_scaling.enabled=true",
            "++grpo.reward_scaling.target_min=1",
            "++grpo.reward_scaling.target_max=0",
            "grpo.max_num_steps=60",
            "grpo.val_period=60",
        ),
    )
    falls = turned.sampled[1] < turned.sampled[0] - 0.05 and turned.greedy[1] < turned.greedy[0]
    print(turned.row(falls), flush=True)
    return does_not_rise and falls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*KINDS, "moved", "controls"], default="learning")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--api", choices=list(AGENTS), nargs="*", default=list(AGENTS), help="of `agent`")
    parser.add_argument("--layout", choices=list(LAYOUTS), nargs="*", default=list(LAYOUTS), help="of `experts`")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    print("| run | sampled | greedy | s | alarms | as it should |\n|---|---|---|---|---|---|", flush=True)
    if options.what == "controls":
        return 0 if controls() else 1
    if options.what == "moved":
        verdicts = [moved(seed) for seed in options.seeds]
    else:
        chosen = {"agent": options.api, "experts": options.layout}.get(options.what)
        verdicts = [
            learning(name, arguments, model=model, seed=seed, steps=options.steps)
            for name, (arguments, model) in KINDS[options.what].items()
            if chosen is None or name.rpartition(", ")[2] in chosen
            for seed in options.seeds
        ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
