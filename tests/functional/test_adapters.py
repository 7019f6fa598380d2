"""Background rollouts under versions of LoRA adapters, of one policy and of two: each token's log-prob is that of the
version and policy that its record names, also of a run that is killed and resumed, whose steps are those of a run that
trains on the same rollouts without an interruption."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.policy_steps import make_batches, merge_policy_metrics, train_policies
from nemo_rl.config.loading import load_config
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.training import open_run
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.recipes import find_recipe
from nemo_rl.types import CollectedGroups
from nemo_rl.viewer.replay import read_groups
from tests.functional.cli import ROOT, Run, command, environment, run_directory, run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS, KILLED_AT, MAX_AGE = 20, 10, 2
OVERRIDES = (
    *(f"grpo.max_num_steps={NUM_STEPS}", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={MAX_AGE}"),
    *("grpo.val_period=0", "grpo.val_at_end=false", "grpo.val_at_start=false", "logger.progress=false"),
    *("loss_fn.use_importance_sampling_correction=true", "policy.dtensor_cfg.lora_cfg.save_merged=false"),
    *("checkpointing.metric_name=null", "checkpointing.save_period=1", "checkpointing.keep_top_k=null"),
    "rollout.write_token_ids=true",
    "++policy.optimizer.kwargs.eps=1.0e-3",  # AdamW divides rounding by what may be near 0
)
ADAPTERS = {  # of each recipe: where a checkpoint has the adapter of each policy
    "lora": {"": "policy/adapter"},
    "self_play": {"first": "policy/adapters/first", "second": "policy/adapters/second"},
}
EXACT = 1e-5


def rollouts(directory: Path) -> Iterator[dict[str, Any]]:
    for line in (directory / "rollouts/train.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["failure"] is None
        yield row


def saved_steps(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))


def kill_after(log_dir: Path, checkpoints: Path, step: int, recipe: Sequence[str]) -> Path:
    """Kill a run once the checkpoint of `step` is complete; return its directory."""
    own = (f"logger.log_dir={log_dir}", f"checkpointing.checkpoint_dir={checkpoints}")
    with subprocess.Popen(
        command(*recipe, *own), cwd=ROOT, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 500
        while step not in saved_steps(checkpoints) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    directory = run_directory(log_dir)
    assert directory is not None
    assert step in saved_steps(checkpoints)
    for file in (directory / "rollouts/train.jsonl", directory / "metrics.jsonl"):  # a last line may be cut
        text = file.read_text()
        file.write_text(text[: text.rfind("\n") + 1])
    return directory


class Versions:
    """The model of transformers and peft under each saved adapter; version 0 is the base."""

    def __init__(self, checkpoints: Path, adapters: Mapping[str, str]) -> None:
        self.path = asyncio.run(resolve_model("nemo_rl/quickstart"))
        self.checkpoints = checkpoints
        self.adapters = adapters

    def of(self, version: int, policy: str) -> Any:
        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        if version == 0:
            return base
        return PeftModel.from_pretrained(base, self.checkpoints / f"step_{version}" / self.adapters[policy]).eval()


@torch.no_grad()
def worst_difference(model: Any, rows: Sequence[Mapping[str, Any]], policy: str) -> float:
    """Return the largest difference of a log-prob that the policy sampled with from the model's."""
    worst = 0.0
    for row in rows:
        ids = torch.tensor([[token for message in row["messages"] for token in message.get("token_ids", ())]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        end = 0
        for message in row["messages"]:
            start, end = end, end + len(message.get("token_ids", ()))
            sampled = message.get("generation_logprobs")
            if sampled and message.get("policy", "") == policy:
                assert "weight_spans" not in message
                exact = logprobs[start - 1 : end - 1].gather(-1, ids[0, start:end, None])[:, 0]
                worst = max(worst, float((exact - torch.tensor(sampled)).abs().max()))
    return worst


def train_without_interruption(
    recipe: str, log_dir: Path, trained: Sequence[Path]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train on recorded rollouts, those of step n in the run directory trained[n - 1]; return the metrics of each step
    and what a refit would bring in the end."""
    own = (f"logger.log_dir={log_dir}", "checkpointing.enabled=false")
    config = load_config(find_recipe(recipe), [*OVERRIDES, *own])

    async def main() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        metrics = []
        async with open_run(config) as run:
            for step, directory in enumerate(trained, start=1):
                collected = CollectedGroups(tuple(read_groups(directory / "rollouts/train.jsonl", step)))
                batches = await make_batches(run, collected, StepTimer(step=step))
                metrics.append(merge_policy_metrics(await train_policies(run, batches), {}))
            adapters = await run.policy.run_with_weights(tuple, adapter_only=True)
            return metrics, {name: tensor.clone() for name, tensor in adapters}

    return asyncio.run(main())


def check_tokens(checkpoints: Path, recipe: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Compare every token with the model of the version and policy that its record names."""
    assert {row["step"] - 1 - row["weight_versions"][0] for row in rows} == set(range(MAX_AGE + 1))
    versions = Versions(checkpoints, ADAPTERS[recipe])
    for policy in ADAPTERS[recipe]:
        by_version: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            oldest, newest = row["weight_versions"]
            assert oldest == newest
            if any(m.get("generation_logprobs") and m.get("policy", "") == policy for m in row["messages"]):
                by_version.setdefault(newest, []).append(row)
        assert (
            len(by_version) >= NUM_STEPS - 2 * MAX_AGE - 1
        )  # the newest ones, and those of lost rollouts are not there
        for version, own in by_version.items():
            assert worst_difference(versions.of(version, policy), own, policy) <= EXACT, (version, policy)
        other = worst_difference(versions.of(1, policy), by_version[max(by_version)], policy)
        assert other > 100 * EXACT  # the versions do differ


@pytest.mark.parametrize("recipe", ADAPTERS)
def test_a_killed_run_goes_on_exactly_and_every_token_is_of_its_version(recipe: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ("--config", str(ROOT / f"examples/configs/{recipe}.yaml"), *OVERRIDES)
    first = kill_after(tmp_path / "first", checkpoints, KILLED_AT, arguments)
    kept = saved_steps(checkpoints)[-1]
    assert kept < NUM_STEPS
    again = run_grpo(tmp_path / "second", *arguments, f"checkpointing.checkpoint_dir={checkpoints}")
    assert again.returncode == 0, again.stderr
    assert again.directory is not None
    assert saved_steps(checkpoints)[-1] == NUM_STEPS
    assert "refits bring the adapter alone" in again.stderr

    trained = [first if step <= kept else again.directory for step in range(1, NUM_STEPS + 1)]
    rows = [r for own in (first, again.directory) for r in rollouts(own) if trained[r["step"] - 1] is own]
    assert len({row["group_id"] for row in rows}) == 4 * NUM_STEPS  # no prompt is lost, and none is trained on twice
    check_tokens(checkpoints, recipe, rows)

    found, adapters = train_without_interruption(recipe, tmp_path / "uninterrupted", trained)
    logged = {directory: Run(0, "", "", directory).metrics() for directory in (first, again.directory)}
    for step, metrics in enumerate(found, start=1):
        own = logged[trained[step - 1]][step]
        compared = metrics.keys() - {"train_flops"}  # logged as a rate
        assert {"loss", "grad_norm", "reward"} <= compared
        for name in compared:
            assert own[f"train/{name}"] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5, nan_ok=True), (step, name)
    for index, (policy, path) in enumerate(ADAPTERS[recipe].items()):
        saved = load_file(checkpoints / f"step_{NUM_STEPS}" / path / "adapter_model.safetensors")
        for name, tensor in saved.items():
            scale = 2.0 if "lora_B" in name else 1.0  # alpha / dim, which a refit brings in B
            torch.testing.assert_close(
                adapters[f"{index}:{name}" if policy else name], tensor * scale, rtol=0, atol=EXACT
            )
