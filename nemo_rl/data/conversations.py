"""Conversations whose assistant turns are to be learnt: what supervised training takes in place of prompts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.sft import SFTDataConfig
from nemo_rl.data.datasets import SEED_STRIDE, make_unique_name
from nemo_rl.data.processors import PLACEHOLDER, RowFormat, make_row_format, parse_message
from nemo_rl.data.sources import PRESETS, Row, apply_preset, load_rows, merge_sections
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message

logger = logging.getLogger(__name__)

QUESTION_ANSWER_FIELDS = (
    ("input", "output"),
    ("prompt", "response"),
    ("prompt", "completion"),
)  # fields of a question and its answer

# What is learnt of data sets that are known by name, where it is not what a rollout is scored by.
SFT_PRESETS: dict[str, DatasetConfig] = {
    "OpenMathInstruct-2": DatasetConfig(output_key="generated_solution"),
    "tulu3_sft_mixture": DatasetConfig(
        dataset_name="huggingface", data_path="allenai/tulu-3-sft-mixture", split="train", name="tulu3_sft_mixture"
    ),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's, each of whose turns is learnt."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas that the chat template renders

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """All before the last turn."""
        return self.messages[:-1]


@dataclass(frozen=True, slots=True)
class ConversationSet:
    """Conversations that are drawn from, or measured, together."""

    name: str  # in metrics
    conversations: Sequence[Conversation]


def load_conversations(config: SFTDataConfig, run_seed: int) -> tuple[ConversationSet, tuple[ConversationSet, ...]]:
    """The training blend, named "train", and the validation sets; seeds as in datasets.load_datasets.

    With `config.disjoint`, training rows that ask what a validation row asks are left out.
    """
    train: list[ConversationSet] = []
    held_out: list[ConversationSet] = []
    for index, (key, overrides) in enumerate(config.sets):
        loaded = train if key.startswith("data.train") else held_out
        seed, taken = run_seed + SEED_STRIDE * index, {each.name for each in loaded}
        loaded.append(_load(overrides, config.default, key=key, seed=seed, taken=taken))
    blend = [conversation for each in train for conversation in each.conversations]
    if config.disjoint:
        blend = _remove_held_out(blend, held_out)
    return ConversationSet("train", blend), tuple(held_out)


def read_conversations(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Conversation]:
    """One conversation a row. Raises DataError naming the data set and the row for a row that cannot be read."""
    row_format = make_row_format(section, key)
    conversations = []
    for index, row in enumerate(rows):
        try:
            conversations.append(_conversation(row, row_format, section))
        except (DataError, KeyError, TypeError, ValueError) as error:
            problem = f"has no field {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{key} ({section.dataset_name}): row {index}: {problem}") from error
    return conversations


def _load(overrides: DatasetConfig, default: DatasetConfig, *, key: str, seed: int, taken: set[str]) -> ConversationSet:
    section = merge_sections(DatasetConfig(dataset_name=default.dataset_name), overrides)
    section = merge_sections(SFT_PRESETS.get(section.dataset_name or "", DatasetConfig()), section)
    if section.dataset_name in SFT_PRESETS and section.dataset_name not in PRESETS:
        section = section.model_copy(update={"dataset_name": "huggingface"})
    section = merge_sections(default, apply_preset(section))
    name = make_unique_name(section.name or str(section.dataset_name), taken)
    rows = load_rows(section, seed=seed if section.seed is None else section.seed, key=key)
    conversations = read_conversations(rows, section, key=key)
    logger.info("%s: %d conversations of %s", key, len(conversations), name)
    return ConversationSet(name, conversations * (section.repeat or 1))


def _conversation(row: Row, row_format: RowFormat, section: DatasetConfig) -> Conversation:
    if "entry" in row and "task" in row:  # of reasoning_gym
        return _from_pair(row["entry"]["question"], row["entry"]["answer"], row_format)
    if section.input_key is None and "messages" in row:
        return _from_messages(row, row_format)
    question, answer = _question_answer_fields(row, section)
    return _from_pair(row[question], row[answer], row_format)


def _question_answer_fields(row: Row, section: DatasetConfig) -> tuple[str, str]:
    """The fields with the question and with the answer; where the recipe names none, a pair that the row has."""
    known = next(
        (pair for pair in QUESTION_ANSWER_FIELDS if pair[0] in row and pair[1] in row), QUESTION_ANSWER_FIELDS[0]
    )
    return section.input_key or known[0], section.output_key or known[1]


def _from_pair(question: Any, answer: Any, row_format: RowFormat) -> Conversation:
    for text in (question, answer):
        if not isinstance(text, str):
            raise DataError(f"{text!r} is {type(text).__name__}, not text")
    return Conversation((*row_format.messages(question), Message("assistant", answer)))


def _from_messages(row: Row, row_format: RowFormat) -> Conversation:
    """OpenAI messages; what follows the last assistant message answers nothing and is left out."""
    messages = tuple(parse_message(item) for item in row["messages"])
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation has no message of the assistant, so there is nothing to learn")
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


def _remove_held_out(train: list[Conversation], held_out: Sequence[ConversationSet]) -> list[Conversation]:
    prompt_messages = {conversation.prompt_messages for each in held_out for conversation in each.conversations}
    kept = [conversation for conversation in train if conversation.prompt_messages not in prompt_messages]
    if not kept:
        raise ConfigError("data.disjoint", True, "every training conversation asks what a validation set asks")
    if len(kept) < len(train):
        logger.info(
            "%d of %d training conversations are left out: they are validated on", len(train) - len(kept), len(train)
        )
    return kept
