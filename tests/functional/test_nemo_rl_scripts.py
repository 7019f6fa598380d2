"""Three run scripts, written in the shape of public projects that use NeMo-RL, train two steps unchanged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.functional.cli import DEADLINE_S, ROOT, Run, environment, run_directory

pytestmark = pytest.mark.timeout(600)
SCRIPTS = ROOT / "tests" / "compat" / "scripts"
RECIPES = ROOT / "tests" / "compat" / "recipes"


def overrides(model: Path, log_dir: Path) -> list[str]:
    """Return what makes a recipe of NeMo-RL small: the model, the sizes and a CPU."""
    return [
        f"policy.model_name={model}",
        "++policy.device=cpu",
        "policy.precision=float32",
        "policy.max_total_sequence_length=64",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "++policy.dtensor_cfg.tensor_parallel_size=1",
        "policy.generation.backend=hf",
        "policy.generation.max_new_tokens=8",
        "~policy.generation.vllm_cfg",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=2",
        "grpo.max_num_steps=2",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
        "++cluster.gpus_per_node=1",
        "++cluster.num_nodes=1",
        "++logger.wandb_enabled=false",
        "++logger.tensorboard_enabled=false",
        f"++logger.log_dir={log_dir}",
    ]


def run_script(name: str, log_dir: Path, recipe: str, *arguments: str) -> Run:
    command = [sys.executable, str(SCRIPTS / name), "--config", str(RECIPES / recipe), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment(), cwd=SCRIPTS, check=False
    )
    return Run(done.returncode, done.stdout, done.stderr, run_directory(log_dir))


def rollouts(run: Run) -> list[dict[str, object]]:
    assert run.directory is not None, run.stderr
    lines = (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.jsonl"
    rows = [{"question": f"Spell {word}t", "word": f"{word}t"} for word in ("ab", "cd", "ef", "gh", "ij", "kl")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_environment_and_processor_by_name(fresh: Path, words: Path, tmp_path: Path) -> None:
    section = f"{{dataset_name: ResponseDataset, data_path: '{words}', input_key: question, output_key: word"
    section += ", split: null, seed: null, split_validation_size: null}"
    data = f"data={{train: {section}, validation: null, max_input_seq_length: 48}}"
    run = run_script(
        "registered.py", tmp_path / "logs", "main/grpo.yaml", *overrides(fresh, tmp_path / "logs"), data,
        "++data.default={processor: length_processor, env_name: length}", "~env", "++env={length: {scale: 0.1}}",
        "~checkpointing.metric_name",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    metrics = run.metrics()
    assert sorted(metrics) == [1, 2]
    assert all(metrics[step]["train/reward"] > 0 for step in metrics)
    first: Any = rollouts(run)[0]
    asked, answer = first["messages"][:2]
    assert asked["content"].startswith("<|im_start|>user\nSpell ")  # the tokens of the processor, rendered once
    assert asked["content"].count("<|im_start|>") == 2
    assert first["reward"] == pytest.approx(0.1 * len(answer["content"]))


@pytest.mark.slow
def test_datasets_and_environment_of_the_script(fresh: Path, words: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Spell the word {}")
    run = run_script(
        "spelling.py", tmp_path / "logs", "0.5/grpo.yaml", *overrides(fresh, tmp_path / "logs"),
        f"++data.train_data_path={words}", f"++data.prompt_file={prompt}", "data.max_input_seq_length=48",
        "~env", "++env={spelling: {scale: 1.0}}",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert sorted(run.metrics()) == [1, 2]
    assert not any(rollout.get("failure") for rollout in rollouts(run))


@pytest.mark.slow
def test_game_whose_prompts_are_generated(fresh: Path, tmp_path: Path) -> None:
    run = run_script(
        "guessing.py", tmp_path / "logs", "main/grpo.yaml", *overrides(fresh, tmp_path / "logs"),
        "grpo.max_rollout_turns=2", "~env", "++env={guessing: {cfg: {max_turns: 2}}}",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    metrics = run.metrics()
    assert sorted(metrics) == [1, 2]
    assert metrics[2]["train/avg_turns_per_sample"] > 1
    assert not any(rollout.get("failure") for rollout in rollouts(run))
