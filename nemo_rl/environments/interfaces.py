"""NeMo-RL's interface of environments, for classes written for it: `env.<name>.type` names one by its dotted path.

registry.py adapts them. Environments of this project implement interfaces.Environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from nemo_rl.data.interfaces import LLMMessageLogType
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

MetadataT = TypeVar("MetadataT")


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
        """Return the batch and metrics of all rollouts; it is never called here, where metrics come from rewards."""
