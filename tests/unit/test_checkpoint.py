import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.checkpoint import (
    Checkpoint,
    CheckpointStore,
    SaveDeadline,
    TrainingInfo,
    format_bytes,
    load_state,
    parse_duration_s,
    restore_rng_state,
    save_rng_state,
    save_state,
    write_manifest,
)
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.errors import CheckpointError, ConfigError


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


@pytest.fixture(autouse=True)
def disk_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's fsync takes long, and a killed process loses nothing without it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store_in(directory: Path, **options: object) -> CheckpointStore:
    return CheckpointStore(CheckpointingConfig.model_validate({"enabled": True, **options}), directory)


def save(store: CheckpointStore, step: int, content: str = "weights", **metrics: float) -> None:
    path = store.begin(step)
    (path / "policy").mkdir()
    (path / "policy" / "weights").write_text(content)
    named = {name.replace("_", ":", 1): value for name, value in metrics.items()}
    store.commit(path, TrainingInfo(step, consumed_prompts=4 * step, epoch=0, metrics=named))


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def content(store: CheckpointStore) -> str:
    latest = store.latest()
    assert latest is not None
    return (latest.path / "policy" / "weights").read_text()


def test_committed_checkpoint_is_found_with_its_info(tmp_path: Path) -> None:
    store = store_in(tmp_path / "checkpoints")
    assert store.latest() is None
    save(store, 3, train_reward=0.25, val_accuracy=math.nan)
    latest = store_in(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.path == tmp_path / "checkpoints" / "step_3"
    assert (latest.info.step, latest.info.consumed_prompts, latest.info.epoch) == (3, 12, 0)
    assert latest.info.metrics["train:reward"] == 0.25
    assert math.isnan(latest.info.metrics["val:accuracy"])


def test_latest_compares_steps_as_numbers(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=None)
    for step in (9, 10, 100):
        save(store, step)
    assert steps(store) == [9, 10, 100]


def test_unfinished_and_incomplete_checkpoints_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    store.begin(2)
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_4" / "training_info.json").write_text('{"step": 4, "cons')
    (tmp_path / "step_five").mkdir()
    assert steps(store) == [1]
    assert f"ignoring incomplete checkpoint {tmp_path / 'step_3'}" in caplog.text


def test_begin_removes_what_interrupted_saves_left(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    (store.begin(2) / "half").write_text("x")
    (tmp_path / "mine").mkdir()
    assert list(store.begin(3).iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "tmp_step_3"]


def test_commit_refuses_another_steps_directory(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with pytest.raises(CheckpointError, match="not begun for step 2"):
        store.commit(store.begin(1), TrainingInfo(2, 0, 0))


def test_without_a_metric_the_newest_are_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert steps(store) == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_3", "step_4"]


def test_best_by_metric_and_the_newest_are_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=2, metric_name="val:accuracy")
    for step, accuracy in enumerate((0.5, 0.9, 0.7, 0.1, 0.2), start=1):
        save(store, step, val_accuracy=accuracy)
    assert steps(store) == [2, 3, 5]
    best = store.best()
    assert best is not None
    assert best.step == 2


def test_the_newest_step_is_kept_where_an_older_one_is_written_after_it(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=1, metric_name="val:accuracy")
    save(store, 5, val_accuracy=0.1)
    save(store, 3, val_accuracy=0.9)
    assert steps(store) == [3, 5]


def test_lower_may_be_better(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=1, metric_name="train:loss", higher_is_better=False)
    for step, loss in enumerate((0.5, 0.2, 0.7), start=1):
        save(store, step, train_loss=loss)
    assert steps(store) == [2, 3]


def test_ties_go_to_the_newer(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep_top_k=1, metric_name="val:accuracy")
    for step, accuracy in enumerate((0.5, 0.5, 0.1), start=1):
        save(store, step, val_accuracy=accuracy)
    assert steps(store) == [2, 3]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_missing_and_nan_metrics_rank_last(tmp_path: Path, higher_is_better: bool) -> None:
    store = store_in(tmp_path, keep_top_k=1, metric_name="val:accuracy", higher_is_better=higher_is_better)
    save(store, 1, val_accuracy=0.5)
    save(store, 2, train_reward=1.0)
    save(store, 3, val_accuracy=math.nan)
    save(store, 4, train_reward=1.0)
    assert steps(store) == [1, 4]


def test_unknown_metric_names_the_known_ones_and_loses_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path, metric_name="val:acuracy")
    with pytest.raises(ConfigError, match=r"known: val:accuracy, val:avg_length"):
        save(store, 1, train_reward=1.0, val_accuracy=0.5, val_avg_length=3.0)
    assert steps(store) == [1]


def test_metric_may_come_with_a_later_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path, metric_name="val:accuracy")
    with caplog.at_level(logging.WARNING):
        save(store, 1, train_reward=1.0)
    assert "val:accuracy was not measured at step 1" in caplog.text
    save(store, 2, val_accuracy=0.5)
    assert steps(store) == [1, 2]


def test_metric_needs_its_prefix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='must begin with "val:" or "train:"'):
        store_in(tmp_path, metric_name="accuracy")


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, 1, "old")
    save(store, 1, "new")
    assert content(store) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Die before the n-th rename, sync or removal; a removal that dies has lost its first file already."""
    calls = iter(range(1, 10_000))

    def dying(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                if name == "rmtree":
                    for path in sorted(Path(args[0]).rglob("*")):
                        if path.is_file():
                            path.unlink()
                            break
                raise Killed
            return act(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "rename", dying("rename", os.rename))
    monkeypatch.setattr(os, "fsync", dying("fsync", os.fsync))
    monkeypatch.setattr(shutil, "rmtree", dying("rmtree", shutil.rmtree))


def killed_save(directory: Path, number: int, step: int) -> bool:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, number)
        try:
            save(store_in(directory, keep_top_k=1), step, "new")
        except Killed:
            return True
    return False


@pytest.mark.parametrize("step", [1, 2], ids=["same-step-again", "next-step"])
def test_killed_at_any_point_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, step: int) -> None:
    seen = []
    for number in range(1, 100):
        directory = tmp_path / str(number)
        save(store_in(directory, keep_top_k=1), 1, "old")
        if not killed_save(directory, number, step):
            break
        survivor = content(store_in(directory))
        seen.append(survivor)
        save(store_in(directory, keep_top_k=1), 3, "newest")  # the next save cleans up
        assert content(store_in(directory)) == "newest"
        assert [p.name for p in directory.iterdir()] == ["step_3"]
    assert set(seen) == {"old", "new"}
    assert seen == sorted(seen, reverse=True)  # once the new one is there, it stays


def test_killed_again_while_cleaning_up_still_leaves_a_checkpoint(tmp_path: Path) -> None:
    for first in range(1, 13):  # a save that replaces a step has 11 points to die at, one that cleans up has 2 more
        for second in range(1, 15):
            directory = tmp_path / f"{first}-{second}"
            save(store_in(directory, keep_top_k=1), 1, "old")
            assert killed_save(directory, first, 1) == (first <= 11)
            killed_save(directory, second, 1)
            assert content(store_in(directory)) in ("old", "new")


def test_saves_by_period_and_at_the_end(tmp_path: Path) -> None:
    store = store_in(tmp_path, save_period=5)
    assert [step for step in range(1, 13) if store.should_save(step, is_last=step == 12)] == [5, 10, 12]


def test_disabled_never_saves(tmp_path: Path) -> None:
    assert not store_in(tmp_path, enabled=False).should_save(10, is_last=True)


def test_deadline_asks_once_before_a_step_would_cross_it() -> None:
    clock = Clock()
    deadline = SaveDeadline(100.0, clock)
    due = []
    for now in (50.0, 60.0, 75.0, 80.0, 84.0, 86.0, 90.0, 120.0):
        clock.now = now
        if deadline.is_due():
            due.append(now)
    assert due == [50.0]  # nothing is known but one step of 50 s: another would end at the deadline


def test_deadline_forgets_the_start_once_a_step_was_measured() -> None:
    clock = Clock()
    deadline = SaveDeadline(100.0, clock)
    due = []
    for now in (40.0, 50.0, 65.0, 80.0, 84.0, 86.0, 90.0, 120.0):
        clock.now = now
        if deadline.is_due():
            due.append(now)
    assert due == [86.0]


def test_store_saves_before_its_deadline(tmp_path: Path) -> None:
    clock = Clock()
    config = CheckpointingConfig.model_validate(
        {"enabled": True, "save_period": 1000, "checkpoint_must_save_by": "00:01:40"}
    )
    store = CheckpointStore(config, tmp_path, clock=clock)
    saved = []
    for step in range(1, 13):
        clock.now += 10.0
        if store.should_save(step):
            saved.append(step)
    assert saved == [9]


@pytest.mark.parametrize(
    ("text", "expected"), [("00:03:30:00", 12600.0), ("01:00:05", 3605.0), ("2:00:00:00", 172800.0)]
)
def test_duration_is_read(text: str, expected: float) -> None:
    assert parse_duration_s(text) == expected


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    seed_all(1)
    np.random.normal()  # the second of a pair is kept in the state
    save_rng_state(tmp_path / "rng.pt")
    expected = (random.random(), np.random.normal(), np.random.rand(), torch.rand(2).tolist())
    seed_all(9)
    restore_rng_state(tmp_path / "rng.pt")
    assert (random.random(), np.random.normal(), np.random.rand(), torch.rand(2).tolist()) == expected


def test_state_is_read_back(tmp_path: Path) -> None:
    state = {"position": 3, "order": [2, 0, 1], "generator": torch.tensor([1, 2], dtype=torch.uint8), "name": "train"}
    save_state(tmp_path / "train_dataloader.pt", state)
    loaded = load_state(tmp_path / "train_dataloader.pt")
    assert loaded["generator"].tolist() == [1, 2]
    assert {k: v for k, v in loaded.items() if k != "generator"} == {
        "position": 3,
        "order": [2, 0, 1],
        "name": "train",
    }


def test_state_that_could_not_be_read_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        save_state(tmp_path / "state.pt", {"clock": Clock()})


def test_missing_state_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rng\.pt cannot be read"):
        restore_rng_state(tmp_path / "rng.pt")


def test_disk_errors_name_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the checkpoint of step 1 cannot be begun"):
        store_in(tmp_path / "file").begin(1)


# ---- damage


def write_bytes(file: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)


def flip(position: int) -> Callable[[Path], None]:
    def change(content: bytearray) -> None:
        content[position] ^= 1

    return lambda file: write_bytes(file, change)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def edit_json(**values: object) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def edit_info(**values: object) -> Callable[[Path], None]:
    """Change the training info, and the manifest with it: only the value itself tells."""

    def change(file: Path) -> None:
        edit_json(**values)(file)
        (file.parent / "manifest.json").unlink()
        write_manifest(file.parent, 2)

    return change


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


WEIGHTS, OPTIMIZER, RNG = "policy/weights/model.safetensors", "policy/optimizer/__0_0.distcp", "rng_state.pt"
INFO, MANIFEST = "training_info.json", "manifest.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped first bit of the weights": (WEIGHTS, flip(0), "other content than was written"),
    "flipped last bit of the weights": (WEIGHTS, flip(-1), "other content than was written"),
    "flipped bit of the optimizer": (OPTIMIZER, flip(7), "other content than was written"),
    "flipped bit of the random state": (RNG, flip(3), "other content than was written"),
    "flipped bit of the position in the data": ("train_dataloader.pt", flip(3), "other content than was written"),
    "zeros in the weights": (WEIGHTS, zero, "other content than was written"),
    "zeros in the optimizer": (OPTIMIZER, zero, "other content than was written"),
    "cut weights": (WEIGHTS, cut, r"has 63 bytes, and was written with 64"),
    "empty weights": (WEIGHTS, empty, "has 0 bytes"),
    "empty optimizer": (OPTIMIZER, empty, "has 0 bytes"),
    "longer weights": (WEIGHTS, grow, r"has 65 bytes"),
    "missing weights": (WEIGHTS, Path.unlink, "model.safetensors is missing"),
    "missing part of the optimizer": (OPTIMIZER, Path.unlink, "__0_0.distcp is missing"),
    "missing optimizer": ("policy/optimizer", shutil.rmtree, "policy/optimizer/.* is missing"),
    "missing policy": ("policy", shutil.rmtree, "policy/.* is missing"),
    "missing position in the data": ("train_dataloader.pt", Path.unlink, "train_dataloader.pt is missing"),
    "missing random state": (RNG, Path.unlink, "rng_state.pt is missing"),
    "file replaced by a directory": (WEIGHTS, as_directory, "model.safetensors is missing"),
    "weights of another step": (WEIGHTS, lambda file: file.write_bytes(bytes([1]) * 64), "other content"),
    "foreign weights beside them": ("policy/weights/extra.safetensors", Path.touch, "was not written with"),
    "missing training info": (INFO, Path.unlink, "training_info.json is missing"),
    "training info that is no JSON": (INFO, lambda file: file.write_text('{"step": 2, "cons'), "has 17 bytes"),
    "another step": (INFO, edit_info(step=7), "step is 7, in the directory of step 2"),
    "a step that is text": (INFO, edit_info(step="2"), "step is '2', not a count"),
    "a step that is a fraction": (INFO, edit_info(step=2.0), "step is 2.0, not a count"),
    "a step that is true": (INFO, edit_info(step=True), "step is True, not a count"),
    "a negative number of prompts": (INFO, edit_info(consumed_prompts=-1), "consumed_prompts is -1, not a count"),
    "metrics that are no numbers": (INFO, edit_info(metrics={"a": []}), "metrics are no numbers"),
    "missing manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "empty manifest": (MANIFEST, empty, "manifest.json cannot be read"),
    "deep manifest": (MANIFEST, lambda file: file.write_text("[" * 100_000), "manifest.json cannot be read"),
    "manifest that is a list": (MANIFEST, lambda file: file.write_text("[]"), "holds no JSON object"),
    "manifest that is no text": (MANIFEST, lambda file: file.write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
    "manifest without files": (MANIFEST, edit_json(files=3), "lists no files"),
    "manifest of another step": (MANIFEST, edit_json(step=1), "has step 1, not 2"),
}


def save_whole(store: CheckpointStore, step: int) -> None:
    path = store.begin(step)
    contents = {WEIGHTS: bytes([step]) * 64, OPTIMIZER: bytes([step]) * 32, RNG: b"random", "config.yaml": b"a: 1"}
    for name, data in (contents | {"train_dataloader.pt": b"position"}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    store.commit(path, TrainingInfo(step, consumed_prompts=4 * step, epoch=0))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    name, change, problem = DAMAGES[damage]
    store = store_in(tmp_path)
    for step in (1, 2):
        save_whole(store, step)
    change(tmp_path / "step_2" / name)
    resumed = store.resume_point()
    assert resumed is not None
    assert resumed.path == tmp_path / "step_1"
    assert re.search(f"damaged checkpoint: .*step_2.*{problem}", caplog.text)
    store.set_damaged_aside(resumed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_2", "step_1"]
    save_whole(store, 2)
    assert store.resume_point() == store.latest() == Checkpoint(tmp_path / "step_2", TrainingInfo(2, 8, 0))


def test_intact_checkpoint_is_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    assert store.resume_point() is None
    save_whole(store, 1)
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    assert store.resume_point() == store.latest()
    assert caplog.text == ""


def test_run_does_not_start_afresh_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for step in (1, 2):
        save_whole(store, step)
        cut(tmp_path / f"step_{step}" / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be resumed from: .*step_2.*; .*step_1.*; remove"
    ):
        store.resume_point()


def test_sizes_are_told_as_people_read_them() -> None:
    assert [format_bytes(n) for n in (7, 1500, 2_500_000, 1_500_000_000)] == [
        "7 bytes",
        "1.50 kB",
        "2.50 MB",
        "1.50 GB",
    ]
