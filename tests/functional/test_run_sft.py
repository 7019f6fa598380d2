"""Supervised training through the command line: a few steps, an interruption, and a model that GRPO may begin with."""

import json
from pathlib import Path

import pytest

from tests.functional.cli import ROOT, run_command_line

pytestmark = pytest.mark.timeout(1200)
SCRIPT = ROOT / "examples" / "run_sft.py"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty questions with their answers, and one that is far too long."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    words = [*(f"w{number}" for number in range(20)), "long" * 40]
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_few_steps_on_a_file_of_messages_then_two_more(fresh: Path, chats: Path, tmp_path: Path) -> None:
    arguments = [
        f"policy.model_name={fresh}",
        "data.train.dataset_name=jsonl",
        f"data.train.data_path={chats}",
        "data.validation.size=8",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        "sft.val_period=2",
        "sft.val_at_start=true",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "++policy.sequence_packing.enabled=true",
        "++policy.sequence_packing.train_mb_tokens=128",
    ]
    first = run_command_line(SCRIPT, tmp_path / "first", *arguments, "sft.max_num_steps=2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1 of 21 conversations have more than 64 tokens: dropped 1, truncated 0" in first.stderr
    assert "Validation loss" in first.stdout
    metrics = first.metrics()
    assert metrics[0]["data/train/num_dropped"] == 1
    assert metrics[2]["validation/loss"] < metrics[0]["validation/loss"]
    second = run_command_line(SCRIPT, tmp_path / "second", *arguments, "sft.max_num_steps=4")
    assert second.returncode == 0, second.stdout + second.stderr
    assert sorted(second.metrics()) == [0, 3, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*")) == ["step_2", "step_4"]
    info = json.loads((tmp_path / "checkpoints/step_4/training_info.json").read_text())
    assert info["consumed_prompts"] == 32
    assert info["metrics"]["val:loss"] == pytest.approx(second.metrics()[4]["validation/loss"])


@pytest.mark.slow  # a process for each
def test_dry_run_names_the_ranks_and_a_template_that_cannot_be_cut_is_refused(
    fresh: Path, chats: Path, tmp_path: Path
) -> None:
    shown = run_command_line(SCRIPT, tmp_path, f"policy.model_name={fresh}", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "FSDP2, 1 rank on cpu, float32" in shown.stdout
    template = ROOT / "tests" / "templates" / "hides_assistant.jinja"
    refused = run_command_line(
        SCRIPT, tmp_path, f"policy.model_name={fresh}", f"++policy.tokenizer.chat_template={template}"
    )
    assert refused.returncode == 2
    assert "policy.tokenizer.chat_template" in refused.stderr
