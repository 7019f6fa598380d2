"""Curves of a recipe that has not run, against sums by hand; and the command that plans it."""

import json
from pathlib import Path

import pytest

from nemo_rl.cli import run
from nemo_rl.command_line import ExitCode
from nemo_rl.config.loading import load_config
from nemo_rl.device_peaks import DevicePeaks
from nemo_rl.policy.memory import ModelShape
from nemo_rl.recipes import find_recipe
from nemo_rl.trace import stated_peaks
from nemo_rl.trace.stated_peaks import StatedDevices, state_engine, state_workload

PEAKS = DevicePeaks(flops=1e15, memory_bytes=1e12)
SIZES = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SHAPE = ModelShape.from_config("Qwen2.5-1.5B", SIZES)  # 1,543,714,304 parameters, 28,672 bytes per token


def test_a_step_of_an_engine_reads_the_weights_once_and_each_sequences_cache() -> None:
    curve = state_engine(SHAPE, StatedDevices(PEAKS, 1, 1), context=1000)
    assert curve.token_s == pytest.approx(stated_peaks.STEP_OVERHEAD_S + 2 * 1_543_714_304 / 0.6e12)
    assert curve.sequence_s == pytest.approx(28_672_000 / 0.6e12 + 2 * 1_543_714_304 / 0.35e15)
    faster = state_engine(SHAPE, StatedDevices(PEAKS, 1, 4), context=1000)
    assert faster.sequence_s == pytest.approx(curve.sequence_s / 4)


def test_training_takes_its_operations_over_the_ranks_and_lengths_have_their_mean() -> None:
    limits = ["policy.max_total_sequence_length=100000", "policy.generation.max_new_tokens=50000"]
    recipe = load_config(find_recipe("quickstart"), limits)
    work = state_workload(recipe, SHAPE, StatedDevices(PEAKS, 8, 1), mean_tokens=1000)
    passes = 8 + 2 * recipe.needs_reference
    prompt = min(recipe.data.max_input_seq_length or 1000, 1000)
    assert work.trainer.token_s == pytest.approx(passes * 1_543_714_304 * (1 + prompt / 1000) / (8 * 0.35e15))
    lengths = [turn.num_tokens for group in work.groups for rollout in group for turn in rollout.turns]
    assert sum(lengths) / len(lengths) == pytest.approx(1000, rel=0.15)
    assert len(work.groups[0]) == recipe.grpo.num_generations_per_prompt


def test_a_recipe_is_planned_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SIZES))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {find_recipe('grpo_math_1B')}\npolicy: {{model_name: {model}}}\n")
    sweep = ["--sweep", "grpo.async_grpo.enabled=true", "--sweep", "grpo.async_grpo.max_trajectory_age_steps=1,2"]
    words = ["plan", str(recipe), "--device", "H100", "--tokens", "500", "--steps", "4", "--json", *sweep]
    assert run(words) is ExitCode.DONE
    rows = json.loads(capsys.readouterr().out)
    assert [row["keys"].get("grpo.async_grpo.max_trajectory_age_steps") for row in rows] == [None, 1, 2]
    for row in rows:
        assert row["tokens_per_device_hour"] == pytest.approx(row["tokens_per_s"] * 3600 / row["num_devices"])
    synchronous, background = rows[:2]
    assert background["bubbles"]["step_s"] < synchronous["bubbles"]["step_s"]
