"""What a policy leaves on disk, written while training goes on.

weights/     a Hugging Face folder in float32
tokenizer/
optimizer/   a distributed checkpoint (torch.distributed.checkpoint), each rank's part in files of its own, and
             schedule.pt; reads on any number of ranks
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from nemo_rl.errors import CheckpointError, ConfigError, summarize_error
from nemo_rl.policy.hf_export import copy_weights, save_weights
from nemo_rl.policy.hf_model import load_model
from nemo_rl.policy.ranks import WRITING_TIMEOUT_S, checkpoint_group

logger = logging.getLogger(__name__)

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
        self, copies: Mapping[str, torch.Tensor], model: PreTrainedModel, folder: Path, *, config_dtype: str
    ) -> None:
        """Let this rank write them all."""
        future = self._writer.submit(save_weights, copies, model, folder, config_dtype=config_dtype)
        self._running.append((folder, future))

    def begin_files(
        self,
        write: Callable[[Mapping[str, torch.Tensor], Path], None],
        copies: Mapping[str, torch.Tensor],
        folder: Path,
    ) -> None:
        """Let this rank write them in another way."""
        self._running.append((folder, self._writer.submit(write, copies, folder)))

    def begin_optimizer(self, module: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        """Let every rank write its part."""
        self.begin_state(get_optimizer_state_dict(module, optimizer), folder)

    def begin_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Let every rank write what it holds of an optimizer's state, by names of weights as torch has it."""
        future: Any = dcp.async_save({"optimizer": state}, checkpoint_id=folder, process_group=checkpoint_group())
        self._running.append((folder, future))

    def finish(self) -> None:
        """Return once all that was begun is on the disk, whichever rank wrote it.

        Raises:
            CheckpointError: something could not be written.
        """
        running, self._running = self._running, []
        for folder, future in running:
            try:
                future.result(timeout=WRITING_TIMEOUT_S)
            except (Exception, CheckpointException) as error:  # a writer's, here or on another rank
                raise CheckpointError(f"{folder} cannot be written: {error}") from error

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._writer.shutdown()


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Raises CheckpointError: no weights there, or of another model."""
    try:
        saved = load_model(str(folder), {})
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    try:
        copy_weights(saved, model)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder} holds another model: {error}") from error


def load_optimizer(module: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Raises CheckpointError: the state of another optimizer or model."""
    state = load_state(get_optimizer_state_dict(module, optimizer), folder)
    set_optimizer_state_dict(module, optimizer, state)


def load_state(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What was saved in the place of what is asked for; raises CheckpointError where it is not all there."""
    asked = {"optimizer": state}
    try:
        dcp.load(asked, checkpoint_id=folder, process_group=checkpoint_group())
    except CheckpointException as error:  # what any rank raised
        causes = "; ".join(sorted({summarize_error(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"{folder} cannot be read, or is of another optimizer: {causes}") from error
    return asked["optimizer"]


def save_schedule(scheduler: LRScheduler | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"scheduler": scheduler.state_dict() if scheduler is not None else None}, folder / SCHEDULE_FILE)


def load_schedule(scheduler: LRScheduler | None, folder: Path) -> None:
    """Raises CheckpointError: nothing there that can be read."""
    try:
        state = torch.load(folder / SCHEDULE_FILE, map_location="cpu", weights_only=True)["scheduler"]
    except Exception as error:  # torch raises many types here: pickle's, zip's, its own
        raise CheckpointError(f"{folder / SCHEDULE_FILE} cannot be read: {error}") from error
    if scheduler is not None and state is not None:
        scheduler.load_state_dict(state)
