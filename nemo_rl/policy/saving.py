"""What a policy leaves on disk, written while training goes on.

weights/     a Hugging Face folder in float32
tokenizer/
optimizer/   a distributed checkpoint (torch.distributed.checkpoint), each rank's part in files of its own, and
             schedule.pt; reads on any number of ranks
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.errors import CheckpointError, ConfigError, summarize_error
from nemo_rl.policy.hf_model import load_model
from nemo_rl.policy.lora import LazyMergedWeight, merge_adapter_weights
from nemo_rl.policy.ranks import CHECKPOINT_TIMEOUT_S, checkpoint_group
from nemo_rl.policy.sharding import whole

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, adapter_scale: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs for an engine, gathered and cast one at a time.

    Persistent tensors, tied ones once, split as the files have them. What one rank holds whole in `dtype` is not
    copied: these are the weights themselves. Adapters, which `adapter_scale` belongs to, are merged into copies.
    """
    own = _persistent_tensors(model)
    tensors = own if adapter_scale is None else merge_adapter_weights(own, adapter_scale)
    is_shared = any(isinstance(t, DTensor) and t.device_mesh.size() > 1 for t in own.values())
    is_materialized_lazily = is_shared or adapter_scale is not None  # each when its turn comes
    if not is_materialized_lazily or _needs_weight_conversion(
        model, tensors
    ):  # experts: of several tensors the files make others
        tensors = revert_weight_conversion(model, {name: _materialize(tensor) for name, tensor in tensors.items()})
    for name, one in tensors.items():
        tensor = one.whole() if isinstance(one, LazyMergedWeight) else one
        yield name, whole(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def call_on_rank0(
    use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT],
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    is_rank0: bool,
) -> ResultT | None:
    """The result of `use` on the first rank, None on the others, which only take part in gathering.

    All weights are gathered, also when `use` stops before the last one or raises.
    """
    try:
        return use(weights) if is_rank0 else None
    finally:
        for _ in weights:
            pass


def copy_weights_to_cpu(
    weights: Iterator[tuple[str, torch.Tensor]], *, is_rank0: bool = True
) -> dict[str, torch.Tensor]:
    """All weights as they are, on the CPU of the first rank; nothing on the others, which help to gather them."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if is_rank0:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copies


def save_weights(
    tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, directory: Path, *, config_dtype: str
) -> None:
    """Write config.json, generation_config.json and safetensors files of what `copy_weights_to_cpu` gave.

    The tensors are float32, so that training goes on exactly; `config_dtype` is what config.json names, which is what
    transformers and vLLM load them as unless told otherwise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(dict(tensors), directory)
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [_architecture(model)]
    config.dtype = config_dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        (directory / "generation_config.json").write_text(model.generation_config.to_json_string() + "\n")


def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Overwrite the target's weights, or this rank's part of them, with those of an equal model.

    Raises:
        RuntimeError: the source is another model.
    """
    set_model_state_dict(target, source.state_dict(), options=StateDictOptions(full_state_dict=True))


def _persistent_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _materialize(tensor: torch.Tensor | LazyMergedWeight) -> torch.Tensor:
    return tensor.whole() if isinstance(tensor, LazyMergedWeight) else whole(tensor)


def _needs_weight_conversion(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor | LazyMergedWeight]) -> bool:
    """Whether the files hold other tensors than the model; asked of tensors without values."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    converted = revert_weight_conversion(model, dict(shapes))
    return {n: t.shape for n, t in converted.items()} != {n: t.shape for n, t in shapes.items()}


def _architecture(model: PreTrainedModel) -> str:
    """The class in transformers; FSDP2 puts "FSDP" before the name of what it wraps."""
    return type(model).__name__.removeprefix("FSDP")


SCHEDULE_FILE = "schedule.pt"


class BackgroundSave:
    """Saves that return once everything is copied; at most one is being written.

    Consumes: copies of weights and optimizer. Produces: files. Waits for: the disk; optimizer files also for the other
    ranks. Unblocked by: nothing but `finish`, which the next save and loading call too.
    """

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: list[tuple[Path, Future[Any]]] = []

    def begin_weights(
        self, copies: Mapping[str, torch.Tensor], model: PreTrainedModel, directory: Path, *, config_dtype: str
    ) -> None:
        """Let this rank write them all."""
        future = self._writer.submit(save_weights, copies, model, directory, config_dtype=config_dtype)
        self._running.append((directory, future))

    def begin_files(
        self,
        write: Callable[[Mapping[str, torch.Tensor], Path], None],
        copies: Mapping[str, torch.Tensor],
        directory: Path,
    ) -> None:
        """Let this rank write them in another way."""
        self._running.append((directory, self._writer.submit(write, copies, directory)))

    def begin_optimizer(self, module: nn.Module, optimizer: Optimizer, directory: Path) -> None:
        """Let every rank write its part."""
        self.begin_state(get_optimizer_state_dict(module, optimizer), directory)

    def begin_state(self, state: Mapping[str, Any], directory: Path) -> None:
        """Let every rank write what it holds of an optimizer's state, by names of weights as torch has it."""
        future: Any = dcp.async_save({"optimizer": state}, checkpoint_id=directory, process_group=checkpoint_group())
        self._running.append((directory, future))

    def finish(self) -> None:
        """Return once all that was begun is on the disk, whichever rank wrote it.

        Raises:
            CheckpointError: something could not be written.
        """
        running, self._running = self._running, []
        for directory, future in running:
            try:
                future.result(timeout=CHECKPOINT_TIMEOUT_S)
            except (Exception, CheckpointException) as error:  # a writer's, here or on another rank
                raise CheckpointError(f"{directory} cannot be written: {error}") from error

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._writer.shutdown()


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Raises CheckpointError: no weights there, or of another model."""
    try:
        saved = load_model(str(directory), {})
    except ConfigError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    try:
        copy_weights(saved, model)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{directory} holds another model: {error}") from error


def load_optimizer(module: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Raises CheckpointError: the state of another optimizer or model."""
    state = load_state(get_optimizer_state_dict(module, optimizer), directory)
    set_optimizer_state_dict(module, optimizer, state)


def load_state(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What was saved in the place of what is asked for; raises CheckpointError where it is not all there."""
    asked = {"optimizer": state}
    try:
        dcp.load(asked, checkpoint_id=directory, process_group=checkpoint_group())
    except CheckpointException as error:  # what any rank raised
        causes = "; ".join(sorted({summarize_error(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{directory} cannot be read, or is of another optimizer: {causes}") from error
    return asked["optimizer"]


def save_schedule(scheduler: LRScheduler | None, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"scheduler": scheduler.state_dict() if scheduler is not None else None}, directory / SCHEDULE_FILE)


def load_schedule(scheduler: LRScheduler | None, directory: Path) -> None:
    """Raises CheckpointError: nothing there that can be read."""
    try:
        state = torch.load(directory / SCHEDULE_FILE, map_location="cpu", weights_only=True)["scheduler"]
    except Exception as error:  # torch raises many types here: pickle's, zip's, its own
        raise CheckpointError(f"{directory / SCHEDULE_FILE} cannot be read: {error}") from error
    if scheduler is not None and state is not None:
        scheduler.load_state_dict(state)
