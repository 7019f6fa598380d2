"""The nemo_gym dataset: NeMo Gym's rows as prompts, with the agent that runs them and what its model is asked first.

A row is passed to its agent unchanged except for parameters that the gateway would refuse. The messages and tools made
of it here are for tables and for the check of lengths. Images are data URLs, which the agents send to the gateway.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.data.images import ImageReader
from nemo_rl.data.messages import check_image_count
from nemo_rl.data.row_sources import check_data_file, require_data_path
from nemo_rl.data.rows import Row, RowFile
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import ContentPart, Message, Prompt, Role, TextPart, ToolCall

if TYPE_CHECKING:
    from nemo_rl.data.prompts import LazyPrompts

logger = logging.getLogger(__name__)

NEMO_GYM = "nemo_gym"  # the dataset's name, and its default entry of `env`
TASK_ID = "_ng_task_id"  # taskset and id of a materialized row's task

ROLES: Mapping[str, Role] = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = ("input_text", "output_text", "text")
SUPPORTED_TOOL_CHOICES = (None, "auto", "none")  # a forced call is not sampled by the policy


def open_nemo_gym_prompts(section: DatasetConfig, dataset: str, *, key: str) -> "LazyPrompts":
    """Return the prompts of `section.data_path`, one per row; the file's rows are not kept in memory.

    `dataset` is the name of the prompts' dataset; empty: each prompt's is that of its agent. Raises DataError naming
    file:line for the first row that no agent could run; `key` is the section's configuration key.
    """
    from nemo_rl.data.prompts import LazyPrompts  # numpy, which a configuration does not need

    file = RowFile(Path(require_data_path(section, f"{key}.data_path")), limit=section.size)
    if not len(file):
        raise DataError(f"{key}: {file.path} has no rows")
    images = None if section.images is None else ImageReader(section.images)
    return LazyPrompts(
        file, NemoGymPromptMaker(section.env_name or NEMO_GYM, section.agent_name or "", dataset, images)
    )


@dataclass(frozen=True, slots=True)
class NemoGymPromptMaker:
    """A callable that makes the prompt of a row; it logs dropped parameters once."""

    task_name: str
    default_agent: str  # agent of rows without agent_ref; empty: they are refused
    dataset: str  # empty: the row's agent
    images: ImageReader | None = None  # None: images are refused
    logged: set[str] = field(default_factory=set)

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        """Return the row's prompt; raises DataError saying what is wrong with the row."""
        row = open_task(row)
        parameters = row.get("responses_create_params")
        if not isinstance(parameters, dict):
            raise DataError(f"responses_create_params is {_format_value(parameters)}, not an object")
        agent_name = self._find_agent(row)
        sent = {**row, "responses_create_params": self._drop_unsupported(parameters)}
        sent.setdefault("agent_ref", {"type": "responses_api_agents", "name": agent_name})
        return Prompt(
            "",
            self.task_name,
            tuple(_convert_input(parameters.get("input"), self.images)),
            {"row": sent},
            tuple(_convert_tools(parameters.get("tools"))),
            dataset=self.dataset or agent_name,
            agent_name=agent_name,
        )

    def _find_agent(self, row: Mapping[str, Any]) -> str:
        reference = row.get("agent_ref")
        if reference is None and self.default_agent:
            return self.default_agent
        if reference is None and TASK_ID in row:
            return row[TASK_ID]["taskset"]  # the stack has a route for it
        name = reference.get("name") if isinstance(reference, dict) else None
        if not isinstance(name, str) or not name:
            hint = "" if reference is not None else " (agent_name of the dataset names one for such rows)"
            raise DataError(f"agent_ref is {_format_value(reference)}, not an object with the name of an agent{hint}")
        return name

    def _drop_unsupported(self, parameters: dict[str, Any]) -> dict[str, Any]:
        dropped = set(_unsupported_parameters(parameters))
        if newly_dropped := dropped - self.logged:
            self.logged.update(newly_dropped)
            logger.info(
                "%s: dropped %s of responses_create_params: the policy decides what it samples",
                self.dataset or NEMO_GYM,
                ", ".join(sorted(newly_dropped)),
            )
        return {name: value for name, value in parameters.items() if name not in dropped} if dropped else parameters


def open_task(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of Gym's materialized form (nemo-gym 0.7) with its input's fields at the top level; else the row.

    Raises DataError for an invalid `task_id` or `task_input`.

    Example: {"task_id": {"taskset": "t", "task_id": "7"}, "task_input": {"answer": "B"}} becomes
    {"answer": "B", "_ng_task_id": {"taskset": "t", "task_id": "7"}}.
    """
    task_id = row.get("task_id")
    if not isinstance(task_id, dict):
        return row
    names = (task_id.get("taskset"), task_id.get("task_id"))
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(f"task_id is {_format_value(task_id)}, not an object with the texts taskset and task_id")
    task_input = row.get("task_input")
    if not isinstance(task_input, dict):
        raise DataError(f"task_input is {_format_value(task_input)}, not an object")
    if not isinstance(task_input.get("task_data", {}), dict):
        raise DataError(f"task_input.task_data is {_format_value(task_input['task_data'])}, not an object")
    routing = {name: value for name, value in row.items() if name not in ("task_id", "task_input")}
    return {**task_input, **routing, TASK_ID: task_id}


def _unsupported_parameters(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield parameters that the gateway answers with 400, or that Gym's agents do not accept."""
    if parameters.get("tool_choice") not in SUPPORTED_TOOL_CHOICES:
        yield "tool_choice"
    yield from (name for name in ("top_logprobs", "stream", "background") if parameters.get(name))


def _convert_input(value: Any, images: ImageReader | None) -> Iterator[Message]:
    """Yield the messages of an `input` as Gym's model servers send them: a turn of the model is one message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"responses_create_params.input is {_format_value(value)}, not text or a list of items")
    if images is not None:
        contents = (item.get("content") for item in value if isinstance(item, dict))
        check_image_count(contents, images.limits.max_count)
    said, calls = "", []
    for index, item in enumerate(value):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        where = f"responses_create_params.input[{index}]"
        if kind == "reasoning":
            said += "".join(
                f"<think>{_part_text(part, f'{where}.summary[{i}]')}</think>"
                for i, part in enumerate(item.get("summary") or ())
            )
        elif kind == "function_call":
            calls.append(ToolCall(item.get("call_id") or "", item["name"], item["arguments"]))
        elif kind == "message" and item.get("role") == "assistant":
            said += "".join(_read_texts(item.get("content"), f"{where}.content"))
        else:
            if said or calls:
                yield Message("assistant", said, tuple(calls))
                said, calls = "", []
            yield _convert_message(kind, item, where, images)
    if said or calls:
        yield Message("assistant", said, tuple(calls))


def _convert_message(kind: str | None, item: Any, where: str, images: ImageReader | None) -> Message:
    """Return the message of an item that the model did not write."""
    if kind == "function_call_output":
        output = item["output"]
        is_parts = isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output)
        content = "\n".join(_read_texts(output, f"{where}.output")) if is_parts else str(output)
        return Message("tool", content, tool_call_id=item.get("call_id"))
    if kind != "message":
        raise DataError(f"{where} is {_format_value(item)}, not a message or a call with its output")
    role = item.get("role")
    if role not in ROLES:
        raise DataError(f"{where}.role is {role!r}; known: {', '.join(ROLES)}")
    return Message(
        ROLES[role], _read_parts(item.get("content"), f"{where}.content", images if role == "user" else None)
    )


def _read_parts(content: Any, where: str, images: ImageReader | None) -> str | tuple[ContentPart, ...]:
    """Return a content as one text, or with images its parts; texts are lines."""
    if images is None or not isinstance(content, list):
        return "\n".join(_read_texts(content, where))
    parts = [
        images.read_data_url(part.get("image_url"), f"{where}[{i}].image_url")
        if isinstance(part, dict) and part.get("type") == "input_image"
        else TextPart(_part_text(part, f"{where}[{i}]", reads="text and images"))
        for i, part in enumerate(content)
    ]
    return tuple(parts)


def _read_texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise DataError(f"{where} is {_format_value(content)}, not text or a list of parts")
    return [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _part_text(part: Any, where: str, *, reads: str = "text") -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (*TEXT_PARTS, "summary_text") or not isinstance(part.get("text"), str):
        raise DataError(f"{where} is a part of type {kind!r}: this policy reads {reads}")
    return part["text"]


def _convert_tools(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield tool schemas in the shape of chat completions; like Gym, without the strict flag."""
    if value is None:
        return
    if not isinstance(value, list):
        raise DataError(f"responses_create_params.tools is {_format_value(value)}, not a list")
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise DataError(
                f"responses_create_params.tools[{index}] is {_format_value(tool)}, not a function with a name"
            )
        yield {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _format_value(value: Any) -> str:
    """Return a value as an error shows it: short, None as missing."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_rows(section: DatasetConfig, seed: int) -> Iterable[Row]:
    """Raise ConfigError: the prompts of NeMo Gym's rows are made here, not by a processor."""
    raise ConfigError("dataset_name", NEMO_GYM, "its rows are tasks of agents: they have prompts, no conversations")


NEMO_GYM_DATASET = DatasetEntry(
    DatasetConfig, make=_refuse_rows, check=check_data_file, env_name=NEMO_GYM, open_prompts=open_nemo_gym_prompts
)
