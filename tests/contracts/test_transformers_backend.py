"""A model that vLLM runs with transformers' own classes trains beside its engine, with the defaults on a CPU."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from nemo_rl.config.loading import load_config
from nemo_rl.launch.training import run_training
from nemo_rl.quickstart.models import make_tokenizer


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token)), "bos_token_id": None}
    config = Olmo2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, **ends,
    )  # fmt: skip
    Olmo2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = "".join(json.dumps({"input": letter, "output": letter}) + "\n" for letter in "abcd")
    (tmp_path / "rows.jsonl").write_text(rows)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 2, val_period: 0, val_at_end: false}}
policy:
  model_name: {tmp_path}/model
  precision: float32
  device: cpu
  train_global_batch_size: 4
  train_micro_batch_size: 4
  max_total_sequence_length: 32
  generation: {{backend: vllm, max_new_tokens: 4}}
data: {{train: {{dataset_name: jsonl, data_path: {tmp_path}/rows.jsonl, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{log_dir: {tmp_path}/runs, progress: false}}
""")
    return path


@pytest.mark.slow  # a whole run of a model that vLLM leaves to transformers
def test_two_steps_train_and_each_refit_is_verified(recipe: Path) -> None:
    training = asyncio.run(run_training(load_config(recipe), "uv run train.py"))
    assert training.position.step == 2
    assert training.metrics["num_optimizer_steps"] == 1
