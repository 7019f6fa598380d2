"""LoRA: a run whose refits bring merged weights against one whose refits bring the adapter, a step of each in turn.

Both are the recipe `lora` in this process. The table has what a step, its rollouts and its refit take: the median, and
10 % to 90 %.

    uv run benchmarks/adapters.py
    uv run benchmarks/adapters.py --steps 40 policy.generation.max_new_tokens=64 policy.generation.ignore_eos=true
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from paired import RECIPE

from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, restore
from nemo_rl.algorithms.loop import make_observers, train_one_step
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.config.loading import load_config
from nemo_rl.launch.training import open_run

LORA = RECIPE.with_name("lora.yaml")
WARM_UP_STEPS = 3  # the first refits are verified
COMMON = (
    "policy.optimizer.kwargs.lr=1e-7",  # both sample alike
    "data.validation=null",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.progress=false",
)
Seconds = dict[str, list[float]]


def timed(call: Callable[..., Awaitable[Any]], seconds: list[float]) -> Callable[..., Awaitable[Any]]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return run


async def start(run: TrainingRun, seconds: Seconds) -> Callable[[], Awaitable[None]]:
    """Refit the engine for the first time; return the call that makes a step and notes what it takes."""
    run.source.next_groups = timed(run.source.next_groups, seconds["rollouts"])  # type: ignore[method-assign]
    run.weight_sync.publish = timed(run.weight_sync.publish, seconds["refit"])  # type: ignore[method-assign]
    training = TrainingProgress(await restore(run), CheckpointWriter(run))
    await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
    seconds["refit"].clear()
    observers = make_observers(run, training)

    async def step() -> None:
        await train_one_step(run, training, observers)

    return timed(step, seconds["step"])


def cell(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    median, low, high = statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{median * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"


async def main(num_steps: int, overrides: Sequence[str]) -> None:
    seconds: dict[str, Seconds] = {}
    async with AsyncExitStack() as stack:
        steps = []
        for name in ("merged", "separate"):
            log_dir = stack.enter_context(tempfile.TemporaryDirectory())
            own = (f"weight_sync.adapter={name}", f"logger.log_dir={log_dir}")
            config = load_config(LORA, [*COMMON, *overrides, *own])
            run = await stack.enter_async_context(open_run(config))
            seconds[name] = defaultdict(list)
            steps.append(await start(run, seconds[name]))
        for _ in range(WARM_UP_STEPS + num_steps):
            for step in steps:
                await step()
    print("| adapter | step ms | rollouts | refit |\n|---|---|---|---|")
    for name, own_seconds in seconds.items():
        cells = [cell(own_seconds[part][WARM_UP_STEPS:]) for part in ("step", "rollouts", "refit")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, for both")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.steps, arguments.overrides))
