"""Conversations as token sequences of which the assistant's turns are learnt, and batches of them."""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.conversations import Conversation, ConversationSet
from nemo_rl.data.loader import epoch_order
from nemo_rl.errors import DataError
from nemo_rl.types import TokenizedMessage, TrainingBatch

logger = logging.getLogger(__name__)

PROMPT_CACHE_SIZE = 16_384  # whose tokens are kept while a set is encoded, since some sets ask the same again
REPORT_PERIOD_S = 15.0


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedSample:
    """One conversation: its tokens, and which of them are learnt."""

    token_ids: np.ndarray  # [T] int32
    token_mask: np.ndarray  # [T] bool; true on the assistant's tokens, the end of each turn included

    def truncate(self, max_tokens: int) -> "SupervisedSample":
        return SupervisedSample(self.token_ids[:max_tokens], self.token_mask[:max_tokens])


@dataclass(frozen=True, slots=True)
class SupervisedDataset:
    """The samples of a ConversationSet, in its order."""

    name: str
    samples: Sequence[SupervisedSample]
    num_overlong: int = 0  # conversations of too many tokens: left out of the samples, or cut
    num_dropped: int = 0  # those that were left out


def encode_conversation(encoder: ChatEncoder, conversation: Conversation) -> SupervisedSample:
    """What a rollout of this conversation would hold, had the model written the assistant's messages itself.

    Raises ConfigError when the chat template refuses a message, or renders the assistant's in a way of its own.
    """
    return _encode(encoder, conversation, lambda messages: flat_token_ids(encoder.encode_prompt(messages)))


def encode_set(
    encoder: ChatEncoder, loaded: ConversationSet, *, max_tokens: int, overlong: Literal["drop", "truncate"]
) -> SupervisedDataset:
    """Encode a whole set; a conversation of more than `max_tokens` tokens is left out, or cut, and counted.

    Raises DataError when none is left, and as `encode_conversation` does.
    """
    prompt_ids = lru_cache(PROMPT_CACHE_SIZE)(lambda messages: flat_token_ids(encoder.encode_prompt(messages)))
    samples, num_overlong, num_dropped, reported_at = [], 0, 0, time.monotonic()
    for number, conversation in enumerate(loaded.conversations):
        if time.monotonic() - reported_at > REPORT_PERIOD_S:
            reported_at = time.monotonic()
            logger.info("%s: %d of %d conversations are encoded", loaded.name, number, len(loaded.conversations))
        sample = _encode(encoder, conversation, prompt_ids)
        if len(sample.token_ids) > max_tokens:
            num_overlong += 1
            sample = sample.truncate(max_tokens)
            if overlong == "drop" or not sample.token_mask.any():  # cut before the first answer
                num_dropped += 1
                continue
        samples.append(sample)
    if num_overlong:
        logger.warning(
            "%s: %d of %d conversations have more than %d tokens: %d are left out, %d cut",
            loaded.name, num_overlong, len(loaded.conversations), max_tokens, num_dropped, num_overlong - num_dropped,
        )  # fmt: skip
    if not samples:
        raise DataError(f"{loaded.name}: no conversation has at most {max_tokens} tokens")
    return SupervisedDataset(loaded.name, samples, num_overlong, num_dropped)


def supervised_batch(samples: Sequence[SupervisedSample]) -> TrainingBatch:
    """The samples as a batch, right-padded, each a group of its own."""
    lengths = np.array([len(sample.token_ids) for sample in samples])
    token_ids = np.zeros((len(samples), lengths.max()), dtype=np.int64)
    token_mask = np.zeros(token_ids.shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        token_ids[row, : lengths[row]] = sample.token_ids
        token_mask[row, : lengths[row]] = sample.token_mask
    token_mask[:, 0] = 0.0  # nothing comes before the first token, so nothing predicts it
    return TensorDict(
        {
            keys.TOKEN_IDS: torch.from_numpy(token_ids),
            keys.TOKEN_MASK: torch.from_numpy(token_mask),
            keys.LENGTHS: torch.from_numpy(lengths),
            keys.SAMPLE_MASK: torch.ones(len(samples)),
            keys.TRAJECTORY_ID: torch.arange(len(samples)),
            keys.GROUP_ID: torch.arange(len(samples)),
        },
        batch_size=[len(samples)],
    )


class SampleLoader:
    """Hands out each sample once an epoch, in an order of the seed and the epoch; resumable to the exact place."""

    def __init__(self, samples: Sequence[SupervisedSample], *, shuffle: bool, seed: int, max_epochs: int) -> None:
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._end = max_epochs * len(samples)
        self._consumed = 0
        self._order: tuple[int, Sequence[int]] = (0, self._order_of(0))
        self._fingerprint = _fingerprint(samples, shuffle=shuffle, seed=seed)

    @property
    def data_exhausted(self) -> bool:
        return self._consumed >= self._end

    def take(self, count: int) -> list[SupervisedSample]:
        """The next `count` samples, on into the next epoch; fewer at the end of the last one, none after it."""
        stop = min(self._consumed + count, self._end)
        taken = [self._at(position) for position in range(self._consumed, stop)]
        self._consumed = stop
        return taken

    def state_dict(self) -> dict[str, Any]:
        epoch = self._consumed // len(self._samples)
        return {"consumed_prompts": self._consumed, "epoch": epoch, "data": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises DataError when the samples, their order or the seed differ."""
        if state["data"] != self._fingerprint:
            raise DataError(
                "the checkpoint was made with other training conversations, tokens, another seed or data.shuffle"
            )
        self._consumed = state["consumed_prompts"]

    def _at(self, position: int) -> SupervisedSample:
        epoch, offset = divmod(position, len(self._samples))
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return self._samples[self._order[1][offset]]

    def _order_of(self, epoch: int) -> Sequence[int]:
        return epoch_order(len(self._samples), epoch, shuffle=self._shuffle, seed=self._seed)


def _encode(encoder: ChatEncoder, conversation: Conversation, prompt_ids: Any) -> SupervisedSample:
    tools, parts, waiting = conversation.tools, [], []
    answer: TokenizedMessage | None = None
    for message in conversation.messages:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if answer is not None:
            context = flat_token_ids(encoder.encode_turn((answer,), waiting, tools))
        elif tools:
            context = flat_token_ids(encoder.encode_prompt(waiting, tools))
        else:
            context = prompt_ids(tuple(waiting))
        answer = TokenizedMessage(message, encoder.encode_answer(message, tools))
        parts += [(context, False), (answer.token_ids, True)]
        waiting = []
    token_ids = np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in parts])
    return SupervisedSample(token_ids, np.repeat([learnt for _, learnt in parts], [len(ids) for ids, _ in parts]))


def _fingerprint(samples: Sequence[SupervisedSample], *, shuffle: bool, seed: int) -> str:
    digest = hashlib.sha256(f"{seed}\n{shuffle}\n{len(samples)}".encode())
    for sample in samples:
        digest.update(sample.token_ids.tobytes())
        digest.update(sample.token_mask.tobytes())
    return digest.hexdigest()[:16]
