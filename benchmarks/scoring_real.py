"""Scoring beside real generation: vLLM samples, a reward model in a Ray actor scores each rollout as it ends.

uv run benchmarks/scoring_real.py

Each round makes the same rollouts three times, paired: generated without scores, the scores of all of them at once, and
both together. First the two share all cores, then engine and reward model have a core each, as a pool has devices of
its own. Each computes with one thread: with more they have the cores in turns, and overlap can gain nothing. At best
the longer of the two is left.
"""

import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import psutil
from paired import RECIPE

from nemo_rl.config.loading import load_config
from nemo_rl.experience.rollout_dispatch import make_rollout_jobs, run_rollouts
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.scoring import Scoring
from nemo_rl.launch.training import open_run

WARM_UP_ROUNDS, ROUNDS = 1, 8
NUM_PROMPTS = 32
ENGINE_CORE, POOL_CORE = 0, 1
ACTOR = "ray::_ActorHost"  # the title of the reward model's process
OVERRIDES = (
    "policy.generation.max_new_tokens=64",
    "policy.generation.ignore_eos=true",
    "policy.generation.vllm_cfg.max_num_seqs=64",  # so that rollouts end one wave after the other
    "policy.max_total_sequence_length=128",
    "data.train.env_name=chat",
    "data.validation=null",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
    "grpo.val_greedy=false",
    "logger.progress=false",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
)


class Timed:
    """A scorer that notes when it was first asked."""

    def __init__(self, scorer: Any) -> None:
        self.first_asked = float("inf")
        self._scorer = scorer

    async def score(self, requests: Any) -> Any:
        self.first_asked = min(self.first_asked, time.perf_counter())
        return await self._scorer.score(requests)


async def main(directory: Path, model: str) -> None:
    scorer = f"{{type: reward_model, model_name: {model}, micro_batch_size: 16, max_length: 128}}"
    chat = ["++env.chat={type: reward_model, scorers: [rm]}", f"++scorers.rm={scorer}"]
    config = load_config(RECIPE, [*OVERRIDES, *chat, f"logger.log_dir={directory}"])
    print("| cores | rollouts | generate s | score s | both s | first score after s | both / sum | longer / sum |")
    print("|---|---|---|---|---|---|---|---|")
    async with open_run(config) as run:
        await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
        source: Any = run.source
        jobs = make_rollout_jobs(source._loader.take(NUM_PROMPTS), config.grpo.num_generations_per_prompt)
        for resources in ("shared", "own"):
            if resources == "own":
                separate_cores()
            rounds = [await measure(source, jobs) for _ in range(WARM_UP_ROUNDS + ROUNDS)][WARM_UP_ROUNDS:]
            medians = " | ".join(f"{statistics.median(each):.3f}" for each in zip(*rounds, strict=True))
            print(f"| {resources} | {len(jobs)} | {medians} |", flush=True)


async def measure(source: Any, jobs: Any) -> tuple[float, ...]:
    """Return seconds to generate, to score, of both at once, until the first score was requested, and two ratios."""
    dependencies, options = source._dependencies, source._options
    (weighted,) = dependencies.scoring.by_task["chat"]
    timed = Timed(weighted.scorer)
    scoring = Scoring({"chat": (replace(weighted, scorer=timed),)})
    started = time.perf_counter()
    unscored = await run_rollouts(jobs, replace(dependencies, scoring=Scoring()), options, run_async_multi_turn_rollout)
    generated = time.perf_counter()
    await dependencies.scoring.score_batch(unscored, stall_timeout_s=600)
    scored = time.perf_counter()
    await run_rollouts(jobs, replace(dependencies, scoring=scoring), options, run_async_multi_turn_rollout)
    both_s = time.perf_counter() - scored
    alone_s, score_s = generated - started, scored - generated
    sum_s = alone_s + score_s
    return alone_s, score_s, both_s, timed.first_asked - scored, both_s / sum_s, max(alone_s, score_s) / sum_s


def separate_cores() -> None:
    """Give the reward model's process a core, and this process, with its engine, another."""
    own = psutil.Process()
    actors = {child.pid for child in own.children(recursive=True) if ACTOR in " ".join(child.cmdline())}
    assert len(actors) == 1, actors
    for process in (own, *own.children(recursive=True)):
        core = POOL_CORE if process.pid in actors else ENGINE_CORE
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def save_reward_model(directory: Path) -> str:
    """Make a random classifier about three times the policy's size, with the policy's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    from nemo_rl.launch.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(asyncio.run(resolve_model("nemo_rl/quickstart")))
    sizes: dict[str, Any] = {"num_labels": 1, "pad_token_id": None}
    config = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=256,
    )
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(Path(scratch) / "runs", save_reward_model(Path(scratch) / "rm")))
