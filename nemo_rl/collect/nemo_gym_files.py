"""Conversion between collections and NeMo Gym's files (nemo-gym 0.4.0)."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.collect.rollout_files import atomic_write
from nemo_rl.collect.shards import TASKS_FILE, KeySpace, RolloutKey, Task, read_tasks, write_tasks
from nemo_rl.collect.store import MAX_ATTEMPTS, RolloutStore
from nemo_rl.collect.table import CollectionManifest, read_manifest
from nemo_rl.data.nemo_gym_dataset import NEMO_GYM, open_task
from nemo_rl.data.rows import read_jsonl
from nemo_rl.environments.nemo_gym.failures import find_row_failure
from nemo_rl.environments.nemo_gym.reply import ANSWER_FIELDS, find_answer
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Failure, FailureClass, StopReason

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
FAILURE_CLASS = "_ng_failure_class"
AGENT = "agent_ref"
ENVIRONMENT_SERVER = "_ng_environment_server"  # in the rows of materialized tasks, which need no agent_ref
KEY_FIELDS = frozenset({TASK_INDEX, ROLLOUT_INDEX})
PARAMETERS = "responses_create_params"
RESPONSE = "response"

# In an imported row: the fields of Gym's row except its key, so that it is exported unchanged.
ORIGINAL_GYM_ROW = "nemo_gym"
# Gym reads with orjson, which refuses a file that contains one.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class NemoGymFiles:
    """The files of one collection; their names begin like that of the rollouts."""

    rollouts: Path

    @property
    def inputs(self) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_materialized_inputs.jsonl")

    @property
    def failures(self) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_failures.jsonl")


Row = Mapping[str, Any]


def export_nemo_gym(merged: Path, rollouts: Path) -> NemoGymFiles:
    """Write Gym's three files from `merged`, the rollouts.jsonl that `merge` wrote.

    Gym has no seeds: the rollouts of each seed are numbered after those of the seeds before it. A rollout
    becomes a Responses object of its messages; an imported one is written unchanged. Half a surrogate pair becomes
    U+FFFD. Holds one row at a time.
    Raises ConfigError if the collection has kept no input.
    """
    directory, files = merged.parent, NemoGymFiles(rollouts)
    require_tasks(directory)
    manifest = read_manifest(directory)
    with atomic_write(files.inputs) as file:
        for index, task in enumerate(read_tasks(directory)):
            for rollout in range(len(manifest.seeds) * manifest.num_repeats):
                _write(file, {**_gym_input(task), TASK_INDEX: index, ROLLOUT_INDEX: rollout})
    with atomic_write(files.rollouts) as file:
        for row, task in join_tasks(read_jsonl(merged), directory):
            _write(file, {**_gym_rollout(row, task), **gym_key(row, manifest)})
    with atomic_write(files.failures) as file:
        failures = read_jsonl(merged.with_name(f"{merged.stem}_failures.jsonl"))
        for row, task in join_tasks(failures, directory):
            failure_fields = {FAILURE_CLASS: row["class"], "error": row["cause"], AGENT: _gym_input(task)[AGENT]}
            _write(file, {**failure_fields, **gym_key(row, manifest)})
    return files


def require_tasks(directory: Path) -> None:
    """Raise ConfigError if the collection has kept no input."""
    if not (directory / TASKS_FILE).exists():
        raise ConfigError("directory", str(directory), f"has no {TASKS_FILE}, which NeMo Gym's files need")


def encode_json(row: Row) -> bytes:
    """Return a row as JSON that Gym's readers accept: half a surrogate pair becomes U+FFFD."""
    return LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", json.dumps(row, ensure_ascii=False)).encode()


def _write(file: BinaryIO, row: Row) -> None:
    file.write(encode_json(row) + b"\n")


def join_tasks(rows: Iterator[dict[str, Any]], directory: Path) -> Iterator[tuple[Row, Task]]:
    """Yield rows with their tasks; both are in the order of tasks, so tasks are read once for each seed."""
    seed, index, task, tasks = None, -1, None, iter(())
    for row in rows:
        if row["seed"] != seed:
            seed, index, tasks = row["seed"], -1, read_tasks(directory)
        while index < row["task_index"]:
            index, task = index + 1, next(tasks, None)
        if task is None:
            raise DataError(f"{directory / TASKS_FILE}: ends before task {row['task_index']}")
        yield row, task


def gym_key(row: Row, manifest: CollectionManifest) -> dict[str, int]:
    """Return the task and rollout index of a row; Gym has no seeds, so that those of later seeds follow."""
    position = manifest.seeds.index(row["seed"])
    return {TASK_INDEX: row["task_index"], ROLLOUT_INDEX: position * manifest.num_repeats + row["rollout_index"]}


def _gym_input(task: Task) -> dict[str, Any]:
    """Return the task as Gym's data has it; for other data, as input of an agent named after its environment."""
    parameters = {} if PARAMETERS in task.row else {PARAMETERS: {"input": []}}
    return {AGENT: {"type": "responses_api_agents", "name": task.env or task.task_name}, **parameters, **task.row}


def _gym_rollout(row: Row, task: Task) -> Row:
    if ORIGINAL_GYM_ROW in row:
        return row[ORIGINAL_GYM_ROW]
    messages, task_input = row.get("messages") or [], _gym_input(task)
    first = first_generated(messages, row.get("num_turns") or 0)
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
    # each of Gym's environments reads one of these, and a collection does not tell which
    answer = {} if row.get("answer") is None else dict.fromkeys(ANSWER_FIELDS, row["answer"])
    return {PARAMETERS: parameters, RESPONSE: response, "reward": row["reward"], **answer, AGENT: task_input[AGENT]}


def first_generated(messages: Sequence[Row], num_turns: int) -> int:
    """Return the index of the policy's first message: a prompt may contain assistant messages too."""
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


def import_nemo_gym(rollouts: Path, directory: Path) -> RolloutStore:
    """Write the shard of seed 0 in `directory` from Gym's file of rollouts and those beside it; the store is closed.

    Gym's `_ng_task_index` and `_ng_rollout_index` become the keys, its materialized inputs the tasks; lengths are those
    of its usage. A second import adds what is new. Raises DataError for files that do not belong together.
    """
    files = NemoGymFiles(rollouts)
    tasks = write_tasks(directory, _read_tasks(files.inputs))
    repeats = 1 + max((_read_key(row, files.inputs).rollout_index for row in read_jsonl(files.inputs)), default=0)
    keys = KeySpace(tasks.num_tasks, repeats)
    identity = {"data": tasks.digest, "config": {NEMO_GYM: rollouts.name}, "model": None}
    with RolloutStore.open(directory, seed=0, keys=keys, identity=identity, max_attempts=MAX_ATTEMPTS) as store:
        failures = _FailureImport(store)
        if files.failures.exists():
            for row in read_jsonl(files.failures):
                failures.add(_require_known_key(row, files.failures, keys), row)
        for row in read_jsonl(rollouts):
            key = _require_known_key(row, rollouts, keys)
            # releases before 0.7 have no failure_kind, and their masks do not say that a reward is invalid
            if find_row_failure(row, mask_is_failure="failure_kind" in row):
                failures.add(key, row)
            elif not store.is_finished(key):
                store.append(key, _convert_row(row))
        if not store.num_missing:
            store.finish()
    return store


class _FailureImport:
    """Adds the failed attempts of Gym's files, in their order, that a store does not have yet."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._num_read: Counter[RolloutKey] = Counter()

    def add(self, key: RolloutKey, row: Row) -> None:
        """Add the next attempt of a rollout, unless an earlier import did, or the rollout is finished."""
        self._num_read[key] += 1
        if not self._store.is_finished(key) and self._num_read[key] > self._store.num_attempts(key):
            self._store.append_failure(key, _convert_failure(row))


def _read_tasks(path: Path) -> Iterator[Task]:
    """Yield each task once from its inputs, which Gym writes in order."""
    count = 0
    for row in read_jsonl(path):
        index = _read_key(row, path).task_index
        if index > count:
            raise DataError(f"{path}: task {index} follows task {count - 1}")
        if index == count:
            name = _agent_name(row)
            values = {key: value for key, value in open_task(row).items() if key not in KEY_FIELDS}
            yield Task(str(index), name, NEMO_GYM, values, env=name)
            count += 1


def _convert_row(row: Mapping[str, Any]) -> dict[str, Any]:
    response = row.get(RESPONSE) or {}
    usage = response.get("usage") or {}
    is_truncated = bool(response.get("incomplete_details"))
    reward = row.get("reward")
    return {
        "dataset": _agent_name(row),
        "task_name": NEMO_GYM,
        "env": _agent_name(row) or NEMO_GYM,
        "stop_reason": StopReason.TRUNCATED if is_truncated else StopReason.DONE,
        "reward": reward,
        "rewards": {} if reward is None else {"reward": reward},
        "answer": find_answer(row),
        "num_tokens": usage.get("total_tokens", _num_generated(response)),
        "num_generated_tokens": usage.get("output_tokens", _num_generated(response)),
        "messages": [],  # the messages are in Gym's format below
        ORIGINAL_GYM_ROW: {key: value for key, value in row.items() if key not in KEY_FIELDS},
    }


def _num_generated(response: Mapping[str, Any]) -> int:
    """Count generated token ids, for model servers that report no usage."""
    return sum(len(item.get("generation_token_ids") or ()) for item in response.get("output") or ())


def _convert_failure(row: Mapping[str, Any]) -> Failure:
    failure = find_row_failure(row, mask_is_failure=True)
    if failure is None:
        return Failure(FailureClass.AGENT, "NeMo Gym: no cause given")
    return Failure(failure.failure_class, f"NeMo Gym: {failure}")


def _agent_name(row: Mapping[str, Any]) -> str:
    return str((row.get(AGENT) or {}).get("name") or row.get(ENVIRONMENT_SERVER) or "")


def _read_key(row: Mapping[str, Any], path: Path) -> RolloutKey:
    task, rollout = row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)
    if not (isinstance(task, int) and isinstance(rollout, int)):
        raise DataError(f"{path}: a row without {TASK_INDEX} and {ROLLOUT_INDEX}: {sorted(row)}")
    return RolloutKey(task, rollout)


def _require_known_key(row: Mapping[str, Any], path: Path, keys: KeySpace) -> RolloutKey:
    key = _read_key(row, path)
    if key not in keys:
        raise DataError(f"{path}: {key} is not among the materialized inputs")
    return key
