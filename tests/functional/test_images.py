"""Runs with images through the command line: memory over steps, in the background, and supervised training."""

import math
from pathlib import Path
from statistics import median

import pytest

from tests.functional.cli import ROOT, Run, run_command_line, run_grpo
from tests.support.quick import quick

pytestmark = pytest.mark.timeout(1200)  # of which the long runs take minutes
NUM_PROMPTS = 4
MAX_GROWTH = 16 * 2**20  # bytes over 100 steps
NO_VALIDATION = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0")
COUNTING = '''
import gc

import psutil

from nemo_rl.data import vision
from nemo_rl.image_features import ImageFeatures

vision.KEPT_BYTES = 1  # keeps the last image alone, as a run of large images does


def counting(messages, metadata):
    """Reward right answers; note the images whose features this process holds, and its memory."""
    held = sum(type(each) is ImageFeatures for each in gc.get_objects())
    with open("@file@", "a") as file:
        file.write(f"{held} {psutil.Process().memory_info().rss}\\n")
    return float(messages[-1]["content"].strip() == metadata["answer"])
'''


@pytest.mark.parametrize("num_steps", quick([12, 200], [12]))
def test_features_of_images_are_held_for_a_step_or_two(num_steps: int, tmp_path: Path) -> None:
    """Each step has other pictures: were they held for longer, their number would grow, and over many steps memory."""
    (tmp_path / "counted.py").write_text(COUNTING.replace("@file@", str(tmp_path / "held")))
    done = run_command_line(
        ROOT / "examples" / "run_grpo.py", tmp_path / "logs", "--config", "vision.yaml",
        f"grpo.num_prompts_per_step={NUM_PROMPTS}", "grpo.num_generations_per_prompt=2",
        f"grpo.max_num_steps={num_steps}", *NO_VALIDATION,
        f"data.train.size={num_steps * NUM_PROMPTS}", "checkpointing.enabled=false", "data.default.env_name=counted",
        "++env.counted={type: counted:counting}", PYTHONPATH=str(tmp_path), deadline_s=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    held, memory = zip(*(map(int, line.split()) for line in (tmp_path / "held").read_text().splitlines()), strict=True)
    assert len(held) == num_steps * NUM_PROMPTS * 2
    steps = [max(held[start : start + NUM_PROMPTS * 2]) for start in range(0, len(held), NUM_PROMPTS * 2)]
    assert min(steps) >= NUM_PROMPTS
    assert max(steps[num_steps // 2 :]) <= max(steps[: num_steps // 2])
    if num_steps >= 200:
        middle, last = (median(memory[int(len(memory) * share) :][: len(memory) // 20]) for share in (0.45, 0.95))
        assert last - middle < MAX_GROWTH


@pytest.mark.slow  # two whole runs
def test_background_rollouts_over_pictures_resume(tmp_path: Path) -> None:
    """The learning rate is next to nothing: whatever weights a token is of, engine and policy agree if both see."""
    checkpoints = tmp_path / "checkpoints"

    def run(num_steps: int) -> Run:
        done = run_grpo(
            tmp_path / f"logs_{num_steps}", "--config", "vision.yaml", "grpo.async_grpo.enabled=true",
            "grpo.async_grpo.in_flight_weight_updates=true",
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
            "loss_fn.use_importance_sampling_correction=true", "policy.optimizer.kwargs.lr=1.0e-9",
            "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", f"grpo.max_num_steps={num_steps}",
            *NO_VALIDATION, "checkpointing.metric_name=null",
            "checkpointing.keep_top_k=null", "checkpointing.save_period=3",
            f"checkpointing.checkpoint_dir={checkpoints}",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    first, second = run(3).metrics(), run(6).metrics()
    assert (checkpoints / "step_6").is_dir()
    steps = {step: row for run in (first, second) for step, row in run.items() if "train/loss" in row}
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert max(row["train/max_logprob_error"] for row in steps.values()) < 1e-4
    assert max(row["train/max_trajectory_age"] for row in steps.values()) == 1


@pytest.mark.slow  # learns for a minute; tests/unit/data/test_supervised_images.py has the numbers
def test_supervised_training_counts_squares(tmp_path: Path) -> None:
    """In packs of several pictures. The answer and its end are trained on: blind, the loss stays above ln(4) / 2."""
    done = run_command_line(
        ROOT / "examples" / "run_sft.py", tmp_path / "logs", "--config", "sft_quickstart.yaml",
        "policy.model_name=nemo_rl/quickstart-vision", "policy.max_total_sequence_length=32",
        "policy.optimizer.kwargs.lr=5.0e-3", "++policy.sequence_packing.enabled=true",
        "++policy.sequence_packing.train_mb_tokens=512", "policy.train_micro_batch_size=1", "data={}",
        "++data.train={dataset_name: counted_squares, size: 12800}",
        "++data.validation={dataset_name: counted_squares, size: 100, seed: 1234}",
        "sft.max_num_steps=200", "sft.val_period=200", "sft.val_at_start=true", "checkpointing.enabled=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [step["validation/loss"] for step in done.metrics().values() if "validation/loss" in step]
    assert losses[0] > math.log(4) / 2
    assert losses[-1] < 0.5
