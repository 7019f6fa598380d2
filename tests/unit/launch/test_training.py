"""Background collection in the real loop, with the hf engine in float32."""

import asyncio
import errno
import gc
import json
import math
from pathlib import Path

import pytest

from nemo_rl import durable_files
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.algorithms.grpo import RequiredLogprobs
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.command_line import ExitCode, exit_code_of
from nemo_rl.distributed import cluster
from nemo_rl.errors import ConfigError, PolicyError, RecordError
from nemo_rl.experience import rollout_writer
from nemo_rl.launch import memory_plan, training
from nemo_rl.launch.training import (
    GC_THRESHOLDS,
    open_run,
    required_logprobs,
    run_training,
    tuned_garbage_collection,
)
from nemo_rl.losses.make import make_loss
from nemo_rl.metric_names import ranking_metrics
from nemo_rl.observability import loggers
from tests.support.metric_names import find_undocumented
from tests.unit.launch.conftest import Recipe
from tests.unit.launch.scoring import Closing

pytestmark = pytest.mark.usefixtures("process_state")


def test_thresholds_of_the_garbage_collector_are_restored() -> None:
    before = gc.get_threshold()
    with tuned_garbage_collection():
        assert gc.get_threshold() == GC_THRESHOLDS != before
    assert gc.get_threshold() == before


def test_objects_exempt_from_garbage_collection_are_collected_again_after_a_run() -> None:
    gc.unfreeze()
    with tuned_garbage_collection():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_exempted_from_garbage_collection_stays_so() -> None:
    gc.freeze()
    try:
        with tuned_garbage_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def trained(recipe: Recipe, *overrides: str) -> TrainingProgress:
    return asyncio.run(run_training(recipe(*overrides), "uv run train.py"))


def test_a_run_of_real_parts_trains_writes_its_files_and_ends_with_a_summary(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"input": "z", "output": "z"}) + "\n")
    training = trained(
        recipe,
        "checkpointing.enabled=true",
        "grpo.val_at_end=true",
        f"++data.validation={{dataset_name: jsonl, data_path: {held_out}, env_name: letters}}",
        "weight_sync.verify=true",
    )
    assert training.position.step == 1
    (directory,) = (tmp_path / "runs").iterdir()
    metrics = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics |= json.loads(line)
    names = {name for name in metrics if "/" in name}
    assert find_undocumented(names) == []
    assert names >= {"train/loss", "train/reward", "train/token_mult_prob_error", "validation/accuracy"}
    assert (directory / "config.yaml").read_text().startswith("grpo:")
    assert (directory / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert len((directory / "rollouts" / "train.jsonl").read_text().splitlines()) == 6
    assert len((directory / "rollouts" / "validation.jsonl").read_text().splitlines()) == 1
    checkpoints = directory / "checkpoints"
    assert (checkpoints / "step_1" / "policy" / "weights").is_dir()
    measured = json.loads((checkpoints / "step_1" / "training_info.json").read_text())["metrics"]
    assert {name for name in measured if "/" not in name} <= {
        f"{split}:{name}" for split in ("train", "val") for name in ranking_metrics(split, "grpo")
    }
    out = capsys.readouterr().out
    assert f"Metrics     {directory / 'metrics.jsonl'}" in out
    assert f"Continue    uv run train.py checkpointing.checkpoint_dir={checkpoints} grpo.max_num_steps=2\n" in out


def test_full_run_directory_is_in_the_summary_and_an_error(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loggers, "append_whole", refuse)
    monkeypatch.setattr(rollout_writer, "append_whole", refuse)
    with pytest.raises(RecordError, match=r"metrics\.jsonl lacks \d+, .*train\.jsonl lacks 6"):
        trained(recipe)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Lost"))
    assert line.endswith("rollouts/train.jsonl lacks 6")
    assert exit_code_of(RecordError) == ExitCode.FAILED


def test_checkpoint_directory_that_another_run_uses_is_refused(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "LOCK_WAIT_S", 0.0)
    overrides = ("checkpointing.enabled=true", f"checkpointing.checkpoint_dir={tmp_path / 'saved'}")
    with (
        durable_files.hold_directory(tmp_path / "saved", key="key"),
        pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_dir = .*saved.*in use by process"),
    ):
        trained(recipe, *overrides)
    assert not list((tmp_path / "saved").glob("step_*"))
    assert trained(recipe, *overrides).position.step == 1


def test_a_run_whose_data_ended_goes_on_with_more_epochs(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("checkpointing.enabled=true", "grpo.max_num_steps=100")
    num_steps = trained(recipe, *overrides, "grpo.max_num_epochs=1").position.step
    assert 0 < num_steps < 100
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Continue"))
    *_, checkpoints, epochs = line.split()
    assert epochs == "grpo.max_num_epochs=2"
    assert trained(recipe, *overrides, checkpoints, epochs).position.step == 2 * num_steps


def test_what_was_opened_is_closed_where_a_later_part_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    Closing.closed.clear()

    async def main() -> None:
        config = recipe(
            "env.letters.type=tests.unit.launch.scoring:Closing",
            "++env.other={type: 'tests.unit.launch.scoring:Closing', kwargs: {a: 1}}",
        )
        async with open_run(config):
            raise AssertionError("opened")

    with pytest.raises(ConfigError, match=r"env\.other\.type.*cannot be constructed"):
        asyncio.run(main())
    assert Closing.closed == ["closed"]
    assert not (tmp_path / "runs").exists()


def test_a_start_logs_what_does_not_fit_and_advises_on_an_error_of_memory(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def open_parts(*_: object, **__: object) -> None:
        raise PolicyError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(training, "open_rollout_parts", open_parts)
    monkeypatch.setattr(memory_plan.os, "sysconf", lambda name: 1)

    async def main() -> None:
        async with open_run(recipe()):
            raise AssertionError("opened")

    with pytest.raises(PolicyError) as raised:
        asyncio.run(main())
    (advice,) = raised.value.__notes__
    assert "a smaller policy.train_micro_batch_size" in advice
    assert any("does not fit: training needs" in message for message in caplog.messages)


def test_the_cluster_gets_room_for_a_steps_batches_before_anything_else_connects(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str | None, int]] = []

    def connect(address: str | None, *, object_store_bytes: int, env_vars: dict[str, str]) -> None:
        calls.append((address, object_store_bytes))

    async def open_parts(*arguments: object, **options: object) -> None:
        raise ConfigError("env", "letters", f"opened after {calls}")

    monkeypatch.setattr(cluster, "connect", connect)
    monkeypatch.setattr(training, "open_rollout_parts", open_parts)

    async def main() -> None:
        async with open_run(recipe("++cluster.address=head:6379")):
            raise AssertionError("opened")

    with pytest.raises(ConfigError, match=rf"opened after \[\('head:6379', {2 * 6 * 32 * 40}\)\]"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), RequiredLogprobs(previous=False, reference=False)),
        (("policy.train_global_batch_size=3", "policy.train_micro_batch_size=3"), RequiredLogprobs(True, False)),
        (("grpo.seq_logprob_error_threshold=2.0",), RequiredLogprobs(True, False)),
        (("loss_fn.reference_policy_kl_penalty=0.1",), RequiredLogprobs(False, True)),
    ],
)
def test_log_probs_are_computed_before_training_only_where_they_are_read(
    recipe: Recipe, overrides: tuple[str, ...], expected: RequiredLogprobs
) -> None:
    config = recipe(*overrides)
    estimator = make_advantage_estimator(config.grpo.adv_estimator, config.loss_fn)
    assert required_logprobs(config, make_loss(config.loss_fn), estimator) == expected


CORRECTED = (
    "grpo.max_num_steps=5",
    "grpo.max_num_epochs=2",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "policy.optimizer.kwargs.lr=0.01",
)


def train_in_background(
    recipe: Recipe, runs: Path, *overrides: str
) -> tuple[TrainingProgress, dict[int, dict[str, float]]]:
    """What a run reached, and its metrics by step."""
    training = asyncio.run(run_training(recipe(*CORRECTED, f"logger.log_dir={runs}", *overrides), "uv run train.py"))
    metrics: dict[int, dict[str, float]] = {}
    (path,) = runs.glob("*/metrics.jsonl")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        metrics.setdefault(row["step"], {}).update(row)
    return training, metrics


@pytest.mark.parametrize(("overlong", "num_rollouts"), [("drop", 6), ("mask", 3)])
def test_a_run_trains_beside_a_prompt_that_is_too_long(
    recipe: Recipe, tmp_path: Path, overlong: str, num_rollouts: int
) -> None:
    rows = [{"input": text, "output": text} for text in ("a" * 40, "b", "c", "d")]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.train.data_path={tmp_path / 'long.jsonl'}", "++data.shuffle=false", f"++data.overlong={overlong}")
    training = asyncio.run(run_training(recipe(*words, f"logger.log_dir={tmp_path / overlong}"), "uv run train.py"))
    (path,) = (tmp_path / overlong).glob("*/metrics.jsonl")
    (row,) = (line for line in map(json.loads, path.read_text().splitlines()) if "train/loss" in line)
    assert (row["train/overlong_prompts"], row["train/num_rollouts"]) == (1, num_rollouts)
    assert training.position.source_state["consumed_prompts"] == (3 if overlong == "drop" else 2)


def test_with_a_bound_of_0_the_asynchronous_run_equals_the_synchronous_one(recipe: Recipe, tmp_path: Path) -> None:
    _, sync = train_in_background(recipe, tmp_path / "sync")
    _, background = train_in_background(
        recipe, tmp_path / "async", "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"
    )
    assert list(sync) == list(background) == [1, 2, 3, 4, 5]
    assert len({step["train/loss"] for step in sync.values()}) > 1
    for step, metrics in sync.items():
        for name, value in metrics.items():
            if name.startswith("train/"):
                assert math.isclose(background[step][name], value, rel_tol=1e-6, abs_tol=1e-6), (step, name)


def test_a_run_collects_ahead_within_its_bound_and_resumes_with_its_buffer(recipe: Recipe, tmp_path: Path) -> None:
    background = (
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "checkpointing.enabled=true",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=null",
    )
    _, first = train_in_background(recipe, tmp_path / "first", *background, "grpo.max_num_steps=2")
    assert (tmp_path / "checkpoints" / "step_2" / "replay_buffer.pt").is_file()
    training, second = train_in_background(recipe, tmp_path / "second", *background, "grpo.max_num_steps=100")
    assert training.data_exhausted
    ages = [step["train/max_trajectory_age"] for step in (first | second).values() if "train/loss" in step]
    assert len(ages) == 6
    assert 0 < max(ages) <= 2
    assert find_undocumented(name for step in (first | second).values() for name in step if "/" in name) == []
    rows = [json.loads(line) for path in sorted(tmp_path.glob("*/*/rollouts/train.jsonl")) for line in path.open()]
    assert sorted({row["group_id"].rpartition(":")[2] for row in rows}, key=int) == [str(place) for place in range(12)]
    assert len(rows) == 12 * 3
