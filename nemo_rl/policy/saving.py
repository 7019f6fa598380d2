"""Files that a policy saves, written in the background while training continues.

weights/     a Hugging Face directory in float32
tokenizer/
optimizer/   a distributed checkpoint (torch.distributed.checkpoint) with one set of files per rank, and schedule.pt;
             can be read on any number of ranks
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from nemo_rl.errors import CheckpointError, summarize_error
from nemo_rl.policy.host_copies import HostCopies
from nemo_rl.policy.ranks import CHECKPOINT_TIMEOUT_S, checkpoint_group

SCHEDULE_FILE = "schedule.pt"


class BackgroundSave:
    """Saves that return once everything is copied; at most one is being written.

    Copies go into host memory that is kept from save to save, pinned for a GPU: weights into `memory`, an optimizer's
    state into torch's stager, which keeps a copy per storage of the state.

    Consumes: copies of weights and optimizer state. Produces: files. Waits for: the disk; optimizer files also for the
    other ranks. Unblocked by: `finish`, which the next save and every load call too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: list[tuple[Path, Future[Any]]] = []
        self._make_memory()

    def _make_memory(self) -> None:
        is_cuda = self._device.type == "cuda"
        self.memory = HostCopies(self._device)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_cuda,  # one synchronization for all
            )
        )

    def copy_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], *, is_rank0: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return copies of all weights on rank 0, and nothing on the other ranks, which help to gather them."""
        copies = {name: self.memory.copy(tensor) for name, tensor in weights if is_rank0}
        self.memory.wait()
        return copies

    def begin_weights(
        self, copies: Mapping[str, torch.Tensor], model: PreTrainedModel, directory: Path, *, config_dtype: str
    ) -> None:
        """Begin to write a Hugging Face directory; called on the one rank that writes it."""
        future = self._writer.submit(save_weights, copies, model, directory, config_dtype=config_dtype)
        self._running.append((directory, future))

    def begin_files(
        self,
        write: Callable[[Mapping[str, torch.Tensor], Path], None],
        copies: Mapping[str, torch.Tensor],
        directory: Path,
    ) -> None:
        """Begin to write `copies` by a function; called on the one rank that writes them."""
        self._running.append((directory, self._writer.submit(write, copies, directory)))

    def begin_optimizer(self, module: nn.Module, optimizer: Optimizer, directory: Path) -> None:
        """Begin to write an optimizer's state; called on every rank, each of which writes its part."""
        self._begin_state(_as_one_group(get_optimizer_state_dict(module, optimizer)), directory, self._stager)

    def begin_optimizers(self, module: nn.Module, optimizers: Mapping[str, Optimizer], directory: Path) -> None:
        """Begin to write the state of several optimizers of the same parameters, by name, as `begin_optimizer` does."""
        states = {name: _as_one_group(get_optimizer_state_dict(module, each)) for name, each in optimizers.items()}
        self._begin_state(states, directory, self._stager)

    def begin_state(self, copies: Mapping[str, Any], directory: Path) -> None:
        """Begin to write an optimizer's state dict of copies, keyed by parameter name; called on every rank."""
        self._begin_state(copies, directory, AlreadyCopied())

    def _begin_state(self, state: Mapping[str, Any], directory: Path, stager: AsyncStager) -> None:
        future: Any = dcp.async_save(
            {"optimizer": state}, checkpoint_id=directory, process_group=checkpoint_group(), async_stager=stager
        )
        self._running.append((directory, future))

    @property
    def is_written(self) -> bool:
        """Return whether `finish` would not wait."""
        return all(future.done() for _, future in self._running)

    def finish(self) -> None:
        """Wait until everything that was begun is on disk, whichever rank writes it.

        Raises:
            CheckpointError: something could not be written.
        """
        running, self._running = self._running, []
        errors: list[CheckpointError] = []
        for directory, future in running:  # all of them, so that nothing is written after this returns
            try:
                future.result(timeout=CHECKPOINT_TIMEOUT_S)
            except (Exception, CheckpointException) as error:  # a writer's, here or on another rank  # noqa: BLE001
                errors.append(CheckpointError(f"{directory} cannot be written: {error}"))
                errors[-1].__cause__ = error
        if all(future.done() for _, future in running):
            self.memory.restart()
        else:  # a writer past its deadline still reads the copies
            self._make_memory()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finish the running save and end the writer's thread."""
        try:
            self.finish()
        finally:
            self._writer.shutdown()
            self._stager.close()


class AlreadyCopied(AsyncStager):
    """The stager of a state dict whose tensors are copies."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return state_dict


def save_weights(
    tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, directory: Path, *, config_dtype: str
) -> None:
    """Write config.json, generation_config.json and safetensors files of what `BackgroundSave.copy_weights` returned.

    The tensors are float32, so that training resumes exactly. `config_dtype` is named in config.json: transformers and
    vLLM load the weights in it unless told otherwise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(dict(tensors), directory)
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 prefixes the name of a wrapped class
    config.dtype = config_dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        (directory / "generation_config.json").write_text(model.generation_config.to_json_string() + "\n")


def load_optimizer(module: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load an optimizer's state, except for its weight decay, which is the recipe's.

    Raises:
        CheckpointError: the state is that of another optimizer or model.
    """
    own: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    _set_optimizer_state(module, optimizer, own, load_state(_as_one_group(own), directory))


def load_optimizers(module: nn.Module, optimizers: Mapping[str, Optimizer], directory: Path) -> None:
    """Load the state of several optimizers of the same parameters, by name, as `load_optimizer` does."""
    own: dict[str, Any] = {name: get_optimizer_state_dict(module, each) for name, each in optimizers.items()}
    found = load_state({name: _as_one_group(state) for name, state in own.items()}, directory)
    for name, optimizer in optimizers.items():
        _set_optimizer_state(module, optimizer, own[name], found[name])


def _set_optimizer_state(module: nn.Module, optimizer: Optimizer, own: dict[str, Any], found: dict[str, Any]) -> None:
    """Give an optimizer the state `found`, except for the weight decay of its `own` groups."""
    (saved,) = found["param_groups"]
    kept = ("params", "weight_decay")
    groups = [saved | {key: group[key] for key in kept if key in group} for group in own["param_groups"]]
    set_optimizer_state_dict(module, optimizer, found | {"param_groups": groups})


def _as_one_group(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with all its parameters in one group, whatever `decay_norm_and_bias` is.

    So a checkpoint can be loaded with either.
    """
    groups = state["param_groups"]
    return state | {"param_groups": [groups[0] | {"params": [name for group in groups for name in group["params"]]}]}


def load_state(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the saved values for the keys of `state`; raises CheckpointError if one is missing."""
    requested = {"optimizer": state}
    try:
        dcp.load(requested, checkpoint_id=directory, process_group=checkpoint_group())
    except CheckpointException as error:  # raised on every rank
        causes = "; ".join(sorted({summarize_error(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{directory} cannot be read, or is of another optimizer: {causes}") from error
    return requested["optimizer"]


def save_schedule(scheduler: LRScheduler | None, directory: Path) -> None:
    """Write the state of the learning-rate schedule."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"scheduler": scheduler.state_dict() if scheduler is not None else None}, directory / SCHEDULE_FILE)


def load_schedule(scheduler: LRScheduler | None, directory: Path) -> None:
    """Load the state of the learning-rate schedule; raises CheckpointError for a file that cannot be read."""
    try:
        state = torch.load(directory / SCHEDULE_FILE, map_location="cpu", weights_only=True)["scheduler"]
    except Exception as error:  # torch raises many types here: pickle's, zip's, its own
        raise CheckpointError(f"{directory / SCHEDULE_FILE} cannot be read: {error}") from error
    if scheduler is not None and state is not None:
        _fit_groups(state, len(scheduler.optimizer.param_groups))
        scheduler.load_state_dict(state)


def _fit_groups(state: dict[str, Any], count: int) -> None:
    """Give a schedule's state the number of the optimizer's groups, which have the same learning rate."""
    for name in ("base_lrs", "_last_lr"):
        if name in state:
            state[name] = state[name][:1] * count
    for part in state.get("_schedulers", ()):
        _fit_groups(part, count)
