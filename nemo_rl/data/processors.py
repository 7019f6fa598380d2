"""Processors: functions from a row to a prompt, by the field that asks, the field that answers, and the text around.

`processor` names one, built in or by dotted path; without it the row's shape decides.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from nemo_rl.config.data import DatasetConfig, find_dataset
from nemo_rl.config.kinds import Entry, foreign_names
from nemo_rl.config.registries import PROCESSORS
from nemo_rl.data.images import ImageReader
from nemo_rl.data.messages import check_text, parse_messages, parse_tools
from nemo_rl.data.reasoning_gym_rows import check_entry
from nemo_rl.data.rows import Row, convert_rows
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.recipes import find_prompt
from nemo_rl.types import Message, Prompt, TextPart

PLACEHOLDER = "{}"
__getattr__ = foreign_names(__name__)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The reading of one dataset's rows."""

    task_name: str  # the environment that scores the prompts
    input_key: str = "input"
    output_key: str = "output"
    prompt_text: str = PLACEHOLDER  # the question replaces its {}
    system_prompt: str | None = None
    images: ImageReader | None = None  # None: images are refused

    def messages(self, question: str) -> tuple[Message, ...]:
        """Return the messages that ask a question: the system prompt, if any, and the user's."""
        user_message = Message("user", self.prompt_text.replace(PLACEHOLDER, question))
        return (user_message,) if self.system_prompt is None else (Message("system", self.system_prompt), user_message)


Processor: TypeAlias = Callable[[Row, RowFormat], Prompt]  # the prompt's id may be empty: it is assigned later


def make_prompts(rows: Sequence[Row], section: DatasetConfig, *, key: str) -> list[Prompt]:
    """Return one prompt per row; raises DataError naming the dataset and the row for a row that cannot be read."""
    return convert_rows(rows, make_prompt_maker(section, key=key), f"{key} ({section.dataset_name})")


def make_prompt_maker(section: DatasetConfig, *, key: str) -> Callable[[Row], Prompt]:
    """Return the function that makes the prompt of a row.

    It raises DataError, KeyError, TypeError or ValueError for a row that cannot be read.
    """
    row_format = make_row_format(section, key=key)
    name = section.processor
    processor = None if name is None else PROCESSORS.entry(name, key=f"{key}.processor").make
    return lambda row: (processor or _infer_processor(row, section))(row, row_format)


def make_row_format(section: DatasetConfig, *, key: str) -> RowFormat:
    """Return the format of a dataset's rows, its prompt files read; raises ConfigError for one that is unusable."""
    prompt_text = _read_text(section.prompt_file, f"{key}.prompt_file") or PLACEHOLDER
    entry = find_dataset(section.dataset_name or "", key=f"{key}.dataset_name")
    if PLACEHOLDER not in prompt_text and entry.has_choices:
        prompt_text = f"{prompt_text}\n\n{PLACEHOLDER}"
    if PLACEHOLDER not in prompt_text:
        raise ConfigError(f"{key}.prompt_file", section.prompt_file, "has no {} for the question")
    return RowFormat(
        task_name=section.env_name or entry.env_name,
        input_key=section.input_key or "input",
        output_key=section.output_key or "output",
        prompt_text=prompt_text,
        system_prompt=_read_text(section.system_prompt_file, f"{key}.system_prompt_file"),
        images=None if section.images is None else ImageReader(section.images),
    )


def adapt_processor(key: str, path: str, target: Any) -> Entry[DatasetConfig]:
    """Return an entry for a function `(row, row_format) -> Prompt`; raises ConfigError for anything else."""
    if not callable(target):
        raise ConfigError(key, path, f"must be a function (row, row_format) -> Prompt, not {type(target).__name__}")
    return Entry(DatasetConfig, make=target)


def read_question_answer(row: Row, row_format: RowFormat) -> Prompt:
    """Return the prompt of a row with a question in one field and its answer in another."""
    question, answer = _field(row, row_format.input_key, "input_key"), _field(row, row_format.output_key, "output_key")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{row_format.input_key!r} is {question!r:.80}; allowed: a text")
    check_text(question, row_format.input_key)
    check_answer(answer, row_format.output_key)
    return Prompt("", row_format.task_name, row_format.messages(question), {"answer": str(answer)})


def _field(row: Row, name: str, key: str) -> Any:
    if name not in row:
        raise DataError(f"has no field {name!r}; {key} may name one of {', '.join(row)}")
    return row[name]


def check_answer(answer: object, where: str) -> None:
    """Raise DataError for what no response can equal: anything but a text that is not blank, or a finite number."""
    is_usable = isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer))
    if not is_usable and not (isinstance(answer, str) and answer.strip()):
        raise DataError(f"{where!r} is {answer!r:.80}; allowed: a text or a finite number")


def read_final_answer(row: Row, row_format: RowFormat) -> Prompt:
    """Return the prompt of a row whose worked solution ends with "####" and the answer, as in GSM8K."""
    prompt = read_question_answer(row, row_format)
    answer = prompt.env_state["answer"].rpartition("####")[2].strip().replace(",", "")
    check_answer(answer, f"{row_format.output_key} after ####")
    return Prompt("", prompt.task_name, prompt.messages, {"answer": answer})


def read_messages(row: Row, row_format: RowFormat) -> Prompt:
    """Return the prompt of a row with OpenAI messages.

    A last assistant message is the answer; the row's other fields go to the environment.
    """
    messages = parse_messages(row, images=row_format.images)
    state = {name: value for name, value in row.items() if name not in ("messages", "tools")}
    if messages and messages[-1].role == "assistant":
        state.setdefault("answer", messages[-1].content)
        messages = messages[:-1]
    if not messages:
        raise DataError("the conversation has nothing to answer")
    if row_format.system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", row_format.system_prompt), *messages)
    last = messages[-1]
    if last.role == "user" and row_format.prompt_text != PLACEHOLDER:
        question = row_format.prompt_text.replace(PLACEHOLDER, last.content)
        messages = (*messages[:-1], Message("user", (*last.images, TextPart(question))))
    return Prompt("", row_format.task_name, messages, state, parse_tools(row))


def read_prompt_column(row: Row, row_format: RowFormat, column: str) -> Prompt:
    """Return the prompt of a row with a question in `column`, a text or a list of messages; TRL's and verl's form.

    The other fields go to the environment. `answer` is the field `output_key`, else a field of that name, else verl's
    reward_model.ground_truth.
    """
    content, others = row[column], {name: value for name, value in row.items() if name != column}
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    verl = row.get("reward_model")
    truth = verl.get("ground_truth") if isinstance(verl, Mapping) else None
    answers = (others.get(row_format.output_key), others.get("answer"), truth)
    answer = next(({"answer": _to_text(each)} for each in answers if each is not None), {})
    return read_messages({**others, **answer, "messages": messages}, row_format)


def _to_text(answer: object) -> object:
    """Return a number as text; anything else is unchanged, for `check_answer` to judge."""
    is_number = isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer))
    return str(answer) if is_number else answer


def read_reasoning_gym_entry(row: Row, row_format: RowFormat) -> Prompt:
    """Return the prompt of a reasoning_gym entry; the environment gets all of it, since the task scores with it."""
    check_entry(row["task"], row["entry"])
    return Prompt("", row_format.task_name, row_format.messages(row["entry"]["question"]), dict(row))


def _infer_processor(row: Row, section: DatasetConfig) -> Processor:
    if "entry" in row and "task" in row:
        return read_reasoning_gym_entry
    if section.input_key is None and "messages" in row:
        return read_messages
    column = section.input_key or "prompt"
    is_prompt = section.input_key is None and "input" not in row and isinstance(row.get(column), str)
    if is_prompt or isinstance(row.get(column), list | tuple):
        return partial(read_prompt_column, column=column)
    return read_question_answer


def _read_text(file: str | None, key: str) -> str | None:
    if file is None:
        return None
    try:
        return find_prompt(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, file, f"cannot be read: {error}") from error
