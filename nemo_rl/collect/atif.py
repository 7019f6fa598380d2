"""Export of a merged collection as ATIF v1.7, one trajectory per rollout, in the layout of Gym's own exporter.

A directory of `<task>-<rollout>.json` and a manifest.jsonl with their digests. Source: nemo_gym/atif_v1_7.py and
atif_export.py of nemo-gym 0.7.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl import __version__
from nemo_rl.collect.nemo_gym_files import (
    AGENT,
    ORIGINAL_GYM_ROW,
    PARAMETERS,
    encode_json,
    first_generated,
    gym_key,
    join_tasks,
    require_tasks,
)
from nemo_rl.collect.shards import Task
from nemo_rl.collect.table import read_manifest
from nemo_rl.data.messages import parse_record
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message, ToolCall

SCHEMA_VERSION = "ATIF-v1.7"
MANIFEST_FILE = "manifest.jsonl"
SOURCES = {"system": "system", "user": "user", "assistant": "agent"}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AtifFiles:
    """The result of an export."""

    directory: Path
    num_trajectories: int
    num_skipped: int  # rollouts that were imported from NeMo Gym, whose own exporter converts them


def export_atif(merged: Path, directory: Path) -> AtifFiles:
    """Write the trajectories of `merged`, the rollouts.jsonl that `merge` wrote, to a new directory.

    Holds one rollout at a time; the directory appears once it is complete. Raises ConfigError if it
    exists, or if the collection has kept no input.
    """
    if directory.exists():
        raise ConfigError("--to-atif", str(directory), "exists already; name a new directory")
    require_tasks(merged.parent)
    manifest = read_manifest(merged.parent)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    num_written = num_skipped = 0
    try:
        with (unfinished / MANIFEST_FILE).open("w") as lines:
            for row, task in join_tasks(read_jsonl(merged), merged.parent):
                if ORIGINAL_GYM_ROW in row:
                    num_skipped += 1
                    continue
                key = gym_key(row, manifest)
                name = "-".join(str(index) for index in key.values())
                body = encode_json(to_atif(row, task, name))
                (unfinished / f"{name}.json").write_bytes(body)
                entry = {"trajectory_path": f"{name}.json", **key, "expected_sha256": hashlib.sha256(body).hexdigest()}
                lines.write(json.dumps(entry) + "\n")
                num_written += 1
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return AtifFiles(directory, num_written, num_skipped)


def to_atif(row: Row, task: Task, name: str) -> dict[str, Any]:
    """Return a rollout's row as a trajectory; further histories of its agent are its subagent trajectories."""
    steps = _make_steps(row.get("messages") or (), row.get("num_turns") or 0)
    others = [
        {**_head(task, f"{name}.{index}"), "steps": _make_steps(chain, _count_turns(chain))}
        for index, chain in enumerate(row.get("other_chains") or (), 1)
    ]
    generated = row.get("num_generated_tokens")
    own = {key: row.get(key) for key in ("reward", "rewards", "stop_reason", "answer", "weight_versions", "seed")}
    return {
        **_head(task, name),
        "steps": steps,
        "final_metrics": {"total_completion_tokens": generated, "total_steps": len(steps)},
        **({"subagent_trajectories": others} if others else {}),
        "extra": {"nemo_rl": {"prompt_id": task.prompt_id, "dataset": task.dataset, **own}},
    }


def _head(task: Task, trajectory_id: str) -> dict[str, Any]:
    name = (task.row.get(AGENT) or {}).get("name") or task.task_name
    tools = (task.row.get(PARAMETERS) or {}).get("tools") or task.row.get("tools")
    agent = {"name": name, "version": __version__, **({"tool_definitions": list(tools)} if tools else {})}
    return {"schema_version": SCHEMA_VERSION, "trajectory_id": trajectory_id, "agent": agent}


def _count_turns(messages: Sequence[Row]) -> int:
    """Return the number of sampled messages of a further history, all of whose assistant messages may be sampled."""
    by_assistant = [message for message in messages if message["role"] == "assistant"]
    return sum("generation_logprobs" in message for message in by_assistant) or len(by_assistant)


def _make_steps(messages: Sequence[Row], num_turns: int) -> list[dict[str, Any]]:
    """Return a step per message; a tool's results are observations of the step with its call."""
    steps: list[dict[str, Any]] = []
    first = first_generated(messages, num_turns)
    tokens_before: list[int] = []
    for index, row in enumerate(messages):
        message = parse_record(row)
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            steps[-1].setdefault("observation", {"results": []})["results"].append(_make_result(message, steps[-1]))
        else:
            step: dict[str, Any] = {
                "step_id": len(steps) + 1,
                "source": SOURCES.get(message.role, "user"),  # a result without a call is the user's
                "message": message.content,
            }
            if message.role == "assistant":
                step |= _agent_fields(message)
                step |= {"metrics": _metrics(row, tokens_before)} if index >= first else {"is_copied_context": True}
            steps.append(step)
        tokens_before += row.get("token_ids") or ()
    return steps


def _make_result(message: Message, step: Row) -> dict[str, Any]:
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    call_id = message.tool_call_id
    return {"content": message.content, **({"source_call_id": call_id} if call_id in known else {})}


def _agent_fields(message: Message) -> dict[str, Any]:
    thinking = {} if message.thinking is None else {"reasoning_content": message.thinking}
    calls = [_make_call(call) for call in message.tool_calls]
    return {**thinking, **({"tool_calls": calls} if calls else {})}


def _make_call(call: ToolCall) -> dict[str, Any]:
    """Return a call; arguments that are not a JSON object, as a policy may write, are kept as text."""
    try:
        arguments = json.loads(call.arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        arguments = None
    as_text = {} if isinstance(arguments, dict) else {"extra": {"arguments": call.arguments}}
    own = arguments if isinstance(arguments, dict) else {}
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": own, **as_text}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _metrics(row: Row, tokens_before: Sequence[int]) -> dict[str, Any]:
    """Return the tokens of a sampled message, if the record has them; infinite log-probs are recorded as null."""
    if (token_ids := row.get("token_ids")) is None:
        return {}
    logprobs = row.get("generation_logprobs") or ()
    return {
        "prompt_tokens": len(tokens_before),
        "completion_tokens": len(token_ids),
        "prompt_token_ids": list(tokens_before),
        "completion_token_ids": token_ids,
        **({"logprobs": logprobs} if logprobs and None not in logprobs else {}),
    }
