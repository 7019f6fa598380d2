"""The replay buffer as a checkpoint holds it: plain values, without prompts, which are found by their place.

Token ids and log-probs of all messages lie one behind the other in two tensors, so that a buffer of millions of tokens
is read without a step of the unpickler a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from nemo_rl.data.loader import LoadedPrompt, PromptLoader
from nemo_rl.experience.replay_buffer import BufferedGroup, DroppedGroup, ReplayBufferState
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    MessageLog,
    StopReason,
    Timings,
    TokenizedMessage,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)

REPLAY_BUFFER = "replay_buffer"  # the key in a source's state


def replay_buffer_state(state: Mapping[str, Any], loader: PromptLoader) -> ReplayBufferState:
    """That of a source's state, as the source gave it or as a checkpoint holds it; empty in a synchronous run's."""
    buffered = state.get(REPLAY_BUFFER, ReplayBufferState())
    return buffered if isinstance(buffered, ReplayBufferState) else from_plain(buffered, loader)


def to_plain(state: ReplayBufferState) -> dict[str, Any]:
    """Values that `checkpoint.save_state` accepts."""
    tape = _Tape()
    complete = [
        {
            "place": one.place,
            "weight_version": one.weight_version,
            "trajectories": [_plain_trajectory(t, tape) for t in one.group.trajectories],
        }
        for one in state.complete
    ]
    return {
        "complete": complete,
        "in_flight": list(state.in_flight),
        "dropped": [asdict(one) for one in state.dropped],
        "token_ids": torch.tensor(tape.token_ids, dtype=torch.int64),
        "generation_logprobs": torch.tensor(tape.logprobs, dtype=torch.float64),
    }


def from_plain(plain: Mapping[str, Any], loader: PromptLoader) -> ReplayBufferState:
    """What `to_plain` was given; `loader` has the same prompts in the same order."""
    tape = _Tape(plain["token_ids"].tolist(), plain["generation_logprobs"].tolist())
    return ReplayBufferState(
        complete=tuple(_group(one, loader.at(one["place"]), tape) for one in plain["complete"]),
        in_flight=tuple(plain["in_flight"]),
        dropped=tuple(DroppedGroup(**one) for one in plain["dropped"]),
    )


class _Tape:
    """Numbers of all messages in order: written at the end, read from the beginning."""

    def __init__(self, token_ids: Sequence[int] = (), logprobs: Sequence[float] = ()) -> None:
        self.token_ids = list(token_ids)
        self.logprobs = list(logprobs)
        self._next_token = 0
        self._next_logprob = 0

    def write(self, message: TokenizedMessage) -> None:
        self.token_ids += message.token_ids
        self.logprobs += message.generation_logprobs or ()

    def read_token_ids(self, count: int) -> tuple[int, ...]:
        self._next_token += count
        return tuple(self.token_ids[self._next_token - count : self._next_token])

    def read_logprobs(self, count: int) -> tuple[float, ...]:
        self._next_logprob += count
        return tuple(self.logprobs[self._next_logprob - count : self._next_logprob])


def _plain_trajectory(trajectory: Trajectory, tape: _Tape) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "generation_index": trajectory.generation_index,
        "stop_reason": trajectory.stop_reason.value,
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()},
        "answer": trajectory.answer,
        "num_turns": trajectory.num_turns,
        "weight_versions": list(trajectory.weight_versions),
        "failure": None if failure is None else [failure.failure_class.value, failure.cause],
        "timings": asdict(trajectory.timings),
        "loss_weight": float(trajectory.loss_weight),
        "chains": [[_plain_message(message, tape) for message in log] for log in trajectory.chains],
    }


def _plain_message(tokenized: TokenizedMessage, tape: _Tape) -> dict[str, Any]:
    tape.write(tokenized)
    message = tokenized.message
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": [asdict(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "num_tokens": len(tokenized.token_ids),
        "is_generated": tokenized.is_generated,
        "weight_spans": [[span.version, span.start, span.end] for span in tokenized.weight_spans],
    }


def _group(plain: Mapping[str, Any], loaded: LoadedPrompt, tape: _Tape) -> BufferedGroup:
    trajectories = tuple(_trajectory(one, loaded, tape) for one in plain["trajectories"])
    group = TrajectoryGroup(loaded.group_id, loaded.prompt, trajectories)
    return BufferedGroup(plain["place"], plain["weight_version"], group)


def _trajectory(plain: Mapping[str, Any], loaded: LoadedPrompt, tape: _Tape) -> Trajectory:
    failure = plain["failure"]
    message_log, *other_chains = (_message_log(chain, tape) for chain in plain["chains"])
    oldest, newest = plain["weight_versions"]
    return Trajectory(
        prompt=loaded.prompt,
        group_id=loaded.group_id,
        generation_index=plain["generation_index"],
        message_log=message_log,
        stop_reason=StopReason(plain["stop_reason"]),
        rewards=plain["rewards"],
        answer=plain["answer"],
        num_turns=plain["num_turns"],
        weight_versions=(oldest, newest),
        failure=None if failure is None else Failure(FailureClass(failure[0]), failure[1]),
        timings=Timings(**plain["timings"]),
        other_chains=tuple(other_chains),
        loss_weight=plain["loss_weight"],
    )


def _message_log(plain: Sequence[Mapping[str, Any]], tape: _Tape) -> MessageLog:
    return tuple(_message(one, tape) for one in plain)


def _message(plain: Mapping[str, Any], tape: _Tape) -> TokenizedMessage:
    count = plain["num_tokens"]
    calls = tuple(ToolCall(**call) for call in plain["tool_calls"])
    return TokenizedMessage(
        Message(plain["role"], plain["content"], calls, plain["tool_call_id"]),
        tape.read_token_ids(count),
        tape.read_logprobs(count) if plain["is_generated"] else None,
        tuple(WeightSpan(*span) for span in plain["weight_spans"]),
    )
