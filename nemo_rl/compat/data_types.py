"""NeMo-RL's types of data, for environments and processors written for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict, Union

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LLMMessageLogType = list[dict[str, Union[str, "torch.Tensor"]]]  # messages with role, content and token_ids
FlatMessagesType = dict[str, Union[list[str], "torch.Tensor"]]
PathLike = str | Path


class DatumSpec(TypedDict):
    message_log: LLMMessageLogType
    length: int  # tokens
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float  # 0: not trained on
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str]]


class PreferenceDatumSpec(TypedDict):
    """A pair of answers, one preferred to the other."""

    message_log_chosen: LLMMessageLogType
    message_log_rejected: LLMMessageLogType
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int


@dataclass
class TaskDataSpec:
    """The prompts of a task, read from files; raises FileNotFoundError for one that does not exist."""

    task_name: str | None = None
    prompt_file: PathLike | None = None
    system_prompt_file: PathLike | None = None

    def __post_init__(self) -> None:
        self.prompt = None if self.prompt_file is None else Path(self.prompt_file).read_text(encoding="utf-8")
        system = self.system_prompt_file
        self.system_prompt = None if system is None else Path(system).read_text(encoding="utf-8")

    def copy_defaults(self, from_spec: TaskDataSpec) -> None:
        """Take the prompts that are not set from another task."""
        self.system_prompt = from_spec.system_prompt if self.system_prompt is None else self.system_prompt
        self.prompt = from_spec.prompt if self.prompt is None else self.prompt


class TaskDataProcessFnCallable(Protocol):
    """A function that makes one row a prompt."""

    def __call__(
        self,
        datum_dict: dict[str, Any],
        task_data_spec: TaskDataSpec,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int | None,
        idx: int,
    ) -> DatumSpec: ...
