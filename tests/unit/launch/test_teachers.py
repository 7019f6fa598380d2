"""Teachers with other tokenizers: what is refused before a model loads, and a step of a run of real parts."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl.config.loading import load_distillation_config
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.launch.training import open_run, run_training
from nemo_rl.quickstart.models import make_pair_tokenizer
from tests.support.metric_names import find_undocumented

pytestmark = pytest.mark.usefixtures("process_state")
Recipe = Callable[..., DistillationRunConfig]


@pytest.fixture(scope="module")
def teacher_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    tokenizer = make_pair_tokenizer()
    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
        )
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def recipe(tmp_path: Path, model_directory: Path, teacher_directory: Path) -> Recipe:
    """`recipe(*overrides)`: four questions a step."""
    rows = [{"input": word, "output": word} for word in ("the", "red", "one", "in")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
distillation: {{num_prompts_per_step: 4, max_num_steps: 2, max_num_epochs: 2, val_period: 0, val_at_end: false}}
teacher: {{model_name: {teacher_directory}, precision: float32, device: cpu}}
loss_fn: {{kl_type: forward}}
policy:
  model_name: {model_directory}
  precision: float32
  device: cpu
  train_global_batch_size: 4
  train_micro_batch_size: 2
  max_total_sequence_length: 32
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 1.0e-3}}}}
  generation: {{backend: hf, max_new_tokens: 6}}
data: {{train: {{dataset_name: jsonl, data_path: {tmp_path / "data.jsonl"}, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{log_dir: {tmp_path / "runs"}, progress: false}}
"""
    )
    return lambda *overrides: load_distillation_config(path, overrides)


async def opened(config: DistillationRunConfig) -> None:
    async with open_run(config):
        raise AssertionError("opened")


def test_another_vocabulary_names_the_key_that_takes_it(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.model_name.*loss_fn\.cross_tokenizer\.enabled: true"):
        asyncio.run(opened(recipe()))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["distillation.topk_logits_k=1000"], r"distillation\.topk_logits_k = 1000: .*at most 164"),
        (["++teacher.tokenizer.chat_template='{{ no.such.name }}'"], r"teacher\.tokenizer\.chat_template.*user"),
        (["loss_fn.zero_outside_topk=true"], r"loss_fn\.zero_outside_topk.*allowed: false"),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_loads(recipe: Recipe, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        asyncio.run(opened(recipe("++loss_fn.cross_tokenizer.enabled=true", *overrides)))


def test_recorded_responses_are_compared_as_well(recipe: Recipe) -> None:
    config = recipe("++loss_fn.cross_tokenizer.enabled=true", "++distillation.off_policy=true")
    training = asyncio.run(run_training(config, "uv run train.py"))
    assert training.position.step == 2
    assert training.metrics["cross_tokenizer/with_target"] > 0.8  # the random teacher may not know what it reads


@pytest.mark.parametrize("batching", ["sequence_packing", "dynamic_batching"])
def test_rows_that_the_teachers_micro_batches_do_not_hold_are_left_out(recipe: Recipe, batching: str) -> None:
    budget = f"++teacher.{batching}={{enabled: true, logprob_mb_tokens: 32}}"
    config = recipe("++loss_fn.cross_tokenizer.enabled=true", "distillation.max_num_steps=1", budget)
    assert config.teacher is not None
    template = f"{'one ' * 32}{make_pair_tokenizer().chat_template}"
    teacher = config.teacher.model_copy(update={"tokenizer": TokenizerConfig(chat_template=template)})
    training = asyncio.run(run_training(config.model_copy(update={"teacher": teacher}), "uv run train.py"))
    assert training.position.step == 1
    assert training.metrics["cross_tokenizer/with_target"] == 0


@pytest.mark.parametrize("matching", ["prefix", "identical"])
def test_a_run_of_real_parts_trains_towards_a_teacher_with_another_tokenizer(
    recipe: Recipe, tmp_path: Path, matching: str
) -> None:
    config = recipe("++loss_fn.cross_tokenizer.enabled=true", f"++loss_fn.cross_tokenizer.matching={matching}")
    training = asyncio.run(run_training(config, "uv run train.py"))
    assert training.position.step == 2
    (directory,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/divergence" in row]
    assert len(steps) == 2
    assert find_undocumented(name for row in rows for name in row if name.startswith("train/")) == []
    for row in steps:
        assert row["train/loss"] > 0
        assert row["train/grad_norm"] > 0
        assert 0 < row["train/cross_tokenizer/target_mass"] <= 1
        assert row["train/cross_tokenizer/with_target"] > (0.8 if matching == "prefix" else 0.3)
