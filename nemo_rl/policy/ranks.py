"""The ranks of a model: their positions, process group and device mesh, and their messages to and from the driver.

Ranks form a mesh of (pipeline x data x tensor parallel). Tensor-parallel ranks share every layer, data-parallel ranks
share the samples (and, with FSDP2, the weights), and the pipeline stages, of Megatron only, share the layers. Besides
the collectives of FSDP2, DTensor and Megatron, a few numbers are exchanged on the CPU.

A message is a batch as arrays, and back the rows that a rank has scored. Arrays keep out of the pickled stream, so that
Ray's object store holds their bytes once per node and readers map them. Whole numbers that fit are sent as int32: token
ids, lengths and indices always do.
"""

import atexit
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorCollection, TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl import batch as keys
from nemo_rl.config.policy import ParallelModelConfig
from nemo_rl.distributed.machine import listen_on
from nemo_rl.errors import PolicyError
from nemo_rl.types import TrainingBatch

ValueT = TypeVar("ValueT")

CHECKPOINT_TIMEOUT_S = 1800.0  # a slow network disk and a large model


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The position of one rank, and how it finds the others."""

    rank: int = 0  # (stage * data_parallel_size + data-parallel rank) * tensor_parallel_size + tensor-parallel rank
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    init_method: str | None = None  # "tcp://host:port" of rank 0, or "file:///path"; None: a single rank
    timeout_s: float = 600.0  # deadline of joining and of each collective

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.world_size > 1 and self.init_method is None:
            raise ValueError(f"{self.world_size} ranks need an init_method to find each other")

    @classmethod
    def for_worker(cls, model: ParallelModelConfig, *, rank: int, world_size: int, address: str) -> "RankLayout":
        """Return the layout of one of `world_size` processes; `address` is that of rank 0, host:port."""
        return cls(
            rank=rank,
            data_parallel_size=world_size // model.model_parallel_size,
            tensor_parallel_size=model.tensor_parallel_size,
            pipeline_parallel_size=model.pipeline_parallel_size,
            init_method=f"tcp://{address}" if world_size > 1 else None,
        )

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size % self.data_parallel_size

    @property
    def is_dp_leader(self) -> bool:
        """Return whether this rank stands for the ranks of the last stage with the same samples, so that a sum over all
        ranks counts them once."""
        return self.rank % self.tensor_parallel_size == 0 and self.rank >= self._last_stage_first_rank

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a tensor on the CPU, in place; the same on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather_data_parallel(self, value: ValueT) -> list[ValueT]:
        """Return the value of each data-parallel rank of the last stage, in order; the same on every rank."""
        return self.all_gather_object(value)[self._last_stage_first_rank :: self.tensor_parallel_size]

    def all_gather_object(self, value: ValueT) -> list[ValueT]:
        """Return each rank's value, in order; the same on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[ValueT | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast(list[ValueT], values)

    @property
    def _last_stage_first_rank(self) -> int:
        return (self.pipeline_parallel_size - 1) * self.data_parallel_size * self.tensor_parallel_size


SINGLE_RANK = RankLayout()


def join(layout: RankLayout, device: torch.device) -> None:
    """Join the process group of all ranks, once per process; a single rank needs no port.

    Raises:
        PolicyError: the process is in another group, or the other ranks did not join before the deadline.
    """
    if dist.is_initialized():
        position = (dist.get_rank(), dist.get_world_size())
        if position != (layout.rank, layout.world_size):
            raise PolicyError(
                f"rank {layout.rank} of {layout.world_size}: the process is rank {position[0]} of {position[1]}"
            )
        return
    try:
        store = _make_store(layout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=None if store is not None else layout.init_method,
            store=store,
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=layout.timeout_s),
        )
    except (RuntimeError, OSError) as error:  # torch.distributed's own, or that of a file store without an answer
        raise PolicyError(
            f"rank {layout.rank} of {layout.world_size} cannot join {layout.init_method}: {error}"
        ) from error
    atexit.register(_destroy_process_group)


def _make_store(layout: RankLayout) -> dist.Store | None:
    """Return the store by which ranks meet; at tcp://host:port rank 0 listens there alone. None: made by torch."""
    if layout.world_size == 1:
        return dist.HashStore()
    url = urlsplit(layout.init_method or "")
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return None
    listener = listen_on(url.hostname, url.port)[0] if layout.rank == 0 else None
    timeout = timedelta(seconds=layout.timeout_s)
    return dist.TCPStore(
        url.hostname, url.port, layout.world_size, layout.rank == 0, timeout, master_listen_fd=listener
    )


def device_mesh(layout: RankLayout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks with the dimensions "dp" and "tp"; all ranks call it in the same order."""
    return _mesh(device.type, layout.data_parallel_size, layout.tensor_parallel_size)


@lru_cache
def checkpoint_group() -> dist.ProcessGroup:
    """Return another group of all ranks, on the CPU: a background save uses it while training uses the others."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_TIMEOUT_S)))


@lru_cache
def _mesh(device_type: str, data_parallel_size: int, tensor_parallel_size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (data_parallel_size, tensor_parallel_size), mesh_dim_names=("dp", "tp"))


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


INT32 = torch.iinfo(torch.int32)
BYTES_PER_TOKEN = 40  # of a batch: ten entries of 4 bytes, more than any algorithm has
BYTES_PER_CANDIDATE = 8  # a token id and its log-prob


def bytes_of_step(num_samples: int, max_tokens: int, *, topk: int = 0) -> int:
    """Return the bytes that are in the object store at once: a batch and, still, the scores that it was made of.

    Example: 512 samples of 2,048 tokens with 64 likely tokens at each: 2 * 512 * 2048 * (40 + 64 * 8), 1.1 GiB.
    """
    return 2 * num_samples * max_tokens * (BYTES_PER_TOKEN + BYTES_PER_CANDIDATE * topk)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Scores of the rows of a batch that one rank computed."""

    rows: np.ndarray  # [n] int32: indices into the batch
    values: tuple[np.ndarray, ...]  # [n, t, ...] each; t: tokens of the longest of these rows

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + sum(value.nbytes for value in self.values)


def collect_rows(scored: Iterable[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]) -> ScoredRows | None:
    """Join the (rows, values) of micro-batches, which may differ in their number of tokens; None: there were none."""
    parts = [(rows, tuple(value.cpu() for value in values)) for rows, values in scored]
    if not parts:
        return None
    num_rows, length = sum(len(rows) for rows, _ in parts), max(values[0].shape[1] for _, values in parts)
    joined = [torch.zeros((num_rows, length, *v.shape[2:]), dtype=_sent_dtype(v)) for v in parts[0][1]]
    start = 0
    for rows, values in parts:
        for whole, value in zip(joined, values, strict=True):
            whole[start : start + len(rows), : value.shape[1]] = value
        start += len(rows)
    rows = torch.cat([rows for rows, _ in parts]).to(torch.int32)
    return ScoredRows(rows.numpy(), tuple(value.numpy() for value in joined))


def merge_rows(parts: Iterable[ScoredRows | None], batch: TrainingBatch) -> list[torch.Tensor]:
    """Return each value for the whole batch, [B, T, ...] with 0 after a row's tokens, from the rows of all ranks.

    Raises:
        PolicyError: rows that no rank, or more than one, has scored.
    """
    given = [part for part in parts if part is not None]
    num_rows, length = batch[keys.TOKEN_IDS].shape
    found = np.sort(np.concatenate([part.rows for part in given])) if given else np.zeros(0, np.int32)
    if not np.array_equal(found, np.arange(num_rows)):
        raise PolicyError(f"the ranks scored {len(found)} rows ({len(np.unique(found))} different ones) of {num_rows}")
    merged: list[torch.Tensor] = []
    for index, value in enumerate(given[0].values):
        dtype = np.int64 if value.dtype == np.int32 else value.dtype
        whole = np.zeros((num_rows, length, *value.shape[2:]), dtype)
        for part in given:
            own = part.values[index]
            whole[part.rows, : own.shape[1]] = own
        merged.append(torch.from_numpy(whole))
    return merged


def merge_recorded(parts: Iterable[ScoredRows | None], batch: TrainingBatch) -> torch.Tensor:
    """Return the log-probs of the batch's N `recorded` rows from all ranks: [N, T]; NaN in rows that none has."""
    recorded = torch.full((int((batch[keys.RECORDED] >= 0).sum()), batch[keys.TOKEN_IDS].shape[1]), torch.nan)
    for part in parts:
        if part is not None:
            recorded[part.rows] = 0
            recorded[part.rows, : part.values[0].shape[1]] = torch.from_numpy(part.values[0])
    return recorded


class SentBatch:
    """A batch on its way to another process, where unpickling it gives the batch, for reading only."""

    def __init__(self, batch: TrainingBatch) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (_to_arrays(self._batch), tuple(self._batch.batch_size))


def _to_arrays(batch: TensorCollection) -> dict[str, Any]:
    """Return each tensor as (array, dtype), and each part of nested ones in the same way."""
    arrays: dict[str, Any] = {}
    items: Iterable[tuple[str, Any]] = batch.items()
    for name, value in items:
        if isinstance(value, torch.Tensor):
            arrays[name] = (value.detach().cpu().to(_sent_dtype(value)).numpy(), value.dtype)
        else:
            arrays[name] = _to_arrays(value)
    return arrays


def _receive(arrays: Mapping[str, Any], batch_size: Sequence[int]) -> TrainingBatch:
    tensors = {
        name: _receive(value, batch_size) if isinstance(value, dict) else _from_array(value[0]).to(value[1])
        for name, value in arrays.items()
    }
    return TensorDict(tensors, batch_size=list(batch_size))


def _sent_dtype(tensor: torch.Tensor) -> torch.dtype:
    if tensor.dtype != torch.int64 or (tensor.numel() and not _fits_int32(tensor)):
        return tensor.dtype
    return torch.int32


def _fits_int32(tensor: torch.Tensor) -> bool:
    smallest, largest = torch.aminmax(tensor)
    return INT32.min <= int(smallest) and int(largest) <= INT32.max


def _from_array(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the same memory, which is read-only where it is the object store's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
