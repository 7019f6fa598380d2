"""NeMo-RL's import path of its types of data."""

from nemo_rl.compat.data_types import (
    DatumSpec,
    FlatMessagesType,
    LLMMessageLogType,
    PathLike,
    PreferenceDatumSpec,
    TaskDataProcessFnCallable,
    TaskDataSpec,
)

__all__ = [
    "DatumSpec",
    "FlatMessagesType",
    "LLMMessageLogType",
    "PathLike",
    "PreferenceDatumSpec",
    "TaskDataProcessFnCallable",
    "TaskDataSpec",
]
