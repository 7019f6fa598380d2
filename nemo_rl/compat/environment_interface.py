"""NeMo-RL's interface of environments with its helpers, for classes written for it.

`env.<name>.type` names such a class by its dotted path; environments.py adapts it. Environments of this project
implement interfaces.Environment.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from nemo_rl.compat.batched_data_dict import BatchedDataDict
    from nemo_rl.compat.data_types import LLMMessageLogType

MetadataT = TypeVar("MetadataT")
ItemT = TypeVar("ItemT")


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """The results of one step of B conversations."""

    observations: Sequence[Mapping[str, str]]  # [B] messages with role and content
    metadata: Sequence[MetadataT | None]  # [B]; None keeps what the conversation had
    next_stop_strings: Sequence[Sequence[str] | None]  # [B]
    rewards: torch.Tensor | Mapping[str, torch.Tensor]  # [B], [B, R], or [B] by name
    terminateds: torch.Tensor  # [B]
    answers: Sequence[str | None] | None = None  # [B]


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """A batched environment; a `ray.remote` class lives in an actor of its own."""

    @abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Return the results of the conversations' last responses."""

    @abstractmethod
    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        """Return the batch and metrics of all rollouts; never called here: metrics come from rewards."""


class PY_EXECUTABLES:
    """The running interpreter under every name that a `runtime_env` may use: one environment serves all processes."""

    SYSTEM = BASE = VLLM = FSDP = AUTOMODEL = MCORE = NEMO_GYM = sys.executable


def chunk_list_to_workers(to_chunk: list[ItemT], num_workers: int) -> list[list[ItemT]]:
    """Split a list, in order, into one part per worker; the last parts may be shorter or empty.

    Example: `chunk_list_to_workers([1, 2, 3, 4, 5], 3)` is `[[1, 2], [3, 4], [5]]`.
    """
    size = max(1, -(-len(to_chunk) // num_workers))
    return [to_chunk[start * size : (start + 1) * size] for start in range(num_workers)]


def calculate_pass_rate_per_prompt(prompts: torch.Tensor, is_correct: torch.Tensor) -> float:
    """Return the share of distinct prompts with a correct answer.

    Args:
        prompts: [B, T], equal rows are one prompt.
        is_correct: [B], above 0 if the answer is correct.
    """
    rows = [tuple(row) for row in prompts.tolist()]
    solved = {row for row, correct in zip(rows, is_correct.tolist(), strict=True) if correct > 0}
    return len(solved) / len(set(rows))
