"""A rollout as plain values: a line of a run's rollout file, or of a collection."""

import math
from dataclasses import asdict
from typing import Any

from nemo_rl.types import TokenizedMessage, Trajectory


def rollout_row(trajectory: Trajectory, *, write_token_ids: bool = False) -> dict[str, Any]:
    """What JSON can say of `trajectory`.

    It holds group_id, prompt_id, dataset, task_name, generation_index, stop_reason, reward (None when failed), rewards
    by name, answer, failure, num_turns, num_tokens, num_generated_tokens, weight_versions, timings and messages, of an
    agent that has rewritten its history also other_chains, a list of messages each. A message that was sampled through
    an update of the weights holds weight_spans: [version, start, end] of its tokens. With `write_token_ids` each
    message also holds token_ids and, where sampled, generation_logprobs.
    """
    prompt, failure = trajectory.prompt, trajectory.failure
    others = [[_message(message, write_token_ids) for message in log] for log in trajectory.other_chains]
    return {
        "group_id": trajectory.group_id,
        "prompt_id": prompt.prompt_id,
        "dataset": prompt.dataset,
        "task_name": prompt.task_name,
        "generation_index": trajectory.generation_index,
        "stop_reason": trajectory.stop_reason,
        "reward": None if failure else trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "answer": trajectory.answer,
        "failure": {"class": failure.failure_class, "cause": failure.cause} if failure else None,
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "num_generated_tokens": trajectory.num_generated_tokens,
        "weight_versions": list(trajectory.weight_versions),
        "timings": asdict(trajectory.timings),
        "messages": [_message(message, write_token_ids) for message in trajectory.message_log],
        **({"other_chains": others} if others else {}),
    }


def _message(tokenized: TokenizedMessage, write_token_ids: bool) -> dict[str, Any]:
    message = tokenized.message
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [asdict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if tokenized.weight_spans:
        row["weight_spans"] = [[span.version, span.start, span.end] for span in tokenized.weight_spans]
    if write_token_ids:
        row["token_ids"] = list(tokenized.token_ids)
        if tokenized.generation_logprobs is not None:
            logprobs = tokenized.generation_logprobs
            row["generation_logprobs"] = [x if math.isfinite(x) else None for x in logprobs]  # JSON has no infinity
    return row
