"""Background rollouts under versions of a LoRA adapter: each token's log-prob is that of the version its record names,
also of a run that is killed and resumed."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from nemo_rl.launch.models import resolve_model
from tests.functional.cli import ROOT, command, environment, run_directory, run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS, MAX_AGE = 20, 2
RECIPE = (
    *("--config", str(ROOT / "examples/configs/lora.yaml"), f"grpo.max_num_steps={NUM_STEPS}"),
    *("grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={MAX_AGE}"),
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.val_period=0", "grpo.val_at_end=false"),
    *("grpo.val_at_start=false", "loss_fn.use_importance_sampling_correction=true", "logger.progress=false"),
    *("checkpointing.metric_name=null", "checkpointing.save_period=1", "checkpointing.keep_top_k=null"),
    "rollout.write_token_ids=true",
)


def rollouts(directory: Path) -> Iterator[dict[str, Any]]:
    for line in (directory / "rollouts/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["failure"] is None
        yield row


def saved_steps(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))


def kill_after(log_dir: Path, checkpoints: Path, step: int) -> Path:
    """Kill a run once the checkpoint of `step` is complete; return its directory."""
    own = (f"logger.log_dir={log_dir}", f"checkpointing.checkpoint_dir={checkpoints}")
    with subprocess.Popen(
        command(*RECIPE, *own), cwd=ROOT, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 500
        while step not in saved_steps(checkpoints) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    directory = run_directory(log_dir)
    assert directory is not None
    assert step in saved_steps(checkpoints)
    return directory


class Versions:
    """The model of transformers and peft under each saved adapter; version 0 is the base."""

    def __init__(self, checkpoints: Path) -> None:
        self.path = asyncio.run(resolve_model("nemo_rl/quickstart"))
        self.base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self.checkpoints = checkpoints

    def of(self, version: int) -> Any:
        if version == 0:
            return self.base
        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return PeftModel.from_pretrained(base, self.checkpoints / f"step_{version}/policy/adapter").eval()


@torch.no_grad()
def worst_difference(model: Any, rows: list[dict[str, Any]]) -> float:
    worst = 0.0
    for row in rows:
        ids = torch.tensor([[token for message in row["messages"] for token in message["token_ids"]]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        end = 0
        for message in row["messages"]:
            start, end = end, end + len(message["token_ids"])
            if sampled := message.get("generation_logprobs"):
                assert "weight_spans" not in message
                exact = logprobs[start - 1 : end - 1].gather(-1, ids[0, start:end, None])[:, 0]
                worst = max(worst, float((exact - torch.tensor(sampled)).abs().max()))
    return worst


def test_every_token_is_of_the_version_that_its_record_names(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = kill_after(tmp_path / "first", checkpoints, NUM_STEPS // 2)
    kept = saved_steps(checkpoints)[-1]
    again = run_grpo(tmp_path / "second", *RECIPE, f"checkpointing.checkpoint_dir={checkpoints}")
    assert again.returncode == 0, again.stderr
    assert again.directory is not None
    assert saved_steps(checkpoints)[-1] == NUM_STEPS
    assert "refits bring the adapter alone: rollouts run while the policy trains" in again.stderr

    by_version: dict[int, list[dict[str, Any]]] = {}
    ages = set()
    for directory in (first, again.directory):
        for row in rollouts(directory):
            oldest, newest = row["weight_versions"]
            assert oldest == newest
            ages.add(row["step"] - 1 - oldest)
            if directory is again.directory or newest <= kept:  # later ones were lost, and trained again
                by_version.setdefault(newest, []).append(row)
    assert ages == set(range(MAX_AGE + 1))
    assert len(by_version) >= NUM_STEPS - 2 * MAX_AGE - 1  # a few were sampled under before the end of the first alone
    versions = Versions(checkpoints)
    for version, rows in by_version.items():
        assert worst_difference(versions.of(version), rows) <= 2e-5, version
    other = worst_difference(versions.of(1), by_version[max(by_version)])
    assert other > 1e-3  # the versions do differ
