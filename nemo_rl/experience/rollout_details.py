"""Details of a few rollouts for the viewer: advantages, and each token's log-probs of policy and engine.

A side file of bounded size, `rollouts/details.jsonl`, with one line per row of the batch.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from nemo_rl import batch as keys
from nemo_rl.data.rows import read_jsonl
from nemo_rl.durable_files import append_whole
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.experience.rollout_rows import encode_json_line
from nemo_rl.interfaces import Policy
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

DETAILS_FILE = "rollouts/details.jsonl"  # path in the run directory
MAX_TOKENS = 4096  # tokens per row of details; a longer row keeps its beginning and end
MAX_FILE_BYTES = 64 << 20  # above it every second recorded step is dropped, and no longer recorded
MAX_PENDING = 8  # steps that wait for the disk; further ones are not recorded
CLOSE_TIMEOUT_S = 60.0  # limit for pending writes at the end
DIGITS = 4  # decimals in details


class RolloutDetails:
    """Writes the details of the first groups of a step.

    `mark` before the step chooses the rows, and asks the policy to keep their log-probs if the batch has none;
    `record` after it takes them; a thread decodes and writes. A file that cannot be written is reported once and stops
    nothing.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_groups: int,
        decode: Callable[[Sequence[int]], str],
        max_bytes: int = MAX_FILE_BYTES,
        lost: LostRecords | None = None,
    ) -> None:
        """`num_groups`: per step; `decode` returns the text of token ids."""
        self._path = path
        self._num_groups = num_groups
        self._decode = decode
        self._max_bytes = max_bytes
        self._period = 1  # steps between two that are recorded
        self._texts: dict[int, str] = {}  # keys: token ids
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-details")
        self._pending: list[Future[None]] = []
        self._marked: torch.Tensor | None = None  # [B] bool: rows of the step that trains
        self._has_failed = False
        self._lost = LostRecords() if lost is None else lost
        path.parent.mkdir(parents=True, exist_ok=True)

    def mark(self, step: int, batch: TrainingBatch) -> None:
        """Choose the rows of the first groups of a batch that is about to be trained on."""
        self._marked = None
        if step % self._period or self._has_failed:
            return
        self._pending = [each for each in self._pending if not each.done()]
        if len(self._pending) >= MAX_PENDING:
            return  # the disk is slow; details are a sample anyway
        marked = batch[keys.GROUP_ID] < self._num_groups
        if keys.PREV_LOGPROBS not in batch:
            batch[keys.RECORDED] = marked.cumsum(0).where(marked, 0) - 1
        self._marked = marked

    async def record(self, step: int, batch: TrainingBatch, rows: Sequence[BatchRow], policy: Policy) -> None:
        """Record the marked rows of a batch that has been trained on; `rows` are the origins of all of its rows."""
        marked, self._marked = self._marked, None
        if marked is None:
            return
        sample = batch[marked]
        if keys.RECORDED in batch:
            sample[keys.PREV_LOGPROBS] = await policy.recorded_logprobs(batch)
        origins = [rows[row] for row in marked.nonzero()[:, 0].tolist()]
        self._pending.append(self._thread.submit(self._write, step, sample.clone(), origins))

    def close(self) -> None:
        """Return when everything is written, or after CLOSE_TIMEOUT_S; no `record` follows."""
        if wait(self._pending, timeout=CLOSE_TIMEOUT_S).not_done:
            logger.error("details of rollouts are not written: %s did not take them in time", self._path)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, step: int, sample: TrainingBatch, origins: Sequence[BatchRow]) -> None:
        if self._has_failed or step % self._period:  # the period may have grown since the step was recorded
            return
        try:
            lines = [encode_json_line({"step": step, **row}) for row in self._rows(sample, origins)]
            with self._path.open("ab", buffering=0) as file:
                append_whole(file.fileno(), b"".join(lines))
            if self._path.stat().st_size > self._max_bytes:
                self._thin()
        except Exception:
            logger.exception("details of rollouts cannot be written to %s", self._path)
            self._has_failed = True
            self._lost.add(self._path, len(origins))

    def _rows(self, sample: TrainingBatch, origins: Sequence[BatchRow]) -> Iterator[dict[str, Any]]:
        for row, origin in enumerate(origins):
            group_id, generation_index = origin.trajectory_key
            yield {
                "group_id": group_id,
                "generation_index": generation_index,
                "chain": origin.chain_index,
                **self._tokens(sample[row]),
            }

    def _tokens(self, each: TrainingBatch) -> dict[str, Any]:
        """Return the columns of one row: all tokens as text, the numbers of the sampled ones."""
        length = int(each[keys.LENGTHS])
        kept = torch.arange(length)
        if length > MAX_TOKENS:
            kept = torch.cat([kept[: MAX_TOKENS // 2], kept[-MAX_TOKENS // 2 :]])
        sampled = kept[each[keys.TOKEN_MASK][kept] > 0]
        values = {
            "num_tokens": length,
            "num_omitted": length - len(kept),
            "text": [self._text(token) for token in each[keys.TOKEN_IDS][kept].tolist()],
            "mask": "".join("1" if value else "0" for value in each[keys.TOKEN_MASK][kept].tolist()),
            "policy_logprobs": _round(each[keys.PREV_LOGPROBS][sampled]),
            "engine_logprobs": _round(each[keys.GENERATION_LOGPROBS][sampled]),
        }
        if keys.ADVANTAGES in each:
            advantages = _round(each[keys.ADVANTAGES][sampled])
            same = len(set(advantages)) == 1  # GRPO gives all tokens of a rollout the same
            values |= {"advantage": advantages[0]} if same else {"advantages": advantages}
        return values

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def _thin(self) -> None:
        """Drop every second of the recorded steps until the file is well below its bound."""
        unfinished = self._path.with_suffix(".unfinished")
        while self._path.stat().st_size > self._max_bytes // 2 and self._period < 1 << 30:
            self._period *= 2
            with unfinished.open("wb") as file:
                file.writelines(
                    encode_json_line(row) for row in read_jsonl(self._path) if row["step"] % self._period == 0
                )
            os.replace(unfinished, self._path)


def _round(values: torch.Tensor) -> list[float | None]:
    """Return numbers as JSON has them: None if one is not finite."""
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values.tolist()]
