"""DPO through the command line: a few steps on a file of pairs, and their continuation, packed and on two ranks."""

import json
from pathlib import Path

import pytest

from tests.functional.cli import ROOT, run_command_line

pytestmark = pytest.mark.timeout(1200)
SCRIPT = ROOT / "examples" / "run_dpo.py"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty words spelt backward and forward, and one that is far too long."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    words = [*(f"w{number}" for number in range(20)), "long" * 40]
    rows = [{"prompt": word, "chosen": word[::-1], "rejected": word} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "layout",
    [
        ["++policy.sequence_packing={enabled: true, train_mb_tokens: 192, logprob_mb_tokens: 128}"],
        pytest.param(["++policy.dtensor_cfg.data_parallel_size=2"], marks=pytest.mark.slow),
    ],
    ids=["packed", "two ranks"],
)
def test_two_steps_and_two_more_after_a_restart(layout: list[str], fresh: Path, pairs: Path, tmp_path: Path) -> None:
    arguments = [
        f"policy.model_name={fresh}",
        "policy.max_total_sequence_length=64",
        "data.train.dataset_name=jsonl",
        f"++data.train.data_path={pairs}",
        "data.validation.dataset_name=spell_backward",
        "++data.validation.size=8",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "dpo.val_period=2",
        f"++checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        *layout,
    ]
    first = run_command_line(SCRIPT, tmp_path / "first", *arguments, "dpo.max_num_steps=2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "dropped 1 of 21 pairs with more than 64 tokens on a side" in first.stderr
    metrics = first.metrics()
    assert metrics[0]["data/train/num_pairs"] == 20
    assert metrics[0]["validation/preference_loss"] == pytest.approx(0.693147, abs=1e-4)
    assert metrics[1]["train/preference_loss"] == pytest.approx(0.693147, abs=1e-4)  # still the reference
    assert metrics[1]["train/num_valid_samples"] == 8
    assert metrics[2]["train/preference_loss"] < metrics[1]["train/preference_loss"]
    second = run_command_line(SCRIPT, tmp_path / "second", *arguments, "dpo.max_num_steps=4", "++dpo.max_num_epochs=2")
    assert second.returncode == 0, second.stdout + second.stderr
    assert sorted(second.metrics()) == [0, 3, 4]
    assert second.metrics()[3]["train/rewards_chosen_mean"] != 0  # the reference is of the run's first model
