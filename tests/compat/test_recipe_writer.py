"""`nemo-rl config translate --minimal` and `--diff`: what differs, and nothing else."""

import logging
from pathlib import Path

import pytest
import yaml

from nemo_rl import cli
from nemo_rl.command_line import ExitCode
from nemo_rl.compat.recipe_writer import format_changes, format_minimal, format_translation
from nemo_rl.errors import ConfigError
from tests.compat.test_recipes import OBSTACLES, RECIPES, load

DIRECTORY = Path(__file__).parent / "recipes"
ROUND_TRIPS = [path for path in RECIPES if path.stem not in OBSTACLES][::3]
BASE_IN_CONFIGS = """
defaults: grpo_math_1B.yaml
grpo: {num_prompts_per_step: 32, max_num_steps: 500}
loss_fn: {use_cispo: true, reference_policy_kl_penalty: 0.0}
policy:
  model_name: Qwen/Qwen2.5-7B
  train_global_batch_size: 256
  max_total_sequence_length: 4096
  optimizer: {kwargs: {lr: 1.0e-6}}
env: {math: {math_verify_impl: dapo_math_verify}}
checkpointing: {checkpoint_dir: results/mine}
"""
BASE_OF_NEMO_RL = BASE_IN_CONFIGS.replace("grpo_math_1B.yaml", str(DIRECTORY / "main" / "grpo.yaml"))


def test_there_are_twenty_recipes() -> None:
    assert len(ROUND_TRIPS) >= 20
    assert len({path.stem for path in ROUND_TRIPS}) >= 10


@pytest.mark.parametrize("path", ROUND_TRIPS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_minimal_recipe_is_the_same_configuration(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load(path).model_dump()
    written = tmp_path / path.name
    written.write_text(format_minimal(path))
    caplog.clear()
    assert load(written).model_dump() == expected
    assert caplog.text == ""  # nothing is translated or assumed
    assert len(written.read_text().splitlines()) < 0.75 * len(format_translation(path).splitlines())


@pytest.mark.parametrize("text", [BASE_IN_CONFIGS, BASE_OF_NEMO_RL], ids=["packaged base", "base of NeMo-RL"])
def test_ten_lines_over_a_base_stay_below_thirty(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    recipe, written = tmp_path / "grpo_short.yaml", tmp_path / "out" / "grpo_minimal.yaml"
    recipe.write_text(text)
    written.parent.mkdir()
    assert cli.run(["config", "translate", str(recipe), "--minimal", "-o", str(written)]) == ExitCode.DONE
    assert len(written.read_text().splitlines()) < 30
    values = yaml.safe_load(written.read_text())
    assert Path(values["defaults"]).stem == Path(yaml.safe_load(text)["defaults"]).stem
    assert (values["loss_fn"]["type"], values["env"]["math"]["verifier"]) == ("cispo", "last_answer")
    assert load(written).model_dump() == load(recipe).model_dump()


def test_minimal_recipe_of_one_that_is_refused_names_the_obstacles() -> None:
    with pytest.raises(ConfigError, match=r"vllm_cfg\.precision"):
        format_minimal(DIRECTORY / "main" / "fp8_rollouts.yaml")
    text = format_minimal(DIRECTORY / "main" / "fp8_rollouts.yaml", allow_unsupported=True)
    assert "removed by --allow-unsupported" in text


def test_changes_name_both_values_and_the_reason() -> None:
    table, left_out = format_changes(DIRECTORY / "main" / "gspo.yaml").split("\n\n")
    rows = {line.split()[0]: line for line in table.splitlines()}
    expected = {
        "grpo.normalize_rewards": ["true", "grpo.adv_estimator.normalize_rewards: true", "another name"],
        "loss_fn.sequence_level_importance_ratios": ["true", "-", "loss_fn.type"],
        "loss_fn.type": ["-", "gspo"],
        "policy.megatron_cfg": ["{...}", "-", "not read"],
        "grpo.async_grpo.max_generation_failures": ["-", "0", "NeMo-RL's default"],
    }
    for key, parts in expected.items():
        assert all(part in rows[key] for part in parts), rows[key]
    assert "grpo.num_prompts_per_step" not in rows  # the same in both
    assert "cluster.master_port_range_low" in left_out
    refused = format_changes(DIRECTORY / "main" / "fp8_rollouts.yaml")
    assert "kv_cache_dtype" in next(line for line in refused.splitlines() if "refused: not available" in line)
