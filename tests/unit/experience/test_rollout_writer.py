"""Rollouts as lines of a file."""

import asyncio
import errno
import json
import logging
import math
import os
import threading
from dataclasses import replace

import pytest

from nemo_rl.errors import RolloutError
from nemo_rl.experience import rollout_writer
from nemo_rl.experience.rollout_rows import encode_json_line, rollout_row
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    Prompt,
    StopReason,
    Timings,
    TokenizedMessage,
    ToolCall,
    Trajectory,
    WeightSpan,
)

ROLLOUT = Trajectory(
    prompt=Prompt("p", "game", (Message("user", "Frage: größer?"),), dataset="puzzles"),
    group_id="0:p:3",
    generation_index=1,
    message_log=(
        TokenizedMessage(Message("user", "Frage: größer?"), (1, 2, 3)),
        TokenizedMessage(Message("assistant", "ja", (ToolCall("c", "add", "{}"),)), (4, 0), (-0.5, -0.25)),
        TokenizedMessage(Message("tool", "3", tool_call_id="c"), ()),
    ),
    stop_reason=StopReason.DONE,
    rewards={"format": 0.5, "correct": 1.0},
    answer="ja",
    num_turns=1,
    weight_versions=(3, 4),
    timings=Timings(1.0, 0.5, 1.75),
)
FAILED = replace(ROLLOUT, stop_reason=StopReason.FAILED, rewards={}, failure=Failure(FailureClass.INFRA, "died"))


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_data_that_json_lacks_is_stored_as_text():
    cycle: list[object] = []
    cycle.append(cycle)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    state = {"odd": [{(1, 2): 3}], "nan": math.nan, "inside": [math.inf], "cycle": cycle, "deep": deep}
    row = rollout_row(replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, env_state=state)))
    stored = json.loads(encode_json_line(row, allow_nan=False))["env_state"]
    assert (stored["odd"], stored["nan"], stored["inside"]) == ("[{(1, 2): 3}]", "nan", "[inf]")
    assert stored["cycle"].startswith("[[")
    assert stored["deep"].startswith("[[[")


def test_only_the_beginning_of_long_data_is_encoded():
    encoded = []

    class Piece:
        def __str__(self) -> str:
            encoded.append(self)
            return "piece"

    row = rollout_row(replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, env_state={"long": [Piece()] * 100_000})))
    assert row["env_state"]["long"] == ('["piece"' + ', "piece"' * 200)[:1000] + "…"
    assert len(encoded) < 200


def test_data_of_the_environment_is_stored_and_bounded(tmp_path):
    state = {
        "answer": 42,
        "shown": ("a", "b"),
        "long": "x" * 2000,
        "row": {"expected_answer": "7", "grid": list(range(1000))},
        "path": tmp_path,
    }
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(1, [replace(ROLLOUT, prompt=replace(ROLLOUT.prompt, env_state=state))]))
    (row,) = lines(writer.path)
    assert row["env_state"] == {
        "answer": 42,
        "shown": ["a", "b"],
        "long": "x" * 1000 + "…",
        "row": {"expected_answer": "7", "grid": "[" + ", ".join(map(str, range(1000)))[:999] + "…"},
        "path": str(tmp_path),
    }


def test_a_rollout_is_a_line(tmp_path):
    with RolloutWriter(tmp_path / "rollouts" / "train.jsonl") as writer:
        asyncio.run(writer.write(7, [ROLLOUT]))
    assert lines(writer.path) == [
        {
            "step": 7,
            "group_id": "0:p:3",
            "prompt_id": "p",
            "dataset": "puzzles",
            "task_name": "game",
            "env": "game",
            "generation_index": 1,
            "stop_reason": "done",
            "reward": 1.5,
            "rewards": {"format": 0.5, "correct": 1.0},
            "answer": "ja",
            "failure": None,
            "num_turns": 1,
            "num_tokens": 5,
            "num_generated_tokens": 2,
            "weight_versions": [3, 4],
            "timings": {"generation_s": 1.0, "environment_s": 0.5, "total_s": 1.75, "scoring_s": 0.0},
            "messages": [
                {"role": "user", "content": "Frage: größer?"},
                {
                    "role": "assistant",
                    "content": "ja",
                    "tool_calls": [{"id": "c", "name": "add", "arguments": "{}"}],
                },
                {"role": "tool", "content": "3", "tool_call_id": "c"},
            ],
        }
    ]


def test_failed_rollout_has_its_cause_and_no_reward(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(0, [FAILED]))
    (row,) = lines(writer.path)
    assert (row["reward"], row["rewards"]) == (None, {})
    assert row["failure"] == {"class": "infra", "cause": "died"}


def test_token_ids_and_logprobs_are_written_on_request(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl", write_token_ids=True) as writer:
        asyncio.run(writer.write(0, [ROLLOUT]))
    user, assistant, _ = lines(writer.path)[0]["messages"]
    assert user["token_ids"] == [1, 2, 3]
    assert "generation_logprobs" not in user
    assert (assistant["token_ids"], assistant["generation_logprobs"]) == ([4, 0], [-0.5, -0.25])


def test_message_that_an_update_cut_tells_which_tokens_are_whose(tmp_path):
    spans = (WeightSpan(3, 0, 1), WeightSpan(4, 1, 2))
    cut = replace(ROLLOUT.message_log[1], weight_spans=spans)
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        asyncio.run(writer.write(0, [replace(ROLLOUT, message_log=(cut, ROLLOUT.message_log[2]))]))
    assistant, tool = lines(writer.path)[0]["messages"]
    assert assistant["weight_spans"] == [[3, 0, 1], [4, 1, 2]]
    assert "weight_spans" not in tool


def test_further_histories_of_an_agent_are_written_where_there_are_some(tmp_path):
    other = (TokenizedMessage(Message("assistant", "nein"), (5,), (-1.0,)),)
    with RolloutWriter(tmp_path / "rollouts.jsonl") as writer:
        asyncio.run(writer.write(1, [ROLLOUT, replace(ROLLOUT, other_chains=(other,))]))
    plain, rewritten = lines(writer.path)
    assert "other_chains" not in plain
    assert rewritten["other_chains"] == [[{"role": "assistant", "content": "nein"}]]


def test_lines_are_appended_in_order_over_steps_and_runs(tmp_path):
    for first in (0, 2):
        with RolloutWriter(tmp_path / "train.jsonl") as writer:
            asyncio.run(writer.write(first, [ROLLOUT, FAILED]))
            asyncio.run(writer.write(first + 1, [ROLLOUT]))
    assert [row["step"] for row in lines(writer.path)] == [0, 0, 1, 2, 2, 3]


def test_every_line_is_strict_json_whatever_was_sampled(tmp_path):
    odd = TokenizedMessage(Message("assistant", "\ud800 \u2028 \x00"), (1,), (-math.inf,))
    with RolloutWriter(tmp_path / "train.jsonl", write_token_ids=True) as writer:
        asyncio.run(writer.write(0, [replace(ROLLOUT, message_log=(odd,))]))
    (line,) = writer.path.read_bytes().strip().split(b"\n")

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    message = json.loads(line, parse_constant=refuse)["messages"][0]
    assert message["generation_logprobs"] == [None]
    assert message["content"] == "\ud800 \u2028 \x00"


def test_file_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "train.jsonl").mkdir()
    lost = LostRecords()
    with caplog.at_level(logging.ERROR), RolloutWriter(tmp_path / "train.jsonl", lost=lost) as writer:
        asyncio.run(writer.write(0, [ROLLOUT]))
        asyncio.run(writer.write(1, [ROLLOUT] * 2))
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("rollouts cannot be written to")
    assert last.endswith("train.jsonl lacks 3 rollouts that could not be written")
    assert str(lost) == f"{tmp_path / 'train.jsonl'} lacks 3"


def test_rollouts_that_a_full_disk_takes_in_part_leave_no_part(tmp_path, monkeypatch):
    def fill_up(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", refuse)
        return write(descriptor, data[:9])

    def refuse(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        raise OSError(errno.ENOSPC, "No space left on device")

    write, lost = os.write, LostRecords()
    with RolloutWriter(tmp_path / "train.jsonl", lost=lost) as writer:
        monkeypatch.setattr(os, "write", fill_up)
        for step in range(3):
            asyncio.run(writer.write(step, [ROLLOUT] * 2))
    assert [row["step"] for row in lines(writer.path)] == [1, 1, 2, 2]
    assert str(lost) == f"{writer.path} lacks 2"


def test_a_slow_disk_makes_the_run_wait_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_writer, "MAX_PENDING_ROLLOUTS", 2)
    disk = threading.Event()

    async def main(writer: RolloutWriter) -> None:
        await writer.write(0, [ROLLOUT] * 3)  # one call fits however large it is
        waiting = asyncio.ensure_future(writer.write(1, [ROLLOUT]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        disk.set()
        await waiting
        await writer.write(2, [ROLLOUT] * 2)

    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        monkeypatch.setattr(writer, "_row", lambda trajectory: disk.wait(60) and {})
        asyncio.run(main(writer))
    assert [row["step"] for row in lines(writer.path)] == [0, 0, 0, 1, 2, 2]


def test_a_disk_that_hangs_ends_the_run_and_the_log_counts_what_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rollout_writer, "MAX_PENDING_ROLLOUTS", 1)
    disk = threading.Event()
    writer = RolloutWriter(tmp_path / "train.jsonl", timeout_s=0.2)
    monkeypatch.setattr(writer, "_row", lambda trajectory: disk.wait(60) and {})
    asyncio.run(writer.write(0, [ROLLOUT] * 2))
    with pytest.raises(RolloutError, match=r"after 0\.2 s .* \(2 pending\); those of step 1 are not recorded"):
        asyncio.run(writer.write(1, [ROLLOUT]))
    writer.close()
    assert caplog.messages[-1].endswith("train.jsonl lacks 2 rollouts that could not be written")
    disk.set()
