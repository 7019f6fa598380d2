import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.experience import rollout_details
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.rollout_details import RolloutDetails
from nemo_rl.types import TrajectoryGroup
from tests.fakes.policy import FakePolicy
from tests.unit.algorithms.rollouts import make_group


def record(details: RolloutDetails, groups: list[TrajectoryGroup], steps: range) -> None:
    batch, rows = assemble_batch(groups, min_group_size=2)
    batch[keys.ADVANTAGES] = batch[keys.REWARD][:, None] * batch[keys.TOKEN_MASK] * 2
    for step in steps:
        trained = batch.clone()
        details.mark(step, trained)
        asyncio.run(details.record(step, trained, rows, FakePolicy()))
    details.close()


def make_details(path: Path, **options: Any) -> RolloutDetails:
    values: dict[str, Any] = {"num_groups": 1, **options}
    return RolloutDetails(path, decode=lambda ids: f"<{ids[0]}>", **values)


def test_lines_are_those_of_the_first_groups_that_are_trained_on(tmp_path: Path) -> None:
    groups = [make_group([1.0, None], "small"), make_group([0.0, None, 1.5], "a"), make_group([1.0, 1.0], "b")]
    path = tmp_path / "rollouts" / "details.jsonl"
    record(make_details(path), groups, range(1, 2))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert [(row["group_id"], row["generation_index"], row["chain"]) for row in (first, second)] == [
        ("a", 0, 0),
        ("a", 2, 0),
    ]
    assert second == {
        "step": 1,
        "group_id": "a",
        "generation_index": 2,
        "chain": 0,
        "num_tokens": 5,
        "num_omitted": 0,
        "text": ["<1>", "<2>", "<3>", "<7>", "<7>"],
        "mask": "00011",
        "policy_logprobs": [-0.5, -0.5],
        "engine_logprobs": [-0.5, -0.5],
        "advantage": 3.0,
    }


def test_chains_of_a_trajectory_keep_their_number(tmp_path: Path) -> None:
    group = make_group([0.0, 1.0])
    first, second = group.trajectories
    forked = dataclasses.replace(second, other_chains=(second.message_log, second.message_log))
    path = tmp_path / "details.jsonl"
    record(make_details(path), [dataclasses.replace(group, trajectories=(forked, first))], range(1, 2))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["generation_index"], row["chain"]) for row in rows] == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_long_rollout_keeps_beginning_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_details, "MAX_TOKENS", 4)
    path = tmp_path / "details.jsonl"
    record(make_details(path), [make_group([0.0, 1.0])], range(1, 2))
    row = json.loads(path.read_text().splitlines()[0])
    assert (row["num_omitted"], row["text"], row["mask"]) == (1, ["<1>", "<2>", "<7>", "<7>"], "0011")


def test_file_stays_below_its_bound_and_covers_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_details, "MAX_PENDING", 100)  # no step is left out because the disk is slow
    path = tmp_path / "details.jsonl"
    record(make_details(path, max_bytes=4000), [make_group([0.0, 1.0])], range(1, 101))
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert path.stat().st_size <= 4000
    assert min(steps) <= 32
    assert max(steps) >= 64
    period = steps[0]
    assert steps == [step for step in range(period, 101, period) for _ in range(2)]


def test_nonfinite_logprobs_are_null(tmp_path: Path) -> None:
    groups = [make_group([0.0, 1.0])]
    batch, rows = assemble_batch(groups, min_group_size=2)
    batch[keys.PREV_LOGPROBS] = torch.where(batch[keys.TOKEN_MASK] > 0, float("-inf"), 0.0)
    path = tmp_path / "details.jsonl"
    details = make_details(path)
    details.mark(1, batch)
    policy = FakePolicy()
    asyncio.run(details.record(1, batch, rows, policy))
    details.close()
    assert (keys.RECORDED in batch, policy.calls) == (False, [])  # the batch has them already
    row = json.loads(path.read_text().splitlines()[0])
    assert (row["policy_logprobs"], "advantage" in row) == ([None, None], False)


def test_unwritable_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "details.jsonl"
    path.mkdir()
    record(make_details(path), [make_group([0.0, 1.0])], range(1, 4))
    assert [r.message for r in caplog.records] == [f"details of rollouts cannot be written to {path}"]
