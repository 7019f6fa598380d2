"""Rollouts as lines of JSON."""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

from nemo_rl.data.messages import to_record
from nemo_rl.token_columns import encode_columns
from nemo_rl.types import Failure, MessageLog, Timings, TokenizedMessage, Trajectory

MAX_STATE_CHARS = 1000  # per value of the environment's data; a longer one is cut, as text
MAX_STATE_KEYS = 32  # per mapping of it
MAX_TRACEBACK_CHARS = 8192  # the end of a failure's traceback
MAX_COLUMN_BYTES = 16 << 20  # columns of one history, before compression; those of later messages are dropped
STATE_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)
TIMING_NAMES = tuple(each.name for each in fields(Timings))


def rollout_row(
    trajectory: Trajectory, *, write_token_ids: bool = False, write_token_columns: bool = False
) -> dict[str, Any]:
    """Return `trajectory` as a JSON-serializable row.

    It holds group_id, prompt_id, dataset, task_name, env (`Prompt.env`), generation_index, stop_reason, reward (None
    when failed), rewards by name, answer, env_state (the environment's data of the prompt, e.g. the expected answer;
    bounded), failure, num_turns, num_tokens, num_generated_tokens, weight_versions, timings and messages, of an agent
    that has rewritten its history also other_chains, a list of messages each, and chain_rewards if single calls were
    rewarded: by name, of messages and other_chains in turn; response_faults if there are any. In a run of several
    policies each sampled message names its policy, and policy_rewards has the rewards of each. A message that was
    sampled through an update of the weights holds weight_spans: [version, start, end] of its tokens. With
    `write_token_ids` each message also holds token_ids and, if sampled, generation_logprobs; with
    `write_token_columns` its columns (`encode_columns`), if it has any and MAX_COLUMN_BYTES allows.
    """
    prompt, failure = trajectory.prompt, trajectory.failure
    messages, *others = (_log_to_list(log, write_token_ids, write_token_columns) for log in trajectory.chains)
    return {
        "group_id": trajectory.group_id,
        "prompt_id": prompt.prompt_id,
        "dataset": prompt.dataset,
        "task_name": prompt.task_name,
        "env": prompt.env,
        "generation_index": trajectory.generation_index,
        "stop_reason": trajectory.stop_reason,
        "reward": None if failure else trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "answer": trajectory.answer,
        **({"env_state": _bound_state(prompt.env_state)} if prompt.env_state else {}),
        "failure": _failure_to_dict(failure) if failure else None,
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "num_generated_tokens": trajectory.num_generated_tokens,
        "weight_versions": list(trajectory.weight_versions),
        "timings": _timings_to_dict(trajectory.timings),
        "messages": messages,
        **({"other_chains": others} if others else {}),
        **({"chain_rewards": [dict(each) for each in trajectory.chain_rewards]} if trajectory.chain_rewards else {}),
        **({"response_faults": list(trajectory.response_faults)} if trajectory.response_faults else {}),
        **({"policy_rewards": _plain_rewards(trajectory.policy_rewards)} if trajectory.policy_rewards else {}),
    }


def _plain_rewards(rewards: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {policy: dict(own) for policy, own in rewards.items()}


def _bound_state(state: Mapping[str, Any], depth: int = 1) -> dict[str, Any]:
    """Return the first keys of an environment's data, and of mappings in it; longer values become a beginning."""
    return {
        str(key): _bound_state(value, depth - 1) if depth and isinstance(value, Mapping) else _bound_value(value)
        for key, value in islice(state.items(), MAX_STATE_KEYS)
    }


def _bound_value(value: Any) -> Any:
    """Return a JSON value: a long one and one that JSON lacks (NaN, a cycle, a dict with tuples as keys) as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _cut(value)
    try:
        text = _encode_beginning(value)
    except (TypeError, ValueError, RecursionError):
        return _cut(reprlib.repr(value))
    return json.loads(text) if len(text) <= MAX_STATE_CHARS else _cut(text)


def _encode_beginning(value: Any) -> str:
    """Return the JSON text of a value; its encoding ends once it is longer than MAX_STATE_CHARS."""
    text = ""
    for part in STATE_ENCODER.iterencode(value):
        text += part
        if len(text) > MAX_STATE_CHARS:
            break
    return text


def _cut(text: str) -> str:
    return text if len(text) <= MAX_STATE_CHARS else text[:MAX_STATE_CHARS] + "…"


def _timings_to_dict(timings: Timings) -> dict[str, float]:
    """Return `asdict(timings)` at a tenth of its cost."""
    return {name: getattr(timings, name) for name in TIMING_NAMES}


def _failure_to_dict(failure: Failure) -> dict[str, str]:
    row: dict[str, str] = {"class": failure.failure_class, "cause": failure.cause}
    return row | {"traceback": failure.traceback[-MAX_TRACEBACK_CHARS:]} if failure.traceback else row


def _log_to_list(log: MessageLog, write_token_ids: bool, write_token_columns: bool) -> list[dict[str, Any]]:
    rows = [_message_to_dict(message, write_token_ids) for message in log]
    if write_token_columns:
        num_bytes = 0
        for row, message in zip(rows, log, strict=True):
            num_bytes += message.columns.num_bytes
            if message.columns and num_bytes <= MAX_COLUMN_BYTES:
                row["columns"] = encode_columns(message.columns)
    return rows


def _message_to_dict(tokenized: TokenizedMessage, write_token_ids: bool) -> dict[str, Any]:
    row = to_record(tokenized.message)
    if tokenized.policy:
        row["policy"] = tokenized.policy
    if tokenized.weight_spans:
        row["weight_spans"] = [[span.version, span.start, span.end] for span in tokenized.weight_spans]
    if write_token_ids:
        row["token_ids"] = list(tokenized.token_ids)
        if tokenized.generation_logprobs is not None:
            logprobs = tokenized.generation_logprobs
            row["generation_logprobs"] = [x if math.isfinite(x) else None for x in logprobs]  # JSON has no infinity
    return row


def encode_json_line(values: Mapping[str, Any], *, allow_nan: bool = True) -> bytes:
    """Return `values` as one line of UTF-8 with its newline.

    Half a surrogate pair, which a message may hold and UTF-8 cannot, is written as its JSON escape: Python's json reads
    it back unchanged, while stricter readers (orjson) refuse such a line. Without `allow_nan`, NaN raises ValueError.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=allow_nan)
    return (text + "\n").encode("utf-8", errors="backslashreplace")  # only surrogates cannot be encoded
