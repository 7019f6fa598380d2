"""Supervised data: conversations whose assistant turns are trained on, their tokens, and batches of them.

Preference pairs (preferences.py) share the sets, the loader and the batches.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.data import DataConfig, DatasetConfig, make_unique_name, resolve_dataset
from nemo_rl.config.supervised import SFTDataConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.datasets import SEED_STRIDE, check_split, split_rows
from nemo_rl.data.messages import parse_message
from nemo_rl.data.processors import PLACEHOLDER, RowFormat, make_row_format
from nemo_rl.data.prompts import epoch_order
from nemo_rl.data.rows import Row, convert_rows
from nemo_rl.data.sources import load_rows
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, TokenizedMessage, TrainingBatch

logger = logging.getLogger(__name__)

QUESTION_ANSWER_FIELDS = (("input", "output"), ("prompt", "response"), ("prompt", "completion"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's; every assistant message is trained on."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas that the chat template renders

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages before the last turn."""
        return self.messages[:-1]


class Example(Protocol):
    """A sample of supervised training: a `Conversation`, or a `Preference` (preferences.py)."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages before the answer."""
        ...


ExampleT = TypeVar("ExampleT", bound=Example)


@dataclass(frozen=True, slots=True)
class ExampleSet(Generic[ExampleT]):
    """Examples that are drawn from, or measured, together."""

    name: str  # in metrics
    examples: Sequence[ExampleT]


ConversationSet: TypeAlias = ExampleSet[Conversation]


def load_conversations(config: SFTDataConfig, run_seed: int) -> tuple[ConversationSet, tuple[ConversationSet, ...]]:
    """Return the training blend of conversations and the validation sets, as `load_examples`."""
    return load_examples(config, run_seed, _load_conversations)


def load_examples(
    config: DataConfig, run_seed: int, read: Callable[[DatasetConfig, int, str], list[ExampleT]]
) -> tuple[ExampleSet[ExampleT], tuple[ExampleSet[ExampleT], ...]]:
    """Return the training blend, named "train", and the validation sets; seeds as in datasets.load_datasets.

    `read(section, seed, key)` returns the examples of one dataset. With `config.disjoint`, training examples whose
    prompt occurs in a validation set are dropped.
    """
    train: list[ExampleSet[ExampleT]] = []
    held_out: list[ExampleSet[ExampleT]] = []
    for index, (key, own) in enumerate(config.datasets):
        loaded = train if key.startswith("data.train") else held_out
        seed, taken = run_seed + SEED_STRIDE * index, {each.name for each in loaded}
        section = resolve_dataset(own, config.default, key=key, supervised=True)[1]
        name = make_unique_name(section.name or str(section.dataset_name), taken)
        examples = read(section, seed if section.seed is None else section.seed, key)
        logger.info("%s: loaded %d examples of %s", key, len(examples), name)
        loaded.append(ExampleSet(name, examples * (section.repeat or 1)))
    train = _split_validation(config, train, held_out, run_seed)
    blend = [example for each in train for example in each.examples]
    if config.disjoint:
        blend = _remove_held_out(blend, held_out)
    return ExampleSet("train", blend), tuple(held_out)


def _split_validation(
    config: DataConfig, train: list[ExampleSet[ExampleT]], held_out: list[ExampleSet[ExampleT]], run_seed: int
) -> list[ExampleSet[ExampleT]]:
    """Return the training sets without their validation splits, which are appended to `held_out`."""
    kept_sets = []
    for (key, own), one in zip(config.datasets_of("train"), train, strict=True):
        section = resolve_dataset(own, config.default, key=key, supervised=True)[1]
        size, repeat = section.split_validation_size, section.repeat or 1
        if not size:
            kept_sets.append(one)
            continue
        rows = one.examples[: len(one.examples) // repeat]
        kept, taken = split_rows(len(rows), size, run_seed if section.seed is None else section.seed)
        check_split(key, size, len(rows), len(taken))
        name = make_unique_name(one.name, {each.name for each in held_out})
        held_out.append(ExampleSet(name, [rows[index] for index in taken]))
        kept_sets.append(ExampleSet(one.name, [rows[index] for index in kept] * repeat))
    return kept_sets


def read_conversations(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Conversation]:
    """Return one conversation per row; raises DataError naming the dataset and the row that cannot be read."""
    row_format = make_row_format(section, key=key)
    return convert_rows(
        rows, lambda row: _read_conversation(row, row_format, section), f"{key} ({section.dataset_name})"
    )


def _load_conversations(section: DatasetConfig, seed: int, key: str) -> list[Conversation]:
    return read_conversations(load_rows(section, seed=seed, key=key), section, key=key)


def _read_conversation(row: Row, row_format: RowFormat, section: DatasetConfig) -> Conversation:
    if "entry" in row and "task" in row:  # of reasoning_gym
        return _read_pair(row["entry"]["question"], row["entry"]["answer"], row_format)
    if section.input_key is None and "messages" in row:
        return _read_messages(row, row_format)
    question, answer = _question_answer_fields(row, section)
    return _read_pair(row[question], row[answer], row_format)


def _question_answer_fields(row: Row, section: DatasetConfig) -> tuple[str, str]:
    """Return the fields of question and answer; where the recipe names none, a known pair that the row has."""
    known = next(
        (pair for pair in QUESTION_ANSWER_FIELDS if pair[0] in row and pair[1] in row), QUESTION_ANSWER_FIELDS[0]
    )
    return section.input_key or known[0], section.output_key or known[1]


def _read_pair(question: Any, answer: Any, row_format: RowFormat) -> Conversation:
    for text in (question, answer):
        if not isinstance(text, str):
            raise DataError(f"{text!r} is {type(text).__name__}, not text")
    return Conversation((*row_format.messages(question), Message("assistant", answer)))


def _read_messages(row: Row, row_format: RowFormat) -> Conversation:
    """Return the conversation of OpenAI messages up to the last assistant message."""
    messages = tuple(parse_message(item, f"messages[{i}]") for i, item in enumerate(row["messages"]))
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation has no assistant message, so there is nothing to train on")
    if row_format.prompt_text != PLACEHOLDER:
        raise DataError("prompt_file is for rows with a question, and this one has messages")
    if row_format.system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", row_format.system_prompt), *messages)
    _check_turns(messages)
    return Conversation(messages, tuple(row.get("tools") or ()))


def _check_turns(messages: Sequence[Message]) -> None:
    previous = "assistant"
    for message in messages:
        if message.role == previous == "assistant":
            raise DataError("a message of the assistant follows no other role's: nothing opens its turn")
        previous = message.role


def _remove_held_out(train: list[ExampleT], held_out: Sequence[ExampleSet[ExampleT]]) -> list[ExampleT]:
    prompt_messages = {example.prompt_messages for each in held_out for example in each.examples}
    kept = [example for example in train if example.prompt_messages not in prompt_messages]
    if not kept:
        raise ConfigError("data.disjoint", True, "every training example has a prompt of a validation dataset")
    if len(kept) < len(train):
        dropped = len(train) - len(kept)
        logger.info(
            "dropped %d of %d training examples whose prompt occurs in a validation dataset", dropped, len(train)
        )
    return kept


PROMPT_CACHE_SIZE = 16_384  # prompts whose tokens are kept while a set is encoded, since some sets repeat them
REPORT_PERIOD_S = 15.0


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedSample:
    """One conversation: its tokens, and which of them are trained on."""

    token_ids: np.ndarray  # [T] int32
    token_mask: np.ndarray  # [T] bool; true on the assistant's tokens, including the end of each turn

    @property
    def rows(self) -> "tuple[SupervisedSample, ...]":
        """Return the token sequences of the sample."""
        return (self,)

    def with_last_answer(self) -> "SupervisedSample":
        """Return the sample in which only the last answer is trained on."""
        after_context = np.flatnonzero(~self.token_mask)
        last = np.flatnonzero(self.token_mask)[-1] if self.token_mask.any() else -1
        start = after_context[after_context < last][-1] + 1 if (after_context < last).any() else 0
        return SupervisedSample(self.token_ids, self.token_mask & (np.arange(len(self.token_mask)) >= start))

    def truncate(self, max_tokens: int) -> "SupervisedSample":
        """Return the first `max_tokens` tokens."""
        return SupervisedSample(self.token_ids[:max_tokens], self.token_mask[:max_tokens])

    def with_edges(self, first: int | None, last: int | None) -> "SupervisedSample":
        """Return the sample that begins with the token `first`, not trained on, and ends with `last`, which is."""
        before = [] if first is None or self.token_ids[0] == first else [first]
        after = [] if last is None or self.token_ids[-1] == last else [last]
        token_ids = np.concatenate([np.array(before, np.int32), self.token_ids, np.array(after, np.int32)])
        edges = (np.zeros(len(before), bool), self.token_mask, np.ones(len(after), bool))
        return SupervisedSample(token_ids, np.concatenate(edges))

    def with_openings(self, num_tokens: int) -> "SupervisedSample":
        """Return the sample whose trained parts begin `num_tokens` tokens earlier."""
        mask = self.token_mask.copy()
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        for start in starts:
            mask[max(start - num_tokens, 0) : start] = True
        return SupervisedSample(self.token_ids, mask)


@dataclass(frozen=True, slots=True, eq=False)
class PairSample:
    """A preference pair: in either conversation only the last answer is trained on."""

    chosen: SupervisedSample
    rejected: SupervisedSample

    @property
    def rows(self) -> tuple[SupervisedSample, ...]:
        """Return the token sequences of the sample."""
        return self.chosen, self.rejected


class Sample(Protocol):
    """One example as tokens."""

    @property
    def rows(self) -> tuple[SupervisedSample, ...]:
        """Return the token sequences of the sample."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisedDataset:
    """The samples of an ExampleSet, in its order."""

    name: str
    samples: Sequence[Sample]
    num_overlong: int = 0  # examples of too many tokens: dropped or truncated
    num_dropped: int = 0  # those that were dropped


EncodePrompt = Callable[[tuple[Message, ...]], tuple[int, ...]]


def make_prompt_encoder(encoder: ChatEncoder) -> EncodePrompt:
    """Return a function that encodes first prompts without tools, and keeps the results of recent ones."""
    return lru_cache(PROMPT_CACHE_SIZE)(lambda messages: flat_token_ids(encoder.encode_prompt(messages)))


def encode_conversation(
    encoder: ChatEncoder, conversation: Conversation, encode_prompt: EncodePrompt | None = None
) -> SupervisedSample:
    """Return the tokens that a rollout of this conversation would have, had the model written the assistant's messages.

    `encode_prompt` encodes a first prompt without tools; None: the encoder does.

    Raises ConfigError when the chat template refuses a message, or renders the assistant's in a way of its own.
    """
    encode_prompt = encode_prompt or make_prompt_encoder(encoder)
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
            context = encode_prompt(tuple(waiting))
        answer = TokenizedMessage(message, encoder.encode_answer(message, tools))
        parts += [(context, False), (answer.token_ids, True)]
        waiting = []
    token_ids = np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in parts])
    return SupervisedSample(token_ids, np.repeat([trained for _, trained in parts], [len(ids) for ids, _ in parts]))


def encode_conversations(
    encoder: ChatEncoder,
    loaded: ConversationSet,
    *,
    max_tokens: int,
    overlong: Literal["drop", "truncate"],
    add_bos: bool = False,
    add_eos: bool = False,
    train_on_opening: bool = False,
) -> SupervisedDataset:
    """Encode a whole set; a conversation of more than `max_tokens` tokens is dropped or truncated, and counted.

    `add_bos` and `add_eos` write the tokenizer's first and last token where the template does not; with
    `train_on_opening` the tokens that open an answer are trained on too.

    Raises DataError when none is left, and as `encode_conversation` does.
    """
    encode_prompt = make_prompt_encoder(encoder)
    samples, num_overlong, num_dropped, reported_at = [], 0, 0, time.monotonic()
    for number, conversation in enumerate(loaded.examples):
        if time.monotonic() - reported_at > REPORT_PERIOD_S:
            reported_at = time.monotonic()
            logger.info("%s: encoded %d of %d conversations", loaded.name, number, len(loaded.examples))
        sample = encode_conversation(encoder, conversation, encode_prompt)
        if train_on_opening:
            sample = sample.with_openings(encoder.num_opening_tokens)
        if add_bos or add_eos:
            first, last = encoder.edge_token_ids
            sample = sample.with_edges(first if add_bos else None, last if add_eos else None)
        if len(sample.token_ids) > max_tokens:
            num_overlong += 1
            sample = sample.truncate(max_tokens)
            if overlong == "drop" or not sample.token_mask.any():  # cut before the first answer
                num_dropped += 1
                continue
        samples.append(sample)
    if num_overlong:
        logger.warning(
            "%s: %d of %d conversations have more than %d tokens: dropped %d, truncated %d",
            loaded.name, num_overlong, len(loaded.examples), max_tokens, num_dropped, num_overlong - num_dropped,
        )  # fmt: skip
    if not samples:
        raise DataError(f"{loaded.name}: no conversation has at most {max_tokens} tokens")
    return SupervisedDataset(loaded.name, samples, num_overlong, num_dropped)


def make_pair_batch(samples: Sequence[Sample]) -> TrainingBatch:
    """Return pairs as a right-padded batch: the chosen row of each and then the rejected one, a group for each pair."""
    batch = make_supervised_batch(samples)
    index = torch.arange(len(batch))
    return batch.update({keys.GROUP_ID: index // 2, keys.PREFERENCE: (1 - 2 * (index % 2)).float()})


def make_supervised_batch(samples: Sequence[Sample]) -> TrainingBatch:
    """Return the samples' token sequences as a right-padded batch, each a group of its own."""
    rows = [row for sample in samples for row in sample.rows]
    lengths = np.array([len(row.token_ids) for row in rows])
    token_ids = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    token_mask = np.zeros(token_ids.shape, dtype=np.float32)
    for index, row in enumerate(rows):
        token_ids[index, : lengths[index]] = row.token_ids
        token_mask[index, : lengths[index]] = row.token_mask
    token_mask[:, 0] = 0.0  # nothing comes before the first token, so nothing predicts it
    return TensorDict(
        {
            keys.TOKEN_IDS: torch.from_numpy(token_ids),
            keys.TOKEN_MASK: torch.from_numpy(token_mask),
            keys.LENGTHS: torch.from_numpy(lengths),
            keys.SAMPLE_MASK: torch.ones(len(rows)),
            keys.TRAJECTORY_ID: torch.arange(len(rows)),
            keys.GROUP_ID: torch.arange(len(rows)),
        },
        batch_size=[len(rows)],
    )


class SampleLoader:
    """Samples in training order, each once per epoch, a function of seed and epoch; resumable to the exact sample."""

    def __init__(self, samples: Sequence[Sample], *, shuffle: bool, seed: int, max_epochs: int) -> None:
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._end = max_epochs * len(samples)
        self._consumed = 0
        self._order: tuple[int, Sequence[int]] = (0, self._epoch_order(0))
        self._fingerprint = _fingerprint(samples, shuffle=shuffle, seed=seed)

    @property
    def data_exhausted(self) -> bool:
        """Return whether `take` has nothing left."""
        return self._consumed >= self._end

    def take(self, count: int) -> list[Sample]:
        """Return the next `count` samples, across epochs; fewer at the end of the last epoch, none after it."""
        stop = min(self._consumed + count, self._end)
        taken = [self._at(position) for position in range(self._consumed, stop)]
        self._consumed = stop
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        epoch = self._consumed // len(self._samples)
        return {"consumed_prompts": self._consumed, "epoch": epoch, "data": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raises DataError when the samples, their order or the seed differ."""
        if state["data"] != self._fingerprint:
            raise DataError(
                "the checkpoint was made with other training conversations, tokens, another seed or data.shuffle"
            )
        self._consumed = state["consumed_prompts"]

    def _at(self, position: int) -> Sample:
        epoch, offset = divmod(position, len(self._samples))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return self._samples[self._order[1][offset]]

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        return epoch_order(len(self._samples), epoch, shuffle=self._shuffle, seed=self._seed)


def _fingerprint(samples: Sequence[Sample], *, shuffle: bool, seed: int) -> str:
    digest = hashlib.sha256(f"{seed}\n{shuffle}\n{len(samples)}".encode())
    for row in (row for sample in samples for row in sample.rows):
        digest.update(row.token_ids.tobytes())
        digest.update(row.token_mask.tobytes())
    return digest.hexdigest()[:16]
