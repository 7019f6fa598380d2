"""Preference pairs for DPO and for reward models: a prompt with a chosen and a rejected answer, and their tokens."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nemo_rl.config.data import DatasetConfig, Overlong
from nemo_rl.config.supervised_runs import PreferenceDataConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.conversations import Conversation, encode_conversation, make_prompt_encoder
from nemo_rl.data.example_sets import ExampleSet, load_examples
from nemo_rl.data.images import ImageReader
from nemo_rl.data.messages import check_image_count, parse_content
from nemo_rl.data.processors import PLACEHOLDER, RowFormat, make_row_format
from nemo_rl.data.row_sources import load_rows
from nemo_rl.data.rows import Row, convert_rows
from nemo_rl.data.supervised_samples import PairSample, SupervisedDataset
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import ImagePart, Message, TextPart, ThinkingPart

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt."""

    messages: tuple[Message, ...]  # the prompt
    chosen: str
    rejected: str

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """Return the messages before the answers."""
        return self.messages

    @property
    def conversations(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return the conversation with the chosen answer and the one with the rejected answer."""
        better, worse = (Message("assistant", answer) for answer in (self.chosen, self.rejected))
        return (*self.messages, better), (*self.messages, worse)


PreferenceSet: TypeAlias = ExampleSet[Preference]


def load_preferences(config: PreferenceDataConfig, run_seed: int) -> tuple[PreferenceSet, tuple[PreferenceSet, ...]]:
    """Return the training blend of pairs and the validation sets, as example_sets.load_examples does."""
    return load_examples(config, run_seed, _load_dataset)


def read_preferences(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Preference]:
    """Return the pairs of rows in one of these shapes; a tie is dropped and counted in the log.

    - `prompt` (or `input_key`) a text or messages, or `messages`; `chosen` and `rejected` texts;
    - `chosen` and `rejected` whole conversations, of which the last messages are the answers;
    - `context` a text or messages, and two `completions`, each a message with its `rank`, of which the lower is better;
    - `context`, `response1`, `response2`, and `overall_preference`, which is below 0 if the first is better.

    Raises DataError naming the dataset and the row that cannot be read.
    """
    row_format = make_row_format(section, key=key)
    found = convert_rows(rows, lambda row: _read(row, section, row_format), f"{key} ({section.dataset_name})")
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < len(found):
        logger.warning("%s: dropped %d of %d pairs without a preference", key, len(found) - len(pairs), len(found))
    return pairs


def encode_preferences(
    encoder: ChatEncoder, loaded: PreferenceSet, *, max_tokens: int, overlong: Overlong = "drop"
) -> SupervisedDataset:
    """Encode a whole set; a pair with a side of more than `max_tokens` tokens is masked, dropped or refused.

    It is counted, except for the last, which raises ConfigError. Only the answers are trained on, not the assistant's
    messages in the prompt.

    Raises DataError when no pair is left, and ConfigError as `encode_conversation` does.
    """
    encode_prompt = make_prompt_encoder(encoder)
    samples, num_overlong = [], 0
    for number, preference in enumerate(loaded.examples):
        sides = (encode_conversation(encoder, Conversation(each), encode_prompt) for each in preference.conversations)
        pair = PairSample(*(side.with_last_answer() for side in sides))
        longest = max(len(side.token_ids) for side in pair.rows)
        if longest > max_tokens:
            num_overlong += 1
            if overlong == "refuse":
                problem = f"pair {number} of {loaded.name!r} has {longest} tokens on a side"
                raise ConfigError("data.max_input_seq_length", max_tokens, problem)
            if overlong == "drop":
                continue
            pair = pair.masked()
        samples.append(pair)
    if num_overlong:
        logger.warning(
            "%s: %s %d of %d pairs with more than %d tokens on a side",
            loaded.name, "dropped" if overlong == "drop" else "masked", num_overlong, len(loaded.examples), max_tokens,
        )  # fmt: skip
    if num_overlong == len(loaded.examples):
        raise DataError(f"{loaded.name}: no pair has at most {max_tokens} tokens on either side")
    return SupervisedDataset(loaded.name, samples, num_overlong, num_overlong if overlong == "drop" else 0)


def _load_dataset(section: DatasetConfig, seed: int, key: str) -> list[Preference]:
    rows = load_rows(section, seed=seed, key=key, are_pairs=True)
    pairs = read_preferences(rows, section, key=key)
    if not pairs:
        raise DataError(f"{key}: no pairs (of {len(rows)} rows that were read)")
    return pairs


def _read(row: Row, section: DatasetConfig, row_format: RowFormat) -> Preference | None:
    if "completions" in row:
        return _read_ranks(row, row_format)
    if "overall_preference" in row:
        return _read_helpsteer(row, row_format)
    chosen, rejected = row[section.chosen_key or "chosen"], row[section.rejected_key or "rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list):
        better, worse = (_messages(side, row_format.images) for side in (chosen, rejected))
        if worse[:-1] != better[:-1]:
            raise DataError("chosen and rejected must be the same conversation up to their last messages")
        return Preference(_complete(better[:-1], row_format), _answer(better[-1:]), _answer(worse[-1:]))
    prompt = row[section.input_key or ("messages" if "messages" in row else "prompt")]
    texts = (_text(chosen, section.chosen_key or "chosen"), _text(rejected, section.rejected_key or "rejected"))
    return Preference(_prompt(prompt, row_format), *texts)


def _read_ranks(row: Row, row_format: RowFormat) -> Preference | None:
    completions = row["completions"]
    if not isinstance(completions, list) or len(completions) != 2:
        raise DataError("completions must be a list of two")
    better, worse = sorted(completions, key=lambda completion: completion["rank"])
    if better["rank"] == worse["rank"]:
        return None
    answers = (_answer(_messages(completion["completion"])) for completion in (better, worse))
    return Preference(_prompt(row["context"], row_format), *answers)


def _read_helpsteer(row: Row, row_format: RowFormat) -> Preference | None:
    first, second = _text(row["response1"], "response1"), _text(row["response2"], "response2")
    preference = row["overall_preference"]
    if preference == 0:
        return None
    prompt = _prompt(row["context"], row_format)
    return Preference(prompt, first, second) if preference < 0 else Preference(prompt, second, first)


def _prompt(prompt: Any, row_format: RowFormat) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return tuple(row_format.messages(prompt))
    return _complete(_messages(prompt, row_format.images), row_format)


def _complete(messages: tuple[Message, ...], row_format: RowFormat) -> tuple[Message, ...]:
    """Return a prompt of messages with the dataset's system prompt if it lacks one; raises DataError."""
    if not messages or messages[-1].role == "assistant":
        raise DataError("the prompt must end with a message that is not the assistant's")
    if row_format.prompt_text != PLACEHOLDER:
        raise DataError("prompt_file is for rows with a text as the prompt, and this one has messages")
    if row_format.system_prompt is not None and messages[0].role != "system":
        return (Message("system", row_format.system_prompt), *messages)
    return messages


def _answer(messages: Sequence[Message]) -> str:
    if len(messages) != 1 or messages[0].role != "assistant":
        raise DataError("an answer must be one message of the assistant")
    return messages[0].content


def _messages(messages: Any, images: ImageReader | None = None) -> tuple[Message, ...]:
    if not (isinstance(messages, list) and messages and all(isinstance(message, Mapping) for message in messages)):
        raise DataError("messages must be a list of objects with role and content")
    for message in messages:
        if message.get("role") not in ROLES:
            raise DataError(f"a message's role is {message.get('role')!r}; known: {', '.join(ROLES)}")
    if images is not None:
        check_image_count((message.get("content") for message in messages), images.limits.max_count)
    return tuple(_message(each, f"messages[{i}].content", images) for i, each in enumerate(messages))


def _message(message: Mapping[str, Any], where: str, images: ImageReader | None) -> Message:
    """Return a message of a text, or with `images` of texts and images; raises DataError for other parts."""
    role, value = message["role"], message.get("content")
    if not isinstance(value, list):
        return Message(role, _text(value, "content"))
    parts = parse_content(value, where, images=images)
    if any(isinstance(part, ThinkingPart) for part in parts):
        raise DataError(f"{where} has a part of type 'thinking', which pairs cannot hold")
    if any(isinstance(part, ImagePart) for part in parts):
        if role not in ("user", "tool"):
            raise DataError(f"{where}: an image in a message of role {role}; allowed: user and tool")
        return Message(role, parts)
    return Message(role, "".join(part.text for part in parts if isinstance(part, TextPart)))


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{key} must be a text, not {value!r}")
    return value
