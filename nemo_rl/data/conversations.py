"""Conversations whose assistant turns are trained on: read from rows, and encoded as tokens."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from nemo_rl.config.data import DatasetConfig, Overlong
from nemo_rl.config.supervised_runs import SFTDataConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.example_sets import ExampleSet, load_examples
from nemo_rl.data.messages import check_text, parse_messages, parse_tools
from nemo_rl.data.processors import PLACEHOLDER, RowFormat, make_row_format
from nemo_rl.data.row_sources import load_rows
from nemo_rl.data.rows import Row, convert_rows
from nemo_rl.data.supervised_samples import SampleImage, SupervisedDataset, SupervisedSample, shift_images
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, TokenizedMessage, placed_images

logger = logging.getLogger(__name__)

PROMPT_CACHE_SIZE = 16_384  # prompts whose tokens are cached while a set is encoded, since some sets repeat them
REPORT_PERIOD_S = 15.0
QUESTION_ANSWER_FIELDS = (("input", "output"), ("prompt", "response"), ("prompt", "completion"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's; every assistant message after the context is trained on."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas that the chat template renders
    num_context: int = 0  # first messages, none of which is trained on

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages before the last turn."""
        return self.messages[:-1]


ConversationSet: TypeAlias = ExampleSet[Conversation]


def load_conversations(config: SFTDataConfig, run_seed: int) -> tuple[ConversationSet, tuple[ConversationSet, ...]]:
    """Return the training blend of conversations and the validation sets, as `load_examples`."""
    return load_examples(config, run_seed, _load_conversations)


def read_conversations(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Conversation]:
    """Return one conversation per row; raises DataError naming the dataset and the row that cannot be read."""
    row_format = make_row_format(section, key=key)
    return convert_rows(
        rows, lambda row: _read_conversation(row, row_format, section), f"{key} ({section.dataset_name})"
    )


def _load_conversations(section: DatasetConfig, seed: int, key: str) -> list[Conversation]:
    return read_conversations(load_rows(section, seed=seed, key=key), section, key=key)


def _read_conversation(row: Row, row_format: RowFormat, section: DatasetConfig) -> Conversation:
    if "entry" in row and "task" in row:  # a row of reasoning_gym
        return _read_pair(row["entry"]["question"], row["entry"]["answer"], row_format)
    if section.input_key is None and "messages" in row:
        return _read_messages(row, row_format)
    question, answer = _question_answer_fields(row, section)
    if isinstance(row[question], list | tuple):
        return _read_completion(row, question, answer, row_format)
    return _read_pair(row[question], row[answer], row_format)


def _question_answer_fields(row: Row, section: DatasetConfig) -> tuple[str, str]:
    """Return the fields of question and answer; if the recipe names none, a known pair that the row has."""
    known = next(
        (pair for pair in QUESTION_ANSWER_FIELDS if pair[0] in row and pair[1] in row), QUESTION_ANSWER_FIELDS[0]
    )
    return section.input_key or known[0], section.output_key or known[1]


def _read_pair(question: Any, answer: Any, row_format: RowFormat) -> Conversation:
    for text in (question, answer):
        if not isinstance(text, str):
            raise DataError(f"{text!r:.80} is {type(text).__name__}, not text")
        check_text(text, "the question or answer")
    return Conversation((*row_format.messages(question), Message("assistant", answer)))


def _read_completion(row: Row, question: str, answer: str, row_format: RowFormat) -> Conversation:
    """Return the conversation of a row with messages in two columns; those of the first are context."""
    completion = row[answer]
    last = completion[-1] if isinstance(completion, list | tuple) and completion else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        problem = f"{question} is a list of messages, so it must be one that ends with the assistant's"
        raise DataError(f"{answer} is {completion!r:.80}: {problem}")
    read = _read_messages({**row, "messages": [*row[question], *completion]}, row_format)
    return replace(read, num_context=len(read.messages) - len(completion))


def _read_messages(row: Row, row_format: RowFormat) -> Conversation:
    """Return the conversation of OpenAI messages up to the last assistant message."""
    messages = parse_messages(row, images=row_format.images)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation has no assistant message, so there is nothing to train on")
    if row_format.prompt_text != PLACEHOLDER:
        raise DataError("prompt_file is for rows with a question, and this one has messages")
    if row_format.system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", row_format.system_prompt), *messages)
    _check_turns(messages)
    return Conversation(messages, parse_tools(row))


def _check_turns(messages: Sequence[Message]) -> None:
    previous = "assistant"
    for message in messages:
        if message.role == previous == "assistant":
            raise DataError("a message of the assistant follows no other role's: nothing opens its turn")
        previous = message.role


EncodePrompt = Callable[[tuple[Message, ...]], tuple[int, ...]]


def make_prompt_encoder(encoder: ChatEncoder) -> EncodePrompt:
    """Return a function that encodes first prompts without tools, and keeps the results of recent ones."""
    return lru_cache(PROMPT_CACHE_SIZE)(lambda messages: flat_token_ids(encoder.encode_prompt(messages)))


def encode_conversation(
    encoder: ChatEncoder,
    conversation: Conversation,
    encode_prompt: EncodePrompt | None = None,
    *,
    adds_end_tokens: bool = True,
) -> SupervisedSample:
    """Return the tokens that a rollout of this conversation would have, had the model written the assistant's messages.

    `encode_prompt` encodes a first prompt without tools; None: the encoder does. With `adds_end_tokens` the
    end-of-sequence token ends each answer that the template ends by text alone.

    Raises ConfigError when the chat template refuses a message, or renders the assistant's in a way of its own.
    """
    encode_prompt = encode_prompt or make_prompt_encoder(encoder)
    tools, parts, waiting, images, num_tokens = conversation.tools, [], [], [], 0
    answer: TokenizedMessage | None = None
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            waiting.append(message)
            continue
        shown = [image for each in waiting for image in each.images]
        if answer is not None:
            log = encoder.encode_turn((answer,), waiting, tools)
        elif tools or shown:
            log = encoder.encode_prompt(waiting, tools)
        else:
            log = ()
        context = flat_token_ids(log) if log else encode_prompt(tuple(waiting))
        placed = zip(shown, placed_images(log), strict=True)
        images += shift_images([SampleImage(image, each.positions) for image, each in placed], num_tokens)
        own_end = "text" if message is conversation.messages[-1] else "open"
        token_ids = encoder.encode_answer(message, tools, end="token" if adds_end_tokens else own_end)
        answer = TokenizedMessage(message, token_ids)
        parts += [(context, False), (answer.token_ids, index >= conversation.num_context)]
        num_tokens += len(context) + len(token_ids)
        waiting = []
    joined = np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in parts])
    mask = np.repeat([trained for _, trained in parts], [len(ids) for ids, _ in parts])
    return SupervisedSample(joined, mask, tuple(images))


def encode_conversations(
    encoder: ChatEncoder,
    loaded: ConversationSet,
    *,
    max_tokens: int,
    overlong: Overlong | Literal["truncate"],
    add_bos: bool = False,
    add_eos: bool | None = None,
    train_on_opening: bool = False,
) -> SupervisedDataset:
    """Encode a whole set; a conversation of more than `max_tokens` tokens is masked, dropped, truncated or refused.

    It is counted, except for the last, which raises ConfigError.

    `add_bos` and `add_eos` write the tokenizer's first and last token if the template does not; by default its last
    token ends each answer that the template ends by text alone, with `add_eos` false none. With `train_on_opening` the
    tokens that open an answer are trained on too.

    Raises DataError when none is left, and as `encode_conversation` does.
    """
    encode_prompt = make_prompt_encoder(encoder)
    samples, num_overlong, num_dropped, reported_at = [], 0, 0, time.monotonic()
    for number, conversation in enumerate(loaded.examples):
        if time.monotonic() - reported_at > REPORT_PERIOD_S:
            reported_at = time.monotonic()
            logger.info("%s: encoded %d of %d conversations", loaded.name, number, len(loaded.examples))
        sample = encode_conversation(encoder, conversation, encode_prompt, adds_end_tokens=add_eos is None)
        if train_on_opening:
            sample = sample.with_openings(encoder.num_opening_tokens)
        if add_bos or add_eos:
            first, last = encoder.edge_token_ids
            sample = sample.with_edges(first if add_bos else None, last if add_eos else None)
        if len(sample.token_ids) > max_tokens:
            num_overlong += 1
            if overlong == "refuse":
                problem = f"conversation {number} of {loaded.name!r} has {len(sample.token_ids)} tokens"
                raise ConfigError("data.max_input_seq_length", max_tokens, problem)
            sample = sample.masked() if overlong == "mask" else sample.truncate(max_tokens)
            if overlong == "drop" or not (overlong == "mask" or sample.token_mask.any()):  # cut before the first answer
                num_dropped += 1
                continue
        samples.append(sample)
    if num_overlong:
        logger.warning(
            "%s: %d of %d conversations have more than %d tokens: dropped %d, %s %d",
            loaded.name, num_overlong, len(loaded.examples), max_tokens, num_dropped,
            "masked" if overlong == "mask" else "truncated", num_overlong - num_dropped,
        )  # fmt: skip
    if all(sample.is_masked for sample in samples):
        raise DataError(f"{loaded.name}: no conversation has at most {max_tokens} tokens")
    return SupervisedDataset(loaded.name, samples, num_overlong, num_dropped)
