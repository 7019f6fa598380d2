"""Every rollout as a line of JSON in the run directory, written off the event loop."""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl.data.rows import encode_json_line
from nemo_rl.types import TokenizedMessage, Trajectory

logger = logging.getLogger(__name__)


def rollout_row(trajectory: Trajectory, *, write_token_ids: bool = False) -> dict[str, Any]:
    """Return `trajectory` as a JSON-serializable row.

    It holds group_id, prompt_id, dataset, task_name, generation_index, stop_reason, reward (None when failed), rewards
    by name, answer, failure, num_turns, num_tokens, num_generated_tokens, weight_versions, timings and messages, of an
    agent that has rewritten its history also other_chains, a list of messages each. A message that was sampled through
    an update of the weights holds weight_spans: [version, start, end] of its tokens. With `write_token_ids` each
    message also holds token_ids and, where sampled, generation_logprobs.
    """
    prompt, failure = trajectory.prompt, trajectory.failure
    others = [[_message_to_dict(message, write_token_ids) for message in log] for log in trajectory.other_chains]
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
        "messages": [_message_to_dict(message, write_token_ids) for message in trajectory.message_log],
        **({"other_chains": others} if others else {}),
    }


def _message_to_dict(tokenized: TokenizedMessage, write_token_ids: bool) -> dict[str, Any]:
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


class RolloutWriter:
    """Appends rollouts to a JSON Lines file.

    `write` returns at once: one thread encodes and writes, in order, a step at a time. A file that cannot be written
    is reported once in the log and does not stop the run. Also a context manager.

    A line holds `step` and what `rollout_row` tells.
    """

    def __init__(self, path: str | Path, *, write_token_ids: bool = False) -> None:
        self.path = Path(path)
        self._row = partial(rollout_row, write_token_ids=write_token_ids)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._has_failed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append one line a rollout; `step` is the training step that they belong to."""
        self._thread.submit(self._append, step, tuple(trajectories))

    def close(self) -> None:
        """Return when everything is written; no `write` follows."""
        self._thread.shutdown(wait=True)

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        try:
            lines = [encode_json_line({"step": step, **self._row(t)}) for t in trajectories]
            with self.path.open("ab") as file:
                file.write(b"".join(lines))
        except Exception:
            if not self._has_failed:
                logger.exception("rollouts cannot be written to %s", self.path)
            self._has_failed = True
