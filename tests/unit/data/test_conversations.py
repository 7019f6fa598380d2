"""Rows become conversations to learn from; what cannot be learnt from is named with its row."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.sft import SFTDataConfig
from nemo_rl.data.supervised import Conversation, load_conversations, read_conversations
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, ToolCall

ASKED, ANSWERED = Message("user", "2+2"), Message("assistant", "4")


def read(*rows: dict[str, Any], **section: Any) -> list[Conversation]:
    return read_conversations(rows, DatasetConfig(dataset_name="jsonl", **section), key="data.train")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of(question: str, answer: str = "yes") -> dict[str, Any]:
    return {"input": question, "output": answer}


@pytest.mark.parametrize(
    "row",
    [
        {"input": "2+2", "output": "4"},
        {"prompt": "2+2", "response": "4"},
        {"prompt": "2+2", "completion": "4"},
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
        {"task": "sums", "entry": {"question": "2+2", "answer": "4"}},
    ],
)
def test_rows_of_every_shape_are_a_question_and_its_answer(row: dict[str, Any]) -> None:
    assert read(row) == [Conversation((ASKED, ANSWERED))]


def test_named_fields_win_over_those_that_are_known() -> None:
    row = {"input": "x", "output": "y", "q": "2+2", "a": "4"}
    assert read(row, input_key="q", output_key="a") == [Conversation((ASKED, ANSWERED))]


def test_calls_and_tools_are_kept_and_what_nobody_answers_is_left_out(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    prompt = tmp_path / "system.txt"
    prompt.write_text("Be brief.")
    (conversation,) = read({"messages": messages, "tools": [tool]}, system_prompt_file=str(prompt))
    assert conversation.messages == (
        Message("system", "Be brief."),
        ASKED,
        Message("assistant", "", (ToolCall("c1", "add", '{"a": 2}'),)),
        Message("tool", "4", (), "c1"),
        ANSWERED,
    )
    assert conversation.tools == (tool,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "2+2"}, "has no field 'input'"),
        ({"input": "2+2", "output": 4}, "4 is int, not text"),
        ({"messages": [{"role": "user", "content": "2+2"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "nothing opens its turn"),
        ({"messages": [{"role": "robot", "content": "hello"}]}, "no message with a role"),
    ],
)
def test_a_row_that_cannot_be_learnt_from_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train \(jsonl\): row 1: .*{problem}"):
        read(of("2+2"), row)


def test_what_is_validated_on_is_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", of("a"), of("b"), of("c"))
    held_out = write(tmp_path / "held.jsonl", of("b", "no"))
    more = write(tmp_path / "more.jsonl", of("d"))
    sets: dict[str, Any] = {
        "train": [{"data_path": train}, {"data_path": more, "repeat": 2}],
        "validation": [{"data_path": held_out}, {"data_path": held_out, "name": "again"}],
        "default": {"dataset_name": "jsonl"},
    }
    blend, (one, two) = load_conversations(SFTDataConfig.model_validate(sets), run_seed=0)
    assert [each.messages[0].content for each in blend.conversations] == ["a", "c", "d", "d"]
    assert (blend.name, one.name, two.name) == ("train", "jsonl", "again")
    kept, _ = load_conversations(SFTDataConfig.model_validate({**sets, "disjoint": False}), run_seed=0)
    assert len(kept.conversations) == 5
    with pytest.raises(ConfigError, match=r"data\.disjoint"):
        load_conversations(SFTDataConfig.model_validate({**sets, "train": {"data_path": held_out}}), run_seed=0)
