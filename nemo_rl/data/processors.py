"""Rows to prompts: which field asks, which one answers, and the text around them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.registry import find_registered
from nemo_rl.data.sources import Row
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, Prompt, Role, ToolCall

PLACEHOLDER = "{}"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one data set are read."""

    task_name: str  # the environment that scores the prompts
    input_key: str = "input"
    output_key: str = "output"
    prompt_text: str = PLACEHOLDER  # the question goes where its {} is
    system_prompt: str | None = None

    def messages(self, question: str) -> tuple[Message, ...]:
        asked = Message("user", self.prompt_text.replace(PLACEHOLDER, question))
        return (asked,) if self.system_prompt is None else (Message("system", self.system_prompt), asked)


Processor: TypeAlias = Callable[[Row, RowFormat], Prompt]  # the prompt's id may be empty: it is given later
ProcessorT = TypeVar("ProcessorT", bound=Processor)

PROCESSORS: dict[str, Processor] = {}


def register_processor(name: str) -> Callable[[ProcessorT], ProcessorT]:
    """Make a function `(row, row_format) -> Prompt` known to recipes as `processor: <name>`."""

    def add(processor: ProcessorT) -> ProcessorT:
        PROCESSORS[name] = processor
        return processor

    return add


def make_prompt_maker(section: DatasetConfig, *, key: str) -> Callable[[Row], Prompt]:
    """Makes the prompt of a row; raises DataError, KeyError, TypeError or ValueError for one that cannot be read."""
    row_format = make_row_format(section, key)
    named = (
        None if section.processor is None else find_registered(section.processor, PROCESSORS, key=f"{key}.processor")
    )
    return lambda row: (named or _infer_processor(row, section))(row, row_format)


def make_prompts(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Prompt]:
    """One prompt a row. Raises DataError naming the data set and the row for a row that cannot be read."""
    make_prompt = make_prompt_maker(section, key=key)
    prompts = []
    for index, row in enumerate(rows):
        try:
            prompts.append(make_prompt(row))
        except (DataError, KeyError, TypeError, ValueError) as error:
            problem = f"has no field {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{key} ({section.dataset_name}): row {index}: {problem}") from error
    return prompts


@register_processor("question_answer")
def question_answer(row: Row, row_format: RowFormat) -> Prompt:
    """A question in one field and its answer in another."""
    question, answer = row[row_format.input_key], row[row_format.output_key]
    if not isinstance(question, str):
        raise DataError(f"{row_format.input_key!r} is {type(question).__name__}, not text")
    return Prompt("", row_format.task_name, row_format.messages(question), {"answer": str(answer)})


@register_processor("final_answer")
def final_answer(row: Row, row_format: RowFormat) -> Prompt:
    """A worked solution whose answer follows "####", as in GSM8K."""
    prompt = question_answer(row, row_format)
    answer = prompt.env_state["answer"].rpartition("####")[2].strip().replace(",", "")
    return Prompt("", prompt.task_name, prompt.messages, {"answer": answer})


@register_processor("messages")
def conversation(row: Row, row_format: RowFormat) -> Prompt:
    """OpenAI messages. A last assistant message is the answer; the row's other fields go to the environment."""
    messages = tuple(parse_message(item) for item in row["messages"])
    state = {name: value for name, value in row.items() if name not in ("messages", "tools")}
    if messages and messages[-1].role == "assistant":
        state.setdefault("answer", messages[-1].content)
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation has nothing to answer")
    if row_format.system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", row_format.system_prompt), *messages)
    last = messages[-1]
    if last.role == "user":
        asked = row_format.prompt_text.replace(PLACEHOLDER, last.content)
        messages = (*messages[:-1], Message("user", asked))
    return Prompt("", row_format.task_name, messages, state, tuple(row.get("tools") or ()))


@register_processor("reasoning_gym")
def reasoning_gym_entry(row: Row, row_format: RowFormat) -> Prompt:
    """A reasoning_gym entry; the environment gets all of it, since the task scores with it."""
    return Prompt("", row_format.task_name, row_format.messages(row["entry"]["question"]), dict(row))


def make_row_format(section: DatasetConfig, key: str) -> RowFormat:
    prompt_text = _text(section.prompt_file, f"{key}.prompt_file") or PLACEHOLDER
    if PLACEHOLDER not in prompt_text:
        raise ConfigError(f"{key}.prompt_file", section.prompt_file, "has no {} where the question goes")
    return RowFormat(
        task_name=section.env_name or ("reasoning_gym" if section.dataset_name == "reasoning_gym" else "math"),
        input_key=section.input_key or "input",
        output_key=section.output_key or "output",
        prompt_text=prompt_text,
        system_prompt=_text(section.system_prompt_file, f"{key}.system_prompt_file"),
    )


def _text(file: str | None, key: str) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, file, f"cannot be read: {error}") from error


def _infer_processor(row: Row, section: DatasetConfig) -> Processor:
    if "entry" in row and "task" in row:
        return reasoning_gym_entry
    has_messages = section.input_key is None and "messages" in row
    return conversation if has_messages else question_answer


def parse_message(item: Any) -> Message:
    if not isinstance(item, Mapping) or item.get("role") not in get_args(Role):
        raise DataError(f"{item!r} is no message with a role of {', '.join(get_args(Role))}")
    content = item.get("content")
    if isinstance(content, list):  # OpenAI's parts
        content = "".join(part["text"] for part in content)
    calls = tuple(_tool_call(call) for call in item.get("tool_calls") or ())
    return Message(item["role"], content or "", calls, item.get("tool_call_id"))


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    arguments = call["function"].get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(call.get("id") or "", call["function"]["name"], text)
