"""Records of finished rollouts: the metrics of a step, pass@k, each rollout as a line of JSON, and details of a few.

Details are for the viewer: advantages, and each token's log-probs of policy and engine, in a side file of bounded size,
`rollouts/details.jsonl`, one line per row of the batch.
"""

import asyncio
import json
import logging
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from functools import lru_cache, partial
from math import comb
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from nemo_rl import batch as keys
from nemo_rl.data.messages import to_record
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.types import Failure, FailureClass, StopReason, Timings, TokenizedMessage, Trajectory

if TYPE_CHECKING:
    import torch

    from nemo_rl.experience.assembly import BatchRow
    from nemo_rl.interfaces import Policy
    from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

MAX_TRACEBACK_CHARS = 8192  # of a failure, its end
MAX_PENDING_ROLLOUTS = 4096  # of a RolloutWriter; some hundred kilobytes each where they are long
WRITE_TIMEOUT_S = 600.0  # for a RolloutWriter's disk to make room, and to take what is left at the end
TIMING_NAMES = tuple(each.name for each in fields(Timings))
DETAILS_FILE = "rollouts/details.jsonl"  # in the run directory
MAX_TOKENS = 4096  # of one row of details: a longer one keeps its beginning and its end
MAX_FILE_BYTES = 64 << 20  # of details: above it every second of the recorded steps is dropped, and no longer recorded
MAX_PENDING = 8  # steps that wait for the disk; further ones are not recorded
CLOSE_TIMEOUT_S = 60.0  # for the details' disk at the end
DIGITS = 4  # of details, after the decimal point


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics by name, without prefix; empty for no rollouts.

    Rates are shares of all rollouts, and `failures/<class>` are counts. Turns, tokens and rewards are those of the
    rollouts that did not fail. `env/<name>/...` are those of one environment, or of one of NeMo Gym's agents: a few
    always, and with several environments all of them; `reward/<name>` where rewards have several names.
    """
    if not trajectories:
        return {}
    by_environment: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        name = trajectory.prompt.agent_name or trajectory.prompt.task_name
        by_environment.setdefault(name, []).append(trajectory)
    metrics = _compute_metrics(trajectories)
    for environment, environment_trajectories in sorted(by_environment.items()):
        several = _compute_metrics(environment_trajectories) if len(by_environment) > 1 else {}
        metrics |= {
            f"env/{environment}/{name}": value
            for name, value in (several | _brief_metrics(environment_trajectories)).items()
        }
    return metrics


def age_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """Return the mean and maximum of steps from the oldest weights that sampled a rollout to those that it trains."""
    ages = [weight_version - t.weight_versions[0] for t in trajectories if t.failure is None]
    return {"avg_trajectory_age": statistics.fmean(ages), "max_trajectory_age": float(max(ages))} if ages else {}


def _compute_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    survivors = [t for t in trajectories if t.failure is None]
    metrics = {"num_rollouts": float(len(trajectories))}
    metrics |= {f"failures/{name}": float(_count_failed(trajectories, name)) for name in FailureClass}
    metrics |= {
        "natural_termination_rate": _stop_reason_rate(trajectories, StopReason.DONE),
        "truncation_rate": _stop_reason_rate(trajectories, StopReason.TRUNCATED),
        "max_turns_reached_rate": _stop_reason_rate(trajectories, StopReason.MAX_TURNS),
    }
    return metrics | _length_metrics(survivors) | _mean_named_rewards(survivors) if survivors else metrics


def _length_metrics(survivors: Sequence[Trajectory]) -> dict[str, float]:
    turns = [t.num_turns for t in survivors]
    generated = [t.num_generated_tokens for t in survivors]
    return {
        "total_turns": float(sum(turns)),
        "avg_turns_per_sample": statistics.fmean(turns),
        "max_turns_per_sample": float(max(turns)),
        "mean_total_tokens_per_sample": statistics.fmean([t.num_tokens for t in survivors]),
        "mean_gen_tokens_per_sample": statistics.fmean(generated),
        "max_gen_tokens_per_sample": float(max(generated)),
        "mean_env_tokens_per_sample": statistics.fmean([_num_environment_tokens(t) for t in survivors]),
    }


def _num_environment_tokens(trajectory: Trajectory) -> int:
    """Count context tokens after the first response: those of the environment and of the template around it."""
    lengths = [(message.is_generated, len(message.token_ids)) for message in trajectory.message_log]
    first = next((i for i, (is_generated, _) in enumerate(lengths) if is_generated), len(lengths))
    return sum(length for is_generated, length in lengths[first:] if not is_generated)


def _mean_named_rewards(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each named reward over the rollouts that have it."""
    names = sorted({name for t in survivors for name in t.rewards})
    if len(names) < 2:
        return {}
    return {f"reward/{n}": statistics.fmean([t.rewards[n] for t in survivors if n in t.rewards]) for n in names}


def _brief_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics that tell environments apart at a glance."""
    survivors = [t for t in trajectories if t.failure is None]
    metrics = {
        "truncation_rate": _stop_reason_rate(trajectories, StopReason.TRUNCATED),
        "num_failed": float(len(trajectories) - len(survivors)),
    }
    if survivors:
        metrics |= {
            "reward_mean": statistics.fmean([t.reward for t in survivors]),
            "turns": statistics.fmean([t.num_turns for t in survivors]),
            "tokens": statistics.fmean([t.num_generated_tokens for t in survivors]),
        }
    return metrics


def _stop_reason_rate(trajectories: Sequence[Trajectory], reason: StopReason) -> float:
    return sum(t.stop_reason is reason for t in trajectories) / len(trajectories)


def _count_failed(trajectories: Sequence[Trajectory], name: FailureClass) -> int:
    return sum(t.failure is not None and t.failure.failure_class is name for t in trajectories)


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Return the best score of k answers, averaged over all subsets of k of the n given.

    For scores of 0 and 1 this is 1 - C(wrong, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Example: scores [0, 1, .5], k = 2: the maxima 1, .5, 1 average to .8333.
    """
    shares = best_of_k_probabilities(len(scores), k)
    return sum(score * share for score, share in zip(sorted(scores), shares, strict=True))


@lru_cache(maxsize=1024)
def best_of_k_probabilities(num_answers: int, k: int) -> tuple[float, ...]:
    """Return the share of all subsets of k in which the answer of each rank, lowest score first, is the best."""
    _check_k(k, num_answers)
    return tuple(comb(rank, k - 1) / comb(num_answers, k) for rank in range(num_answers))


def pass_at_1_avg_of_k(scores: Sequence[float]) -> float:
    """Return the mean score, the expected score of one answer."""
    _check_k(1, len(scores))
    return sum(scores) / len(scores)


def majority_at_k(scores: Sequence[float], answers: Sequence[Hashable | None], k: int | None = None) -> float:
    """Return the score of the majority answer of k votes, averaged over all subsets of k of the n given (None: n).

    Answers with equally many votes are averaged; an answer's score is the mean over those who gave it. None is no
    answer and casts no vote; without any vote the score is 0.

    Example: answers [7, 7, 9, None], scores [1, 1, 0, 0]: k = 4 gives 1.
    """
    if len(answers) != len(scores):
        raise ValueError(f"{len(scores)} scores with {len(answers)} answers")
    k = len(scores) if k is None else k
    _check_k(k, len(scores))
    counts = Counter(answer for answer in answers if answer is not None)
    num_abstentions = len(answers) - counts.total()
    # Answers that were given equally often win equally often.
    given = tuple(sorted(counts.values()))
    wins = {count: _count_wins(count, given, num_abstentions, k) for count in set(given)}
    expected = sum(
        score * wins[counts[answer]] / counts[answer]
        for score, answer in zip(scores, answers, strict=True)
        if answer is not None
    )
    return expected / comb(len(scores), k)


@lru_cache(maxsize=1 << 16)  # few distinct vote counts occur over the tasks of a dataset
def _count_wins(count: int, counts: tuple[int, ...], num_abstentions: int, k: int) -> float:
    """Count the subsets of k in which an answer given `count` times wins the vote, a tie shared; `counts` of all."""
    if k == num_abstentions + sum(counts):  # everybody votes
        return (count == max(counts)) / counts.count(max(counts))
    others = list(counts)
    others.remove(count)
    return sum(
        comb(count, votes) * _count_shared_wins(others, num_abstentions, votes, k - votes)
        for votes in range(1, count + 1)
    )


def _count_shared_wins(others: Sequence[int], num_abstentions: int, votes: int, remaining: int) -> float:
    """Count ways to fill the other places so that no answer has more than `votes`, each divided by its winners.

    Adds one other answer after the other to a table {(places filled, ties): ways}.
    """
    if remaining < 0:
        return 0.0
    ways = {(filled, 0): comb(num_abstentions, filled) for filled in range(min(num_abstentions, remaining) + 1)}
    for count in others:
        extended: Counter[tuple[int, int]] = Counter()
        for (filled, ties), n in ways.items():
            for num_cast in range(min(count, votes, remaining - filled) + 1):
                extended[filled + num_cast, ties + (num_cast == votes)] += n * comb(count, num_cast)
        ways = extended
    return sum(n / (ties + 1) for (filled, ties), n in ways.items() if filled == remaining)


def _check_k(k: int, num_answers: int) -> None:
    if not 1 <= k <= num_answers:
        raise ConfigError("k", k, f"must be from 1 to the number of answers, {num_answers}")


def rollout_row(trajectory: Trajectory, *, write_token_ids: bool = False) -> dict[str, Any]:
    """Return `trajectory` as a JSON-serializable row.

    It holds group_id, prompt_id, dataset, task_name, generation_index, stop_reason, reward (None when failed), rewards
    by name, answer, failure, num_turns, num_tokens, num_generated_tokens, weight_versions, timings and messages, of an
    agent that has rewritten its history also other_chains, a list of messages each, and chain_rewards where single
    calls were rewarded: by name, of messages and other_chains in turn. A message that was sampled through
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
        "failure": _failure_to_dict(failure) if failure else None,
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "num_generated_tokens": trajectory.num_generated_tokens,
        "weight_versions": list(trajectory.weight_versions),
        "timings": _timings_to_dict(trajectory.timings),
        "messages": [_message_to_dict(message, write_token_ids) for message in trajectory.message_log],
        **({"other_chains": others} if others else {}),
        **({"chain_rewards": [dict(each) for each in trajectory.chain_rewards]} if trajectory.chain_rewards else {}),
    }


def _timings_to_dict(timings: Timings) -> dict[str, float]:
    """Return what `asdict` does, at a tenth of its cost."""
    return {name: getattr(timings, name) for name in TIMING_NAMES}


def _failure_to_dict(failure: Failure) -> dict[str, str]:
    row: dict[str, str] = {"class": failure.failure_class, "cause": failure.cause}
    return row | {"traceback": failure.traceback[-MAX_TRACEBACK_CHARS:]} if failure.traceback else row


def _message_to_dict(tokenized: TokenizedMessage, write_token_ids: bool) -> dict[str, Any]:
    row = to_record(tokenized.message)
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


class RolloutWriter:
    """Appends rollouts to a JSON Lines file; also a context manager.

    A daemon thread encodes and writes, in order, a call's rollouts at a time. `write` returns at once while at most
    `MAX_PENDING_ROLLOUTS` wait for the disk, or one call's, and waits for room otherwise, so that a slow disk slows
    the run and loses nothing. A disk that makes no room within `timeout_s` ends the run. A file that cannot be written
    does not stop the run: the log has the first error, and at the end the number of rollouts that the file lacks.

    A line holds `step` and what `rollout_row` tells.
    """

    def __init__(self, path: str | Path, *, write_token_ids: bool = False, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self.path = Path(path)
        self._row = partial(rollout_row, write_token_ids=write_token_ids)
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[tuple[int, tuple[Trajectory, ...], Future[None]] | None] = SimpleQueue()
        self._calls: deque[tuple[int, Future[None]]] = deque()  # that may be unfinished: their size, their end
        self._num_lost = 0  # rollouts that could not be written
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = Thread(target=self._append_all, name="rollout-writer", daemon=True)
        self._thread.start()

    async def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append one line a rollout; `step` is the training step that they belong to.

        Raises RolloutError when the disk makes no room within the deadline.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while (pending := self._num_pending()) and pending + len(trajectories) > MAX_PENDING_ROLLOUTS:
                    await asyncio.shield(asyncio.wrap_future(self._calls[0][1]))
        except TimeoutError as error:
            raise RolloutError(
                f"{self.path}: the disk took too few of {self._num_pending()} rollouts in {self._timeout_s:g} s "
                f"to record those of step {step}"
            ) from error
        end: Future[None] = Future()
        self._calls.append((len(trajectories), end))
        self._queue.put((step, tuple(trajectories), end))

    def close(self) -> None:
        """Return when everything is written, or after the deadline; no `write` follows. May be called twice."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(self._timeout_s)
        if missing := self._num_lost + self._num_pending():
            logger.error("%s lacks %d rollouts that could not be written", self.path, missing)

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _num_pending(self) -> int:
        """Return the number of rollouts that wait or are being written."""
        while self._calls and self._calls[0][1].done():
            self._calls.popleft()
        return sum(size for size, _ in self._calls)

    def _append_all(self) -> None:
        while (call := self._queue.get()) is not None:
            step, trajectories, end = call
            if not self._append(step, trajectories):
                self._num_lost += len(trajectories)
            end.set_result(None)

    def _append(self, step: int, trajectories: Sequence[Trajectory]) -> bool:
        """Write one call's lines, and return whether that succeeded."""
        try:
            lines = [encode_json_line({"step": step, **self._row(t)}) for t in trajectories]
            with self.path.open("ab") as file:
                file.write(b"".join(lines))
        except Exception:
            if not self._num_lost:
                logger.exception("rollouts cannot be written to %s", self.path)
            return False
        return True


class RolloutDetails:
    """Writes the details of the first groups of a step.

    `mark` before the step chooses the rows, and asks the policy to keep their log-probs where the batch has none;
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
    ) -> None:
        """`num_groups`: per step; `decode` returns the text of token ids."""
        self._path = path
        self._num_groups = num_groups
        self._decode = decode
        self._max_bytes = max_bytes
        self._period = 1  # steps between two that are recorded
        self._texts: dict[int, str] = {}  # by token id
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-details")
        self._pending: list[Future[None]] = []
        self._marked: torch.Tensor | None = None  # [B] bool: rows of the step that trains
        self._has_failed = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def mark(self, step: int, batch: "TrainingBatch") -> None:
        """Choose the rows of the first groups of a batch that is about to be trained on."""
        self._marked = None
        if step % self._period or self._has_failed:
            return
        self._pending = [each for each in self._pending if not each.done()]
        if len(self._pending) >= MAX_PENDING:
            return  # a slow disk: what is recorded is a sample anyway
        marked = batch[keys.GROUP_ID] < self._num_groups
        if keys.PREV_LOGPROBS not in batch:
            batch[keys.RECORDED] = marked.cumsum(0).where(marked, 0) - 1
        self._marked = marked

    async def record(self, step: int, batch: "TrainingBatch", rows: "Sequence[BatchRow]", policy: "Policy") -> None:
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

    def _write(self, step: int, sample: "TrainingBatch", origins: "Sequence[BatchRow]") -> None:
        if self._has_failed or step % self._period:  # the period may have grown since the step was recorded
            return
        try:
            lines = [encode_json_line({"step": step, **row}) for row in self._rows(sample, origins)]
            with self._path.open("ab") as file:
                file.writelines(lines)
            if self._path.stat().st_size > self._max_bytes:
                self._thin()
        except Exception:
            logger.exception("details of rollouts cannot be written to %s", self._path)
            self._has_failed = True

    def _rows(self, sample: "TrainingBatch", origins: "Sequence[BatchRow]") -> Iterator[dict[str, Any]]:
        for row, origin in enumerate(origins):
            group_id, generation_index = origin.trajectory_key
            yield {
                "group_id": group_id,
                "generation_index": generation_index,
                "chain": origin.chain_index,
                **self._tokens(sample[row]),
            }

    def _tokens(self, each: "TrainingBatch") -> dict[str, Any]:
        """Return the columns of one row: all tokens as text, the numbers of the sampled ones."""
        import torch  # here: the viewer and collections load this module without it

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


def _round(values: "torch.Tensor") -> list[float | None]:
    """Return numbers as JSON has them: None where one is not finite."""
    return [round(value, DIGITS) if math.isfinite(value) else None for value in values.tolist()]
