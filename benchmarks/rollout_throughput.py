"""The rollout layer's tokens per second against the bare engine's, on the same requests, paired a round at a time.

uv run benchmarks/rollout_throughput.py
"""

import asyncio
import statistics
import tempfile
import time

from paired import RECIPE, Recorder, bare_engine

from nemo_rl.config.loading import load_config
from nemo_rl.launch.training import open_run

WARM_UP_ROUNDS, ROUNDS = 2, 20
BAR = 0.95
OVERRIDES = (
    "policy.generation.max_new_tokens=64",
    "policy.generation.ignore_eos=true",
    "policy.max_total_sequence_length=128",
    "++env.length.type=rewards:length_reward",
    "data.train.env_name=length",
    "data.validation=null",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
    "grpo.val_greedy=false",
    "logger.progress=false",
)


async def measure(num_prompts: int) -> tuple[list[float], list[float]]:
    """Tokens per second of the layer and of the bare engine, a round each."""
    layer, bare = [], []
    with tempfile.TemporaryDirectory() as log_dir:
        overrides = [*OVERRIDES, f"grpo.num_prompts_per_step={num_prompts}", f"logger.log_dir={log_dir}"]
        async with open_run(load_config(RECIPE, overrides)) as run:
            await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
            recorder = Recorder(run)
            for index in range(WARM_UP_ROUNDS + ROUNDS):
                recorder.requests.clear()
                started = time.perf_counter()
                collected = await run.source.next_groups(weight_version=0)
                layer_s = time.perf_counter() - started
                bare_s = await bare_engine(run, recorder.requests, f"bare{index}-")
                num_tokens = sum(t.num_generated_tokens for group in collected.groups for t in group.trajectories)
                if index >= WARM_UP_ROUNDS:
                    layer.append(num_tokens / layer_s)
                    bare.append(num_tokens / bare_s)
    return layer, bare


if __name__ == "__main__":
    print(f"| samples x 64 tokens | layer tok/s | bare tok/s | layer / bare, median of the rounds [{BAR}] |")
    print("|---|---|---|---|", flush=True)
    for prompts in (8, 32):
        ours, theirs = asyncio.run(measure(prompts))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        medians = f"{statistics.median(ours):,.0f} | {statistics.median(theirs):,.0f}"
        print(f"| {prompts * 8} | {medians} | {ratio:.3f} |", flush=True)
