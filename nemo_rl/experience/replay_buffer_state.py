"""The state of a replay buffer as plain values, for checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from nemo_rl.data.messages import parse_record, to_record
from nemo_rl.data.prompt_loader import LoadedPrompt, PromptLoader
from nemo_rl.experience.replay_buffer import BufferedGroup, DroppedGroup, ReplayBufferState
from nemo_rl.image_features import ImageFeatures, PlacedImage
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns
from nemo_rl.types import (
    Failure,
    FailureClass,
    MessageLog,
    StopReason,
    Timings,
    TokenizedMessage,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)

REPLAY_BUFFER = "replay_buffer"  # the key in a source's state


def extract_buffer_state(state: Mapping[str, Any], loader: PromptLoader) -> ReplayBufferState:
    """Return the buffer in a source's state, live or from a checkpoint; empty in a synchronous run's."""
    buffered = state.get(REPLAY_BUFFER, ReplayBufferState())
    return buffered if isinstance(buffered, ReplayBufferState) else buffer_state_from_dict(buffered, loader)


def buffer_state_to_dict(state: ReplayBufferState) -> dict[str, Any]:
    """Convert the state to values that `checkpoint.save_state` accepts."""
    token_store = _TokenStore()
    complete = [
        {
            "place": one.prompt_index,
            "weight_version": one.weight_version,
            "trajectories": [_trajectory_to_dict(t, token_store) for t in one.group.trajectories],
            **({"baseline": _trajectory_to_dict(one.group.baseline, token_store)} if one.group.baseline else {}),
        }
        for one in state.complete
    ]
    return {
        "complete": complete,
        "in_flight": list(state.in_flight),
        "dropped": [asdict(one) for one in state.dropped],
        "token_ids": torch.tensor(token_store.token_ids, dtype=torch.int64),
        "generation_logprobs": torch.tensor(token_store.logprobs, dtype=torch.float64),
        "columns": token_store.column_tensors(),
        "images": {digest: _features_to_dict(one) for digest, one in token_store.images.items()},
    }


def buffer_state_from_dict(plain: Mapping[str, Any], loader: PromptLoader) -> ReplayBufferState:
    """Invert `buffer_state_to_dict`; `loader` has the same prompts in the same order."""
    columns = plain.get("columns", {})  # absent from buffers of earlier releases
    images = {digest: _features_from_dict(digest, one) for digest, one in plain.get("images", {}).items()}  # as above
    token_store = _TokenStore(plain["token_ids"].tolist(), plain["generation_logprobs"].tolist(), columns, images)
    return ReplayBufferState(
        complete=tuple(_group_from_dict(one, loader.at(one["place"]), token_store) for one in plain["complete"]),
        in_flight=tuple(plain["in_flight"]),
        dropped=tuple(DroppedGroup(**one) for one in plain["dropped"]),
    )


def _features_to_dict(features: ImageFeatures) -> dict[str, Any]:
    arrays = {name: torch.tensor(array) for name, array in features.arrays.items()}
    return {"num_tokens": features.num_tokens, "arrays": arrays}


def _features_from_dict(digest: str, plain: Mapping[str, Any]) -> ImageFeatures:
    arrays = {name: tensor.numpy() for name, tensor in plain["arrays"].items()}
    return ImageFeatures(digest, arrays, plain["num_tokens"])


class _TokenStore:
    """Numbers of all messages in order: written at the end, read from the beginning. Each image is there once."""

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        columns: Mapping[str, torch.Tensor] | None = None,
        images: Mapping[str, ImageFeatures] | None = None,
    ) -> None:
        self.images = dict(images or {})  # by digest
        self.token_ids = list(token_ids)
        self.logprobs = list(logprobs)
        self._columns = {dtype: [values.numpy()] for dtype, values in (columns or {}).items()}  # flat, by dtype
        self._next_token = 0
        self._next_logprob = 0
        self._next_entry = dict.fromkeys(self._columns, 0)

    def write(self, message: TokenizedMessage) -> None:
        self.token_ids += message.token_ids
        self.logprobs += message.generation_logprobs or ()
        self.images |= {placed.features.digest: placed.features for placed in message.images}
        for array in message.columns.values():
            self._columns.setdefault(array.dtype.name, []).append(array.reshape(-1))

    def column_tensors(self) -> dict[str, torch.Tensor]:
        """Return the entries of all columns by their dtype, one message after the other."""
        return {dtype: torch.from_numpy(np.concatenate(parts)) for dtype, parts in self._columns.items()}

    def read_columns(self, described: Mapping[str, tuple[str, Sequence[int]]]) -> TokenColumns:
        """Return a message's columns, described by name with dtype and shape, in the order of their writing."""
        columns = {name: self._read_column(dtype, shape) for name, (dtype, shape) in described.items()}
        return TokenColumns(columns) if columns else NO_COLUMNS

    def _read_column(self, dtype: str, shape: Sequence[int]) -> np.ndarray:
        start = self._next_entry[dtype]
        self._next_entry[dtype] = end = start + math.prod(shape)
        return self._columns[dtype][0][start:end].reshape(shape)

    def read_token_ids(self, count: int) -> tuple[int, ...]:
        self._next_token += count
        return tuple(self.token_ids[self._next_token - count : self._next_token])

    def read_logprobs(self, count: int) -> tuple[float, ...]:
        self._next_logprob += count
        return tuple(self.logprobs[self._next_logprob - count : self._next_logprob])


def _trajectory_to_dict(trajectory: Trajectory, token_store: _TokenStore) -> dict[str, Any]:
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
        "chains": [[_message_to_dict(message, token_store) for message in log] for log in trajectory.chains],
        "chain_rewards": [dict(rewards) for rewards in trajectory.chain_rewards],
        "response_faults": list(trajectory.response_faults),
        "policy_rewards": {policy: dict(own) for policy, own in trajectory.policy_rewards.items()},
    }


def _message_to_dict(tokenized: TokenizedMessage, token_store: _TokenStore) -> dict[str, Any]:
    token_store.write(tokenized)
    images = tokenized.images
    return {
        **to_record(tokenized.message),
        "num_tokens": len(tokenized.token_ids),
        "is_generated": tokenized.is_generated,
        **({"policy": tokenized.policy} if tokenized.policy else {}),
        "weight_spans": [[span.version, span.start, span.end] for span in tokenized.weight_spans],
        "columns": {name: [array.dtype.name, list(array.shape)] for name, array in tokenized.columns.items()},
        **({"images": [[one.features.digest, list(one.positions)] for one in images]} if images else {}),
    }


def _group_from_dict(plain: Mapping[str, Any], loaded: LoadedPrompt, token_store: _TokenStore) -> BufferedGroup:
    trajectories = tuple(_trajectory_from_dict(one, loaded, token_store) for one in plain["trajectories"])
    baseline = _trajectory_from_dict(plain["baseline"], loaded, token_store) if "baseline" in plain else None
    group = TrajectoryGroup(loaded.group_id, loaded.prompt, trajectories, baseline)
    return BufferedGroup(plain["place"], plain["weight_version"], group)


def _trajectory_from_dict(plain: Mapping[str, Any], loaded: LoadedPrompt, token_store: _TokenStore) -> Trajectory:
    failure = plain["failure"]
    message_log, *other_chains = (_message_log_from_dict(chain, token_store) for chain in plain["chains"])
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
        chain_rewards=tuple(plain.get("chain_rewards", ())),  # absent from buffers of earlier releases
        response_faults=tuple(plain.get("response_faults", ())),  # as above
        policy_rewards=plain.get("policy_rewards", {}),  # as above
    )


def _message_log_from_dict(plain: Sequence[Mapping[str, Any]], token_store: _TokenStore) -> MessageLog:
    return tuple(_message_from_dict(one, token_store) for one in plain)


def _message_from_dict(plain: Mapping[str, Any], token_store: _TokenStore) -> TokenizedMessage:
    count = plain["num_tokens"]
    return TokenizedMessage(
        parse_record(plain),
        token_store.read_token_ids(count),
        token_store.read_logprobs(count) if plain["is_generated"] else None,
        tuple(WeightSpan(*span) for span in plain["weight_spans"]),
        token_store.read_columns(plain.get("columns", {})),
        tuple(PlacedImage(token_store.images[digest], tuple(at)) for digest, at in plain.get("images", ())),
        plain.get("policy", ""),
    )
