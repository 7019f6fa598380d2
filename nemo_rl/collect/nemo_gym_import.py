"""A collection of NeMo Gym as a collection of ours: to be merged, profiled, compared, cut into a curriculum."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.collect.keys import KeySpace, RolloutKey
from nemo_rl.collect.nemo_gym_files import (
    AGENT,
    ANSWER,
    FAILURE_CLASS,
    ORIGINAL_GYM_ROW,
    RESPONSE,
    ROLLOUT_INDEX,
    TASK_INDEX,
    NemoGymFiles,
)
from nemo_rl.collect.store import MAX_ATTEMPTS, RolloutStore
from nemo_rl.collect.tasks import Task, write_tasks
from nemo_rl.data.jsonl import read_jsonl
from nemo_rl.data.nemo_gym import NEMO_GYM
from nemo_rl.errors import DataError
from nemo_rl.types import Failure, FailureClass, StopReason

KEY = frozenset({TASK_INDEX, ROLLOUT_INDEX})


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
        if files.failures.exists() and not store.files.failures.stat().st_size:
            for row in read_jsonl(files.failures):
                store.append_failure(_require_known_key(row, files.failures, keys), _convert_failure(row))
        for row in read_jsonl(rollouts):
            key = _require_known_key(row, rollouts, keys)
            if not store.is_finished(key):
                store.append(key, _convert_row(row))
        if not store.num_missing:
            store.finish()
    return store


def _read_tasks(path: Path) -> Iterator[Task]:
    """One of each task's inputs, which Gym writes in order."""
    count = 0
    for row in read_jsonl(path):
        index = _read_key(row, path).task_index
        if index > count:
            raise DataError(f"{path}: task {index} follows task {count - 1}")
        if index == count:
            name = _agent_name(row)
            yield Task(str(index), name, NEMO_GYM, {key: value for key, value in row.items() if key not in KEY})
            count += 1


def _convert_row(row: Mapping[str, Any]) -> dict[str, Any]:
    response = row.get(RESPONSE) or {}
    usage = response.get("usage") or {}
    is_truncated = bool(response.get("incomplete_details"))
    reward = row.get("reward")
    return {
        "dataset": _agent_name(row),
        "task_name": NEMO_GYM,
        "stop_reason": StopReason.TRUNCATED if is_truncated else StopReason.DONE,
        "reward": reward,
        "rewards": {} if reward is None else {"reward": reward},
        "answer": row.get(ANSWER),
        "num_tokens": usage.get("total_tokens", _num_generated(response)),
        "num_generated_tokens": usage.get("output_tokens", _num_generated(response)),
        "messages": [],  # of Gym's shape below
        ORIGINAL_GYM_ROW: {key: value for key, value in row.items() if key not in KEY},
    }


def _num_generated(response: Mapping[str, Any]) -> int:
    """Where Gym's model server counts no usage, its token ids do."""
    return sum(len(item.get("generation_token_ids") or ()) for item in response.get("output") or ())


def _convert_failure(row: Mapping[str, Any]) -> Failure:
    cause = row.get("error") or row.get("error_message") or "no cause given"
    return Failure(FailureClass.AGENT, f"NeMo Gym: {row.get(FAILURE_CLASS)}: {cause}")


def _agent_name(row: Mapping[str, Any]) -> str:
    return str((row.get(AGENT) or {}).get("name") or "")


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
