"""A merged collection in NeMo Gym's files, for its own tools: `gym eval profile` and `gym eval aggregate` read them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.collect.nemo_gym_files import (
    AGENT,
    ANSWER,
    FAILURE_CLASS,
    ORIGINAL_GYM_ROW,
    PARAMETERS,
    RESPONSE,
    ROLLOUT_INDEX,
    TASK_INDEX,
    NemoGymFiles,
)
from nemo_rl.collect.table import CollectionManifest, read_manifest
from nemo_rl.collect.tasks import TASKS_FILE, Task, read_tasks
from nemo_rl.collect.whole_file import atomic_write
from nemo_rl.data.jsonl import read_jsonl
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import StopReason

Row = Mapping[str, Any]
LONE_SURROGATE = re.compile(
    "[\ud800-\udfff]"
)  # of surrogates: orjson, which Gym reads with, refuses a file that holds one


def export_nemo_gym(merged: Path, rollouts: Path) -> NemoGymFiles:
    """Write Gym's three files from `merged`, the rollouts.jsonl that `merge` wrote.

    Gym knows no seeds: the rollouts of the n-th seed go on counting behind those of the seeds before. A rollout of
    ours becomes a Responses object of its messages; one that came from Gym is as it was. Half a surrogate pair becomes
    U+FFFD. Holds one row at a time.
    Raises ConfigError where the collection has kept no input.
    """
    directory, files = merged.parent, NemoGymFiles(rollouts)
    if not (directory / TASKS_FILE).exists():
        raise ConfigError("directory", str(directory), f"has no {TASKS_FILE}, which NeMo Gym's files need")
    manifest = read_manifest(directory)
    with atomic_write(files.inputs) as file:
        for index, task in enumerate(read_tasks(directory)):
            for rollout in range(len(manifest.seeds) * manifest.num_repeats):
                _write(file, {**_gym_input(task), TASK_INDEX: index, ROLLOUT_INDEX: rollout})
    with atomic_write(files.rollouts) as file:
        for row, task in _join_tasks(read_jsonl(merged), directory):
            _write(file, {**_gym_rollout(row, task), **_gym_key(row, manifest)})
    with atomic_write(files.failures) as file:
        failures = read_jsonl(merged.with_name(f"{merged.stem}_failures.jsonl"))
        for row, task in _join_tasks(failures, directory):
            failure_fields = {FAILURE_CLASS: row["class"], "error": row["cause"], AGENT: _gym_input(task)[AGENT]}
            _write(file, {**failure_fields, **_gym_key(row, manifest)})
    return files


def _write(file: BinaryIO, row: Row) -> None:
    file.write(LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(row, ensure_ascii=False) + "\n").encode())


def _join_tasks(rows: Iterator[dict[str, Any]], directory: Path) -> Iterator[tuple[Row, Task]]:
    """Rows with their tasks, which are read beside them, once a seed: both are in the tasks' order."""
    seed, index, task, tasks = None, -1, None, iter(())
    for row in rows:
        if row["seed"] != seed:
            seed, index, tasks = row["seed"], -1, read_tasks(directory)
        while index < row["task_index"]:
            index, task = index + 1, next(tasks, None)
        if task is None:
            raise DataError(f"{directory / TASKS_FILE}: ends before task {row['task_index']}")
        yield row, task


def _gym_key(row: Row, manifest: CollectionManifest) -> dict[str, int]:
    position = manifest.seeds.index(row["seed"])
    return {TASK_INDEX: row["task_index"], ROLLOUT_INDEX: position * manifest.num_repeats + row["rollout_index"]}


def _gym_input(task: Task) -> dict[str, Any]:
    """The task as Gym's data has it; of other data, what an agent named like its environment would be sent."""
    parameters = {} if PARAMETERS in task.row else {PARAMETERS: {"input": []}}
    return {AGENT: {"type": "responses_api_agents", "name": task.task_name}, **parameters, **task.row}


def _gym_rollout(row: Row, task: Task) -> Row:
    if ORIGINAL_GYM_ROW in row:
        return row[ORIGINAL_GYM_ROW]
    messages, task_input = row.get("messages") or [], _gym_input(task)
    first = _first_generated(messages, row.get("num_turns") or 0)
    parameters = task_input[PARAMETERS]
    if not parameters.get("input"):
        parameters = {**parameters, "input": [_message_item(message) for message in messages[:first]]}
    generated, total = row.get("num_generated_tokens") or 0, row.get("num_tokens") or 0
    is_truncated = row.get("stop_reason") == StopReason.TRUNCATED
    response = {
        "id": f"resp_{row['seed']}_{row['task_index']}_{row['rollout_index']}",
        "object": "response",
        "output": list(chain.from_iterable(_output_items(messages, first))),
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "usage": {"input_tokens": total - generated, "output_tokens": generated, "total_tokens": total},
    }
    answer = {} if row.get("answer") is None else {ANSWER: row["answer"]}
    return {PARAMETERS: parameters, RESPONSE: response, "reward": row["reward"], **answer, AGENT: task_input[AGENT]}


def _first_generated(messages: Sequence[Row], num_turns: int) -> int:
    """Where the policy's first message stands: a prompt may have assistant messages of its own."""
    by_assistant = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    return by_assistant[-num_turns] if 0 < num_turns <= len(by_assistant) else len(messages)


def _output_items(messages: Sequence[Row], first: int) -> Iterator[list[dict[str, Any]]]:
    before = [token for message in messages[:first] for token in message.get("token_ids") or ()]
    for message in messages[first:]:
        items = _message_items(message)
        if "generation_logprobs" in message:
            items[-1] |= {
                "prompt_token_ids": before.copy(),
                "generation_token_ids": message["token_ids"],
                "generation_log_probs": message["generation_logprobs"],
            }
        before += message.get("token_ids") or ()
        yield items


def _message_items(message: Row) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        output = {"call_id": message.get("tool_call_id"), "output": message["content"]}
        return [{"type": "function_call_output", **output}]
    if message["role"] != "assistant":
        return [_message_item(message)]
    calls = [
        {"type": "function_call", "call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    if calls and not message["content"]:
        return calls
    text = {"type": "output_text", "text": message["content"], "annotations": []}
    return [{"type": "message", "role": "assistant", "status": "completed", "content": [text]}, *calls]


def _message_item(message: Row) -> dict[str, Any]:
    return {"type": "message", "role": message["role"], "content": message["content"]}
