"""Distillation in the real loop: a model and a teacher of some thousand weights, the hf engine, float32."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.errors import ConfigError
from nemo_rl.generation.hf import HFGeneration
from nemo_rl.launch.training import run_training
from nemo_rl.quickstart.models import make_tokenizer
from tests.support.metric_names import find_undocumented
from tests.unit.launch.conftest import DistillationRecipe, Recipe, plan_of
from tests.unit.launch.scoring import Counting

pytestmark = pytest.mark.usefixtures("process_state")

Metrics = dict[int, dict[str, float]]


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"input": letter, "output": letter}) + "\n" for letter in "uvwxyz"))
    return f"++data.validation={{dataset_name: jsonl, data_path: {path}, env_name: letters}}"


def trained(config: TrainingRunConfig) -> tuple[TrainingProgress, Metrics]:
    Counting.calls.clear()
    training = asyncio.run(run_training(config, "uv run train.py"))
    metrics: Metrics = {}
    (path,) = Path(config.logger.log_dir).glob("*/metrics.jsonl")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        metrics.setdefault(row["step"], {}).update(row)
    return training, metrics


BACKGROUND = "distillation.async_rollouts={enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true}"


@pytest.mark.parametrize("overrides", [(), (BACKGROUND,)], ids=["sync", "async"])
def test_training_scores_each_rollout_alone_and_validation_all_in_one_call(
    distillation_recipe: DistillationRecipe,
    held_out: str,
    overrides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hf engine serves calls that overlap one after the other, and would be given all at once for that."""
    monkeypatch.setattr(HFGeneration, "is_async", True)
    training, metrics = trained(
        distillation_recipe(
            "distillation.max_num_steps=3",
            "distillation.max_num_epochs=9",
            "distillation.val_at_start=true",
            "distillation.val_at_end=true",
            "distillation.val_teacher=true",
            held_out,
            *overrides,
        )
    )
    assert training.position.step == 3
    assert Counter(Counting.calls)[6] == 3  # the validations: of the teacher, of the student at the start and the end
    assert Counter(Counting.calls)[1] >= 3 * 6  # background collection may be ahead
    assert set(Counting.calls) == {1, 6}
    assert find_undocumented(name for step in metrics.values() for name in step if "/" in name) == []
    assert {"validation/teacher_reward", "validation/teacher_accuracy", "validation/reward"} <= metrics[0].keys()
    for step in (1, 2, 3):
        assert metrics[step].keys() >= {
            "train/forward_kl",
            "train/reverse_kl",
            "train/teacher_topk_mass",
            "train/max_logprob_error",
            "timing/train/teacher_logprobs",
        }
        assert metrics[step]["train/num_valid_samples"] == 6


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss_fn.kl_type=forward",),
        ("loss_fn.kl_type=reverse", "loss_fn.zero_outside_topk=true"),
        ("loss_fn.kl_type=mixed", "policy.generation.temperature=0.8"),
    ],
    ids=["forward", "reverse, zero outside", "mixed"],
)
def test_the_student_comes_nearer_to_its_teacher(
    distillation_recipe: DistillationRecipe, overrides: tuple[str, ...]
) -> None:
    _, metrics = trained(
        distillation_recipe(
            "distillation.max_num_steps=12",
            "distillation.max_num_epochs=12",
            "policy.optimizer.kwargs.lr=0.02",
            *overrides,
        )
    )
    losses = [metrics[step]["train/loss"] for step in range(1, 13)]
    assert losses[-1] < 0.9 * losses[0]


def test_recorded_responses_are_learnt_from_without_a_sample(distillation_recipe: DistillationRecipe) -> None:
    training, metrics = trained(
        distillation_recipe(
            "distillation.off_policy=true", "distillation.max_num_steps=2", "distillation.max_num_epochs=2"
        )
    )
    assert training.position.step == 2
    assert Counting.calls == []
    step = metrics[2]
    assert find_undocumented(name for name in step if "/" in name) == []
    assert [name for name in step if "reward" in name] == ["train/failures/reward"]  # a count of failures
    assert step["train/mean_gen_tokens_per_sample"] == 2  # a letter and the end of the turn
    assert step["train/loss"] > 0


def test_opd_learns_from_the_teacher_alone(recipe: Recipe, teacher_directory: Path) -> None:
    """Rewards are lengths of answers; the advantages are the teacher's, one of each token."""
    teacher = f"++teacher={{model_name: {teacher_directory}, precision: float32}}"
    _, metrics = trained(
        recipe("grpo.adv_estimator.name=opd", teacher, "env.letters.type=tests.unit.launch.scoring:length")
    )
    step = metrics[1]
    assert find_undocumented(name for name in step if "/" in name) == []
    assert step["train/advantages/min"] < step["train/advantages/mean"] < step["train/advantages/max"]
    assert "timing/train/teacher_logprobs" in step


def refusal(config: TrainingRunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(run_training(config, "uv run train.py"))
    assert not list(Path(config.logger.log_dir).glob("*"))  # nothing has begun
    return str(refused.value)


def test_k_above_the_vocabulary_is_refused_before_a_model_loads(distillation_recipe: DistillationRecipe) -> None:
    size = len(make_tokenizer())
    said = refusal(distillation_recipe(f"distillation.topk_logits_k={size + 1}"))
    assert f"distillation.topk_logits_k = {size + 1}" in said
    assert f"allowed: at most {size}" in said


def test_a_teacher_for_shorter_sequences_is_refused_before_a_model_loads(
    distillation_recipe: DistillationRecipe,
) -> None:
    said = refusal(distillation_recipe("++teacher.hf_config_overrides={max_position_embeddings: 8}"))
    assert "teacher.model_name" in said
    assert "8 tokens at most" in said


def test_another_vocabulary_is_refused_before_a_model_loads(
    distillation_recipe: DistillationRecipe, tmp_path: Path, teacher_directory: Path
) -> None:
    other = make_tokenizer()
    other.add_tokens(["<another>"])
    other.save_pretrained(tmp_path / "other")
    said = refusal(distillation_recipe(f"++teacher.tokenizer.name={tmp_path / 'other'}"))
    assert "teacher.model_name" in said
    assert "'<another>'" in said


def test_a_task_without_a_teacher_is_named(distillation_recipe: DistillationRecipe, teacher_directory: Path) -> None:
    own = f"++teachers.other={{model_name: {teacher_directory}}}"
    config = distillation_recipe("~teacher", own, "++env.other={type: 'tests.unit.launch.scoring:length'}")
    assert "teachers.letters" in refusal(config)


def test_the_plan_shows_the_teachers(distillation_recipe: DistillationRecipe, teacher_directory: Path) -> None:
    served: dict[str, Any] = {
        "model_name": str(teacher_directory),
        "server": {"base_urls": ["http://h:1"], "model": "m"},
    }
    config = distillation_recipe(f"++teachers.letters={json.dumps(served)}".replace('"', ""))
    lines = plan_of(config).splitlines()
    assert f"#   teacher: {teacher_directory}, FSDP2, 1 rank on cpu, float32" in lines
    assert "#   teachers.letters: m served at http://h:1" in lines


def test_the_plan_shows_a_teacher_on_stages_and_one_that_they_do_not_divide_is_refused(
    distillation_recipe: DistillationRecipe, teacher_directory: Path
) -> None:
    stages = "++teacher.megatron_cfg={enabled: true, pipeline_model_parallel_size: %s}"
    plan = plan_of(distillation_recipe(stages % 2))
    ranks = "Megatron, 2 ranks (1 data x 2 pipeline x 1 tensor parallel) on cpu: node 0"
    assert f"#   teacher: {teacher_directory}, {ranks}, float32" in plan.splitlines()
    said = refusal(distillation_recipe(stages % 7))
    assert "teacher.megatron_cfg.pipeline_model_parallel_size" in said
    assert "must divide the model's" in said
