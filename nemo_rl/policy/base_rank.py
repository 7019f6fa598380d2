"""`BaseRank`: what a rank of the policy offers, whichever backend computes: `RankPolicy` or `MegatronRank`."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.device import resolve_device
from nemo_rl.errors import CheckpointError, PolicyError
from nemo_rl.interfaces import LossFn
from nemo_rl.policy.flops import train_flops
from nemo_rl.policy.hf_export import use_on_first_rank, weight_copies
from nemo_rl.policy.micro_batches import expected_optimizer_steps, split_optimizer_steps
from nemo_rl.policy.ranks import RankLayout, join
from nemo_rl.policy.reading import ReadingRank
from nemo_rl.policy.saving import BackgroundSave, load_schedule, save_schedule
from nemo_rl.policy.training import OptimizerStep, over_optimizer_steps
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class StepsOptimizer(Protocol):
    """Learns from some rows of a batch once; what is reported is the same on every rank."""

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep: ...


class BaseRank(ReadingRank):
    """The model on one rank of a layout.

    Every method is collective: it is called on all ranks, in the same order, with the same arguments, and a batch is
    the whole batch, of which a rank computes its rows. One call at a time, all from one thread. A rank that raises
    leaves the others waiting for it until the layout's deadline.

    Args:
        config: the section `policy`; `layout`, not the section, says how many ranks there are.
        layout: this rank's place, and how it finds the others.
        model_path: a Hugging Face name or a folder that every rank can read; the reference's weights too.
        temperature: of sampling; the logits are divided by it.
        needs_reference: keep the first weights, frozen, for `reference_logprobs`.
        num_samples_per_step: samples expected in a batch; with `train_global_batch_size`, the optimizer steps of one.
        seed: of torch's random numbers, for optimizers that draw some.
        tokenizer: saved beside the weights by the first rank; None: nothing is.

    Raises:
        ConfigError: a model, override, optimizer, schedule, device or layout that cannot be had.
        PolicyError: the other ranks did not come before the deadline.
    """

    _reference: nn.Module | None  # under the weights that training began with
    _num_matmul_parameters: int  # of the whole model
    _optimizer: Optimizer
    _scheduler: LRScheduler | None
    _trainer: StepsOptimizer

    def __init__(
        self,
        config: PolicyConfig,
        *,
        layout: RankLayout,
        model_path: str,
        temperature: float,
        needs_reference: bool,
        num_samples_per_step: int,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.device = resolve_device(config.device)
        self.num_optimizer_steps = expected_optimizer_steps(num_samples_per_step, config.train_global_batch_size)
        self._tokenizer = tokenizer
        self._saving = BackgroundSave()
        torch.manual_seed(seed)
        self._make(model_path, temperature=temperature, needs_reference=needs_reference, seed=seed)

    @abstractmethod
    def _make(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        """The model, its reference, and what trains it: the last step of the constructor."""

    @abstractmethod
    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) on the first rank; on the others, something for each that is gathered."""

    @abstractmethod
    def _load_weights(self, path: Path) -> None:
        """Those of a checkpoint. Raises CheckpointError: no weights there, or of another model."""

    @abstractmethod
    def _begin_saving_optimizer(self, folder: Path) -> None: ...

    @abstractmethod
    def _load_optimizer(self, folder: Path) -> None:
        """Raises CheckpointError: the state of another optimizer or model."""

    def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """The same under the weights that training began with, also after `load`."""
        if self._reference is None:
            raise PolicyError("the policy was made without a reference")
        return self._logprobs(self._reference, batch)

    def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        """All optimizer steps of one batch, each over whole groups; then one step of the schedule.

        Returns, the same on every rank, the loss function's metrics and `loss`, `grad_norm`, `lr` (that was used),
        `global_valid_seqs`, `global_valid_toks`, `num_optimizer_steps`, `num_skipped_steps`, `train_flops` (of all
        ranks together). A step whose gradient is not finite is skipped with a warning.

        Raises:
            PolicyError: the batch lacks a key that the loss reads.
        """
        missing = sorted(loss_fn.required_keys - set(batch.keys()))
        if missing:
            raise PolicyError(f"the loss reads {', '.join(missing)}, which the batch does not have")
        lr = float(self._optimizer.param_groups[0]["lr"])
        parts = split_optimizer_steps(batch[keys.GROUP_ID], self.num_optimizer_steps)
        steps = [self._trainer.optimizer_step(batch, rows, loss_fn) for rows in parts]
        if self._scheduler is not None and not all(step.is_skipped for step in steps):
            self._scheduler.step()
        return {**over_optimizer_steps(steps), "lr": lr, "train_flops": self.train_flops(batch)}

    def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT | None:
        """Call `use` with (name, tensor) pairs on the first rank; the others help to gather them and get None.

        Each tensor is gathered when its turn comes. Alone in float32 they are the weights themselves: copy, do not
        keep.
        """
        dtype = torch.float32 if self.config.precision == "float32" else torch.bfloat16
        return use_on_first_rank(use, self._named_weights(dtype), is_first=self._is_first)

    def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to write `weights/` in float32 (config.json names the policy's precision, which loaders follow),
        `tokenizer/` and, if asked, `optimizer/`. Returns once all is copied, so that training may go on; an earlier
        save is finished first."""
        self.finish_save()
        self._begin_saving_weights(path)
        if self._is_first and self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "tokenizer")
        if not save_optimizer:
            return
        join(self.layout, self.device)
        if self._is_first:
            save_schedule(self._scheduler, path / "optimizer")
        self._begin_saving_optimizer(path / "optimizer")

    def _begin_saving_weights(self, path: Path) -> None:
        copies = weight_copies(self._named_weights(torch.float32), is_first=self._is_first)
        if self._is_first:
            self._saving.begin_weights(copies, self._model, path / "weights", config_dtype=self.config.precision)
        if self._is_first and self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "weights")

    def finish_save(self) -> None:
        """Return once what `save` began is on the disk, the other ranks' files too.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._saving.finish()

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, exactly, whatever the number of ranks was; without `optimizer/` from the
        weights alone, with a warning.

        Raises:
            CheckpointError: nothing there, or of another model or optimizer.
        """
        self.finish_save()
        self._load_weights(path)
        folder = path / "optimizer"
        seen = self.layout.gathered_of_all(folder.exists())  # on a shared disk not all need see the same
        if any(seen) and not all(seen):
            raise CheckpointError(f"{folder} is not there for ranks {[r for r, there in enumerate(seen) if not there]}")
        if not any(seen):
            logger.warning("%s does not exist: optimizer and schedule start afresh", folder)
            return
        join(self.layout, self.device)
        self._load_optimizer(folder)
        load_schedule(self._scheduler, folder)

    def close(self) -> None:
        """Finish what is being saved. The process stays in its group."""
        self._saving.close()

    def train_flops(self, batch: TrainingBatch) -> float:
        """Floating-point operations of training on a batch once, over all ranks."""
        return train_flops(self._num_matmul_parameters, self._model.config, batch[keys.LENGTHS].tolist())

    @property
    def _is_first(self) -> bool:
        return self.layout.rank == 0
