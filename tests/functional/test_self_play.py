"""Several policies through the command line: real vLLM, the quickstart's model, a game of two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.launch.trained_model import find_trained_model
from nemo_rl.trained.serve_command import served_adapters
from tests.functional.cli import ROOT, Run, run_grpo
from tests.functional.test_interrupt_and_resume import kill_at
from tests.support.metric_names import find_undocumented

pytestmark = pytest.mark.timeout(600)

SMALL = (
    *("--config", str(ROOT / "examples/configs/self_play.yaml"), "grpo.num_prompts_per_step=4"),
    *("grpo.max_val_samples=8", "grpo.val_at_start=false", "weight_sync.verify=true", "logger.progress=false"),
)
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_grpo(tmp_path_factory.mktemp("logs"), *SMALL, "grpo.max_num_steps=2")
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def checkpoint(run: Run, step: int) -> Path:
    assert run.directory is not None
    return run.directory / "checkpoints" / f"step_{step}"


def adapters(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path / ADAPTER) for path in sorted((directory / "policy/adapters").iterdir())}


def rollouts(run: Run, split: str) -> list[dict[str, Any]]:
    assert run.directory is not None
    return [json.loads(line) for line in (run.directory / f"rollouts/{split}.jsonl").read_text().splitlines()]


def test_each_player_is_trained_and_the_engine_holds_all(run: Run) -> None:
    metrics = run.metrics()
    for step in (1, 2):
        for policy in ("first", "second"):
            assert metrics[step][f"train/policies/{policy}/max_logprob_error"] <= 1e-4
            assert metrics[step][f"train/policies/{policy}/num_optimizer_steps"] == 1
        assert metrics[step]["train/policies/first/reward_mean"] == pytest.approx(
            1 - metrics[step]["train/policies/second/reward_mean"]
        )
        assert metrics[step]["train/num_optimizer_steps"] == 2
    assert find_undocumented(sorted({name for own in metrics.values() for name in own})) == []
    assert run.stderr.count("weights 2 of start verified") == 1


def test_records_name_the_policies(run: Run) -> None:
    players = {
        "spelling_duel": ["first", "second"],
        "return_duel": ["second", "first"],
        "duel_with_start": ["first", "start"],
    }
    rows = [*rollouts(run, "train"), *rollouts(run, "validation")]
    assert {row["env"] for row in rows} == players.keys()
    for row in rows:
        policies = [message["policy"] for message in row["messages"] if message["role"] == "assistant"]
        assert policies == players[row["env"]][: len(policies)]
        assert list(row["policy_rewards"]) == policies
        assert row["rewards"] == row["policy_rewards"][policies[0]]


def test_a_checkpoint_has_an_adapter_of_each(run: Run) -> None:
    found = adapters(checkpoint(run, 2))
    assert list(found) == ["first", "second", "start"]
    moved = {name: any(t.any() for n, t in own.items() if "lora_B" in n) for name, own in found.items()}
    assert moved == {"first": True, "second": True, "start": False}
    trained = find_trained_model(checkpoint(run, 2))
    assert list(served_adapters(trained, is_whole_run=False)) == [
        f"exp_001-step_2-{name}" for name in ("first", "second", "start")
    ]


@pytest.mark.slow  # unit tests have the recipe, contracts the adapters of an engine by name
def test_a_run_of_several_policies_is_evaluated_by_its_game(run: Run, tmp_path: Path) -> None:
    words = ["eval", str(run.directory), "eval.limit=6", f"eval.output_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*/rollouts-rs42.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 6
    players = [f"exp_001-step_2-{name}" for name in ("first", "start")]
    for row in rows:
        assert [m["policy"] for m in row["messages"] if m["role"] == "assistant"] == players[: row["num_turns"]]
        assert list(row["policy_rewards"]) == players[: row["num_turns"]]


@pytest.mark.slow  # background rollouts are test_adapters.py's, each policy's state that of the contracts
def test_a_killed_run_goes_on_exactly_from_a_checkpoint(tmp_path: Path) -> None:
    several = (*SMALL, "grpo.max_num_steps=4", "checkpointing.save_period=1", "checkpointing.metric_name=null")
    whole = run_grpo(tmp_path / "whole", *several)
    checkpoints = tmp_path / "checkpoints"
    own = f"checkpointing.checkpoint_dir={checkpoints}"
    kill_at(checkpoints / "step_2", *several, own, f"logger.log_dir={tmp_path / 'killed'}")
    again = run_grpo(tmp_path / "again", *several, own)
    for done in (whole, again):
        assert done.returncode == 0, done.stdout + done.stderr
    expected, resumed = adapters(checkpoint(whole, 4)), adapters(checkpoints / "step_4")
    for name, tensors in resumed.items():
        for tensor, values in tensors.items():
            torch.testing.assert_close(values, expected[name][tensor], rtol=0, atol=1e-6)
    compared = [f"train/policies/{p}/{m}" for p in ("first", "second") for m in ("loss", "grad_norm", "reward_mean")]
    for step, found in again.metrics().items():
        for metric in compared if "train/loss" in found else ():
            assert found[metric] == pytest.approx(whole.metrics()[step][metric], abs=1e-6), (step, metric)


SPELLERS = (
    *("--config", str(ROOT / "examples/configs/lora.yaml"), "grpo.max_num_steps=3", "data.validation=null"),
    *("grpo.val_period=0", "grpo.val_at_end=false", "grpo.val_at_start=false", "data.shuffle=false"),
    *("checkpointing.metric_name=null", "checkpointing.save_period=3", "logger.progress=false"),
    "++policy.optimizer.kwargs.eps=1.0e-3",  # AdamW divides rounding by what may be near 0
)


def speller(name: str, *, seed: int) -> tuple[str, str]:
    dataset = "dataset_name: reasoning_gym, task: spell_backward, task_kwargs: {min_word_len: 3, max_word_len: 5}"
    environment = "type: reasoning_gym, require_stop: true"
    return f"{{{dataset}, size: 40, seed: {seed}, env_name: {name}}}", f"++env.{name}={{{environment}}}"


@pytest.mark.slow  # per step it is the contract's: tests/contracts/test_several_policies.py
def test_two_policies_in_one_run_learn_what_each_learns_alone(tmp_path: Path) -> None:
    (a, env_a), (b, env_b) = speller("a", seed=1), speller("b", seed=2000)
    together = run_grpo(
        tmp_path / "together",
        *(*SPELLERS, "grpo.num_prompts_per_step=8", f"data.train=[{a}, {b}]", "++data.train_mix=[4, 4]", env_a, env_b),
        *(
            "++policies={a: {}, b: {}}",
            "policy.dtensor_cfg.lora_cfg.save_merged=false",
            "++env.a.policies=[a]",
            "++env.b.policies=[b]",
        ),
    )
    assert together.returncode == 0, together.stdout + together.stderr
    found = adapters(checkpoint(together, 3))
    for name, dataset, environment in (("a", a, env_a), ("b", b, env_b)):
        own = (f"data.train={dataset}", environment, "weight_sync.adapter=separate", "grpo.num_prompts_per_step=4")
        alone = run_grpo(tmp_path / name, *SPELLERS, *own)
        assert alone.returncode == 0, alone.stdout + alone.stderr
        expected = load_file(checkpoint(alone, 3) / "policy/adapter" / ADAPTER)
        assert any(t.abs().max() > 1e-3 for n, t in expected.items() if "lora_B" in n)
        for tensor, values in expected.items():
            torch.testing.assert_close(found[name][tensor], values, rtol=0, atol=1e-5)
