"""Cost of a training step beyond its engine and its optimizer: step / (E + T), paired a step at a time.

E: the bare engine on the requests that the step sent, all at once. T: bare torch, forward + backward + AdamW, on the
tensors that the step trained on, in the same micro-batches. Both run right after the step that they are compared with,
in the same process, on the same engine and threads, so that a noisy machine touches all three alike. Where all steps
have the same lengths, a step is compared with the mean of the runs right before and right after it, from which a slow
change of the machine's speed cancels.

    uv run benchmarks/step_overhead.py                            all works of the table
    uv run benchmarks/step_overhead.py --steps 40 --only "8 x 8"  those whose name begins so
"""

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from paired import RECIPE, Recorder, bare_engine
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, restore
from nemo_rl.algorithms.loop import make_observers, train_one_step
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.config.loading import load_config
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.training import open_run

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Work:
    name: str
    overrides: tuple[str, ...]
    ratio_bar: float
    ms_bar: float | None = None
    is_untrained: bool = False  # and its lengths are as they fall


FIXED = ("policy.generation.max_new_tokens=64", "++env.length.type=rewards:length_reward")
WORKS = (
    Work("8 x 8 x 64", (*FIXED, "grpo.num_prompts_per_step=8"), 1.05, 0.7),
    Work("32 x 8 x 64", (*FIXED, "grpo.num_prompts_per_step=32"), 1.03, 0.45),
    # A model that has learnt nothing ends a response at any token alike.
    Work("8 x 8, lengths as they fall", (*FIXED, "grpo.num_prompts_per_step=8"), 1.15, is_untrained=True),
    Work(
        "8 x 8, lengths as they fall, packed against a padded T",
        (*FIXED, "grpo.num_prompts_per_step=8", "policy.sequence_packing.enabled=true"),
        1.0,
        is_untrained=True,
    ),
    # Five more tokens end a response, so that few are cut at the limit.
    Work(
        "8 x 8, lengths that end by themselves, packed against a padded T",
        (
            *FIXED,
            "grpo.num_prompts_per_step=8",
            "policy.sequence_packing.enabled=true",
            "policy.generation.stop_token_ids=[20,21,22,23,24]",
        ),
        1.0,
        is_untrained=True,
    ),
    Work(
        "8 x 8, lengths that end by themselves, shared prefixes against a padded T",
        (
            *FIXED,
            "grpo.num_prompts_per_step=8",
            "policy.sequence_packing.enabled=true",
            "policy.sequence_packing.share_prefixes=true",
            "policy.generation.stop_token_ids=[20,21,22,23,24]",
        ),
        0.8,
        is_untrained=True,
    ),
    Work(
        "8 x 8 x 64, each reward a blocking 10 ms",
        (*FIXED[:1], "++env.length.type=rewards:slow_reward", "grpo.num_prompts_per_step=8"),
        1.15,
    ),
)
COMMON = (
    "policy.optimizer.kwargs.lr=1e-7",  # what is measured must not change what is sampled
    "data.train.env_name=length",
    "data.validation=null",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.max_num_epochs=100",
    "policy.max_total_sequence_length=128",
    "checkpointing.enabled=false",
    "logger.progress=false",
)


class BareTrainer:
    """T: a plain Hugging Face model and AdamW."""

    def __init__(self, model_path: str, kwargs: Mapping[str, Any], micro_batch_size: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.model.eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **kwargs)
        self.micro_batch_size = micro_batch_size

    def step(self, batch: TensorDict) -> float:
        started = time.perf_counter()
        num_tokens = batch["token_mask"][:, 1:].sum()
        for part in batch.split(self.micro_batch_size):
            logits = self.model(input_ids=part["token_ids"]).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, part["token_ids"][:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            advantages, mask = part["advantages"][:, 1:], part["token_mask"][:, 1:]
            loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            ((loss * mask).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def untrained(model_path: str, directory: str) -> str:
    """Make the same model with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Figures:
    ratios: list[float]
    ms_a_sample: list[float]
    steps: list[float]
    engine: list[float]
    trainer: list[float]


async def measure(work: Work, num_steps: int) -> Figures:
    figures = Figures([], [], [], [], [])
    with tempfile.TemporaryDirectory() as log_dir:
        model_path = await resolve_model("nemo_rl/quickstart")
        if work.is_untrained:
            model_path = untrained(model_path, f"{log_dir}/model")
        own = (f"policy.model_name={model_path}", f"policy.generation.ignore_eos={not work.is_untrained}")
        config = load_config(RECIPE, [*COMMON, *work.overrides, *own, f"logger.log_dir={log_dir}"])
        async with open_run(config) as run:
            recorder = Recorder(run)
            kwargs = copy.deepcopy(config.policy.optimizer.kwargs)
            bare = BareTrainer(model_path, kwargs, config.policy.train_micro_batch_size)
            training = TrainingProgress(await restore(run), CheckpointWriter(run))
            await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
            before_s: tuple[float, float] | None = None  # E and T of the last step
            for index in range(WARM_UP_STEPS + num_steps):
                recorder.requests.clear()
                started = time.perf_counter()
                await train_one_step(run, training, make_observers(run, training))
                step_s = time.perf_counter() - started
                assert recorder.batch is not None
                after_s = await bare_engine(run, recorder.requests, f"bare{index}-"), bare.step(recorder.batch)
                engine_s, trainer_s = after_s if before_s is None or work.is_untrained else _means(before_s, after_s)
                before_s = after_s
                if index >= WARM_UP_STEPS:
                    figures.steps.append(step_s)
                    figures.engine.append(engine_s)
                    figures.trainer.append(trainer_s)
                    figures.ratios.append(step_s / (engine_s + trainer_s))
                    figures.ms_a_sample.append(1e3 * (step_s - engine_s - trainer_s) / len(recorder.requests))
    return figures


def _means(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return (before[0] + after[0]) / 2, (before[1] + after[1]) / 2


def line(work: Work, figures: Figures) -> str:
    """One row: medians over the steps; the bars in brackets."""
    median = statistics.median
    ratio, ms = median(figures.ratios), median(figures.ms_a_sample)
    spread = sorted(figures.ratios)
    low, high = spread[len(spread) // 10], spread[-1 - len(spread) // 10]
    ms_bar = f" [{work.ms_bar}]" if work.ms_bar else ""
    return (
        f"| {work.name} | {median(figures.steps):.3f} | {median(figures.engine):.3f} | {median(figures.trainer):.3f} "
        f"| {ratio:.3f} ({low:.2f} to {high:.2f}) [{work.ratio_bar}] | {ms:.2f}{ms_bar} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="works whose name begins so")
    arguments = parser.parse_args()
    print("| work | step s | E s | T s | step / (E + T), 10% to 90% [bar] | ms a sample [bar] |")
    print("|---|---|---|---|---|---|", flush=True)
    for each in WORKS:
        if each.name.startswith(arguments.only):
            print(line(each, asyncio.run(measure(each, arguments.steps))), flush=True)
