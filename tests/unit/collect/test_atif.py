"""ATIF trajectories of a collection. The schema itself is Gym's: tests/contracts/test_gym_atif.py validates by it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl import cli
from nemo_rl.collect.shards import KeySpace, RolloutKey, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.experience.rollout_rows import rollout_row
from nemo_rl.types import Message, TextPart, ThinkingPart, TokenizedMessage, ToolCall, Trajectory
from tests.unit.collect.test_nemo_gym_files import ROLLOUT

BAD_CALL = ToolCall("c2", "add", '{"a": NaN}')
THOUGHT = Message("assistant", (ThinkingPart("Hm."), TextPart("A call? \ud83d")), (BAD_CALL,))
HISTORIES = (
    (*ROLLOUT.message_log[:3], TokenizedMessage(THOUGHT, (4,), (float("-inf"),))),
    (TokenizedMessage(Message("tool", "orphan", tool_call_id="x"), (1,)), ROLLOUT.message_log[-1]),
)


def collected(directory: Path, *trajectories: Trajectory, write_token_ids: bool = True) -> Path:
    """A collection of one task with these rollouts."""
    row = {"question": "1 + 1", "agent_ref": {"name": "adder"}, "tools": [{"type": "function"}]}
    write_tasks(directory, [Task("p0", "sums", "sums", row)])
    with RolloutStore.open(directory, seed=0, keys=KeySpace(1, len(trajectories)), identity={}) as store:
        for index, trajectory in enumerate(trajectories):
            store.append(RolloutKey(0, index), rollout_row(trajectory, write_token_ids=write_token_ids))
    return directory


def exported(directory: Path, **how: Any) -> list[dict[str, Any]]:
    """The trajectories that `merge --to-atif` writes of rollouts with and without further histories."""
    rewritten = replace(ROLLOUT, message_log=HISTORIES[0], other_chains=HISTORIES[1:])
    collection = collected(directory / "c", ROLLOUT, rewritten, **how)
    assert cli.run(["merge", str(collection), "--to-atif", str(directory / "atif")]) == 0
    entries = [json.loads(line) for line in (directory / "atif" / "manifest.jsonl").read_text().splitlines()]
    assert [entry["_ng_rollout_index"] for entry in entries] == [0, 1]
    files = [(directory / "atif" / entry["trajectory_path"]).read_bytes() for entry in entries]
    assert [entry["expected_sha256"] for entry in entries] == [hashlib.sha256(file).hexdigest() for file in files]
    return [json.loads(file) for file in files]


def test_a_rollout_is_steps_with_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    trajectory, _ = exported(tmp_path)
    assert trajectory["agent"]["name"] == "adder"
    assert [step["step_id"] for step in trajectory["steps"]] == [1, 2, 3, 4, 5]
    assert [step["source"] for step in trajectory["steps"]] == ["user", "agent", "user", "agent", "agent"]
    _, example, _, call, last = trajectory["steps"]
    assert example == {"step_id": 2, "source": "agent", "message": "0", "is_copied_context": True}
    assert call["tool_calls"] == [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}}]
    assert call["observation"] == {"results": [{"source_call_id": "c1", "content": "2"}]}
    assert last["metrics"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "prompt_token_ids": [1, 2, 3, 4, 5, 6],
        "completion_token_ids": [7, 8, 9],
        "logprobs": [-0.1, -0.2, -0.3],
    }
    assert trajectory["final_metrics"] == {"total_completion_tokens": 5, "total_steps": 5}
    assert trajectory["extra"]["nemo_rl"]["reward"] == 1.0


def test_what_a_policy_wrote_badly_is_kept_as_it_is(tmp_path: Path) -> None:
    _, trajectory = exported(tmp_path)
    step = trajectory["steps"][-1]
    assert (step["message"], step["reasoning_content"]) == ("A call? \N{REPLACEMENT CHARACTER}", "Hm.")
    (call,) = step["tool_calls"]
    assert (call["arguments"], call["extra"]) == ({}, {"arguments": '{"a": NaN}'})
    assert "logprobs" not in step["metrics"]  # one is infinite
    (other,) = trajectory["subagent_trajectories"]
    assert [(each["source"], each["message"]) for each in other["steps"]] == [("user", "orphan"), ("agent", "It is 2.")]


def test_records_without_tokens_have_steps_without_metrics(tmp_path: Path) -> None:
    trajectory, _ = exported(tmp_path, write_token_ids=False)
    assert [step.get("metrics") for step in trajectory["steps"]] == [None, None, None, {}, {}]


def test_an_export_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collection = collected(tmp_path / "c", ROLLOUT)
    (tmp_path / "atif").mkdir()
    assert cli.run(["merge", str(collection), "--to-atif", str(tmp_path / "atif")]) != 0
    assert "--to-atif" in capsys.readouterr().err
    assert list((tmp_path / "atif").iterdir()) == []
    assert not list(tmp_path.glob(".atif*"))
