"""Workers: a model on one rank, whichever backend computes. A policy worker trains it, a teacher worker scores with it.

A backend (`fsdp2/worker.py`, `megatron/worker.py`) implements the abstract methods; its entry makes the worker, and
`custom_backend.py` adapts a user's own. `driver.py` runs a worker in this process, or one per rank in processes of
their own.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_args

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import ProfilerActivity
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.config.policies import NamedPolicyConfig
from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.device_peaks import peaks_of
from nemo_rl.distributed.devices import memory_of_device, name_of_device, prepare_allocator, resolve_device
from nemo_rl.distributed.float32 import allow_bfloat16_units
from nemo_rl.distributed.vision_towers import sees
from nemo_rl.errors import CheckpointError, PolicyError
from nemo_rl.interfaces import LossFn, OffloadPart
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy import micro_batches
from nemo_rl.policy.adapter_files import DIRECTORY as ADAPTER_DIRECTORY
from nemo_rl.policy.adapter_files import scaled_tensors
from nemo_rl.policy.batch_transfer import ScoredRows, collect_rows
from nemo_rl.policy.hf_model import train_flops
from nemo_rl.policy.logprobs import LOGPROBS_ONLY
from nemo_rl.policy.offload import Offloader
from nemo_rl.policy.ranks import RankLayout, join
from nemo_rl.policy.saving import BackgroundSave, load_schedule, save_schedule
from nemo_rl.policy.step_report import OptimizerStep, reduce_over_optimizer_steps
from nemo_rl.policy.truncation import WHOLE, Truncation
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ConfigT = TypeVar("ConfigT", bound=PolicyConfig | TeacherConfig)

OFFLOAD_PARTS: tuple[OffloadPart, ...] = get_args(OffloadPart)


class ScoringWorker(ABC, Generic[ConfigT]):
    """A model on one rank of a layout that scores tokens; the ranks share the rows of a batch.

    Every method is collective: all ranks call it, in the same order and with the same arguments. A batch is always the
    whole batch, of which each rank computes its own rows.
    """

    config: ConfigT
    module: nn.Module
    device: torch.device
    layout: RankLayout
    _model: PreTrainedModel  # Hugging Face's, for its configuration; its weights may be on the meta device
    _frozen_parts: tuple[OffloadPart, ...]  # whose tensors never change

    @property
    @abstractmethod
    def _scoring_batching(self) -> micro_batches.MicroBatching:
        """Return the micro-batching without gradients."""

    @abstractmethod
    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        """Yield (rows, scores) of this rank's rows, one micro-batch at a time, without gradients."""

    @abstractmethod
    def _part_tensors(self, part: OffloadPart) -> Iterable[torch.Tensor]:
        """Yield the tensors of a part, wherever they are; nothing for a part that the model does not have."""

    def logprobs(self, batch: TrainingBatch) -> ScoredRows | None:
        """Return log_softmax(logits / temperature) of the tokens with a mask, else 0, of this rank's rows, in float32.

        With `policy.router_replay.mode: R2` also the experts [n, t, L, k] of the tokens. None on a rank whose rows
        another rank returns.
        """
        self._require("weights")
        return self._logprobs(self.module, batch)

    def topk_logprobs(self, batch: TrainingBatch, k: int) -> ScoredRows | None:
        """Return ids and log-probs [n, t, k] of the k most likely tokens at each token with a mask, as `logprobs` does.

        Raises:
            PolicyError: k is larger than the vocabulary.
        """
        self._require("weights")
        size = self._model.config.get_text_config().vocab_size
        if not 0 < k <= size:
            raise PolicyError(f"the {k} most likely of {size} tokens")
        scored = self._iter_scores(self.module, batch, RequiredScores(topk=k))
        return self._collect((rows, scores.topk) for rows, scores in scored if scores.topk is not None)

    def offload(self, *parts: OffloadPart) -> None:
        """Move parts (none named: all) off the accelerator; a no-op on a CPU, and for weights that stay on the CPU."""
        if self._has_own_memory:
            chosen = parts or OFFLOAD_PARTS
            self._offloader.offload({part: list(self._part_tensors(part)) for part in chosen})

    def onload(self, *parts: OffloadPart) -> None:
        """Move parts (none named: all) back to the accelerator."""
        self._offloader.onload(parts or OFFLOAD_PARTS)

    @property
    def _has_own_memory(self) -> bool:
        """Return whether the device has memory other than the host's."""
        return self.device.type != "cpu"

    @cached_property
    def _offloader(self) -> Offloader:
        return Offloader(self.device, frozen=self._frozen_parts)

    def _require(self, *parts: OffloadPart) -> None:
        """Raise PolicyError if one of these parts is offloaded; what is queued next finds them on the device."""
        away = [part for part in parts if self._offloader.is_away(part)]
        if away:
            raise PolicyError(f"{', '.join(away)} of rank {self.layout.rank} are offloaded; call onload first")
        self._offloader.await_arrival(parts)

    def _logprobs(self, module: nn.Module, batch: TrainingBatch) -> ScoredRows | None:
        scored = self._iter_scores(module, batch, LOGPROBS_ONLY)
        return self._collect((rows, _logprobs_and_routes(scores)) for rows, scores in scored)

    def _collect(self, scored: Iterable[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]) -> ScoredRows | None:
        """Return this rank's rows, or None if another rank returns them."""
        if self.layout.returns_rows:
            return collect_rows(scored)
        for _ in scored:  # the ranks compute together, so each iterates to the end
            pass
        return None


def _logprobs_and_routes(scores: TokenScores) -> tuple[torch.Tensor, ...]:
    return (scores.logprobs,) if scores.routes is None else (scores.logprobs, scores.routes)


class RecordedLoss:
    """A loss that keeps its input log-probs with the numbers of their rows (`batch.RECORDED`)."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self.required_keys = loss_fn.required_keys | {keys.RECORDED}
        self.required_scores = loss_fn.required_scores
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # (numbers [n], log-probs [n, t]) on their device

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        self._kept.append((batch[keys.RECORDED], scores.logprobs.detach().clone()))
        return self._loss_fn(scores, batch, normalizer)

    def recorded(self) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor]]]:
        """Yield (numbers, log-probs) of the rows that have a number, on the CPU; waits for the device."""
        for numbers, logprobs in self._kept:
            chosen = numbers.cpu() >= 0
            if chosen.any():
                yield numbers.cpu()[chosen], (logprobs.cpu()[chosen],)


class SupportsOptimizerStep(Protocol):
    """A backend's trainer."""

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Take one optimizer step on these rows and return its report, which is the same on every rank."""
        ...


class TrainedAdapters(Protocol):
    """A backend's LoRA adapters."""

    scale: float  # factor of B A
    save_merged: bool  # checkpoints also hold the merged model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' whole tensors under the names of peft's files; all ranks iterate together."""
        ...

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write what `tensors` yielded, in peft's format."""
        ...

    def load(self, directory: Path) -> None:
        """Load an adapter; raises CheckpointError for none there, or one of other layers or sizes."""
        ...


class PolicyWorker(ScoringWorker[PolicyConfig]):
    """The policy on one rank of a layout.

    One call at a time, all from one thread. When a rank raises, the others wait for it until the layout's deadline.

    Args:
        config: the section `policy`; the number of ranks is that of `layout`, not of the section.
        layout: this rank's position, and how it finds the others.
        model_path: a Hugging Face name or a directory that every rank can read; also the reference's weights.
        temperature: of sampling; the logits are divided by it.
        needs_reference: keep a frozen copy of the initial weights for `reference_logprobs`.
        num_samples_per_step: samples expected in a batch; with `train_global_batch_size` it gives the number of
            optimizer steps per batch.
        seed: of torch's random numbers, for optimizers that draw some.
        tokenizer: saved beside the weights by rank 0; None: no tokenizer is saved.
        truncation: of sampling, by top-k and top-p; log-probs are of the distribution that is left.
        policies: the table `policies`, for a backend that trains several adapters; empty: a single policy.

    Raises:
        ConfigError: a model, override, optimizer, schedule, device or layout that is not available.
        PolicyError: the other ranks did not join before the deadline.
    """

    _frozen_parts = ("reference",)
    _reference: nn.Module | None  # the policy with its initial weights
    _adapters: "TrainedAdapters | None" = None  # None: all weights are trained
    _num_matmul_parameters: int  # counted over the whole model
    _optimizer: Optimizer
    _scheduler: LRScheduler | None
    _trainer: SupportsOptimizerStep
    _profile: torch.profiler.profile | None = None  # the running one
    _profile_path: Path
    _recorded: RecordedLoss | None = None  # log-probs of the last training step

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
        truncation: Truncation = WHOLE,
        policies: Mapping[str, NamedPolicyConfig] | None = None,
    ) -> None:
        self.config = config
        self._policies = policies or {}
        self.truncation = truncation
        self.layout = layout
        self.device = resolve_device(config.device)
        prepare_allocator(self.device)
        if layout.world_size > 1:  # a process of its own
            allow_bfloat16_units()
        self.num_optimizer_steps = micro_batches.expected_optimizer_steps(
            num_samples_per_step, config.train_global_batch_size
        )
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._saving = BackgroundSave(self.device)
        torch.manual_seed(seed)
        self._build_model(model_path, temperature=temperature, needs_reference=needs_reference, seed=seed)

    @abstractmethod
    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        """Make the model, its reference, the optimizer and the trainer; the last step of the constructor."""

    def select(self, name: str) -> None:
        """Make scoring and training those of one of `policies`; raises PolicyError for another name."""
        raise PolicyError(f"{type(self).__name__} trains a single policy, not {name!r}")

    @abstractmethod
    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor) on rank 0; the other ranks yield once per tensor they gather."""

    def _named_adapter(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the adapter's tensors as `_named_weights` does, under the names of peft's files, B with its scale."""
        if self._adapters is None:
            raise PolicyError(f"{type(self).__name__} trains no adapter")
        return scaled_tensors(self._adapters.tensors(), self._adapters.scale, dtype)

    @abstractmethod
    def _load_weights(self, path: Path) -> None:
        """Load a checkpoint's weights; raises CheckpointError for none, or those of another model."""

    @abstractmethod
    def _start_optimizer_save(self, directory: Path) -> None:
        """Begin to write the optimizer's state in the background."""

    @abstractmethod
    def _load_optimizer(self, directory: Path) -> None:
        """Load the optimizer's state; raises CheckpointError for that of another optimizer or model."""

    def reference_logprobs(self, batch: TrainingBatch) -> ScoredRows | None:
        """Return `logprobs` under the initial weights, which `load` does not change."""
        if self._reference is None:
            raise PolicyError("the policy was made without a reference")
        self._require("weights", "reference")
        return self._logprobs(self._reference, batch)

    def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        """Take all optimizer steps of one batch, each over whole groups, then one step of the schedule.

        Returns, the same on every rank, the loss function's metrics and `loss`, `grad_norm`, `lr` (that was used),
        `global_valid_seqs`, `global_valid_toks`, `num_optimizer_steps`, `num_skipped_steps` and those by cause,
        `train_flops` (of all ranks together), `train_peak_flops` of their devices per second in bfloat16 if it is
        known, and `moe/...` of a mixture of experts. A step whose loss or gradient is not finite is skipped with a
        warning.

        Raises:
            PolicyError: the batch lacks a key that the loss reads.
        """
        missing = sorted(loss_fn.required_keys - set(batch.keys()))
        if missing:
            raise PolicyError(f"the loss reads {', '.join(missing)}, which the batch does not have")
        self._require("weights", "optimizer")
        lr = float(self._optimizer.param_groups[0]["lr"])
        if keys.RECORDED in batch:
            self._recorded = loss_fn = RecordedLoss(loss_fn)
        parts = micro_batches.split_optimizer_steps(batch[keys.GROUP_ID], self.num_optimizer_steps)
        steps = [self._trainer.optimizer_step(batch, rows, loss_fn) for rows in parts]
        if self._scheduler is not None and not all(step.is_skipped for step in steps):
            self._scheduler.step()
        own = {"lr": lr, "train_flops": self.train_flops(batch), **self._peak_flops(), **self._routing_metrics()}
        return {**reduce_over_optimizer_steps(steps), **own}

    def _peak_flops(self) -> dict[str, float]:
        """Return the operations per second of the ranks' devices; {} for devices that are not known."""
        peaks = peaks_of(name_of_device(self.device))
        return {} if peaks is None else {"train_peak_flops": self.layout.world_size * peaks.flops}

    def _routing_metrics(self) -> dict[str, float]:
        """Return the metrics `moe/...` of the step, the same on every rank; none for a model without experts."""
        return {}

    def recorded_logprobs(self) -> ScoredRows | None:
        """Return the log-probs of the last step's `recorded` rows that this rank has trained on, by their numbers.

        None on a rank without such rows, or if another rank returns them.
        """
        recorded, self._recorded = self._recorded, None
        return None if recorded is None else self._collect(recorded.recorded())

    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the device; a no-op on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def device_bytes(self) -> int:
        """Return the memory of this rank's CUDA device."""
        return memory_of_device()[1]

    def run_with_weights(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> ResultT | None:
        """Call `use` with (name, tensor) pairs on rank 0; the other ranks help to gather them and return None.

        Tensors are gathered one at a time as `use` asks for them, each in memory of its own. On a single rank in
        float32 they are the live weights: do not write to them, and do not keep them until the next training.
        """
        return call_on_rank0(use, self._published(adapter_only=adapter_only), is_rank0=self._is_rank0)

    def run_on_rank(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> ResultT:
        """Call `use` as `run_with_weights` does, on every rank; needs a backend that gathers the weights on all."""
        weights = self._published(adapter_only=adapter_only)
        try:
            return use(weights)
        finally:
            for _ in weights:  # the other ranks gather them too
                pass

    def _published(self, *, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights in the engines' dtype on the policy's device, also with cpu_offload."""
        self._require("weights")
        dtype = torch.float32 if self.config.precision == "float32" else torch.bfloat16
        named = self._named_adapter(dtype) if adapter_only else self._named_weights(dtype)
        return ((name, tensor.to(self.device)) for name, tensor in named)

    def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to write `weights/` in float32, `tokenizer/` and, if asked, `optimizer/`.

        Returns once everything is copied, so that training may continue; an earlier save is finished first. The
        weights' config.json names the policy's precision, which is what loaders use.
        """
        self.finish_save()
        self._require("weights")
        if save_optimizer:
            self._require("optimizer")
        self._start_weights_save(path)
        if self._is_rank0 and self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "tokenizer")
        if not save_optimizer:
            return
        join(self.layout, self.device)
        if self._is_rank0:
            self._save_schedules(path / "optimizer")
        self._start_optimizer_save(path / "optimizer")

    def _save_schedules(self, directory: Path) -> None:
        save_schedule(self._scheduler, directory)

    def _load_schedules(self, directory: Path) -> None:
        load_schedule(self._scheduler, directory)

    def _start_adapter_save(self, adapters: "TrainedAdapters", directory: Path) -> None:
        tensors = self._saving.copy_weights(adapters.tensors(), is_rank0=self._is_rank0)
        if self._is_rank0:
            self._saving.begin_files(adapters.save, tensors, directory)

    def _start_weights_save(self, path: Path) -> None:
        if self._adapters is not None:
            self._start_adapter_save(self._adapters, path / ADAPTER_DIRECTORY)
            if not self._adapters.save_merged:
                return
        copies = self._saving.copy_weights(self._named_weights(torch.float32), is_rank0=self._is_rank0)
        if self._is_rank0:
            self._saving.begin_weights(copies, self._model, path / "weights", config_dtype=self.config.precision)
        if self._is_rank0 and sees(self._model.config):
            from nemo_rl.data.vision import save_processor  # takes a second, and few models need it

            save_processor(self._model_path, path / "weights")
        if self._is_rank0 and self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "weights")

    def has_written_save(self) -> bool:
        """Return whether this rank's part of what `save` began is on disk, or has failed."""
        return self._saving.is_written

    def finish_save(self) -> None:
        """Wait until everything that `save` began is on disk, including the other ranks' files.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._saving.finish()

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, exactly, for any number of ranks.

        Without `optimizer/` the weights alone are loaded, with a warning.

        Raises:
            CheckpointError: no checkpoint there, or one of another model or optimizer.
        """
        self.finish_save()
        self._require("weights", "optimizer")
        self._load_weights(path)
        directory = path / "optimizer"
        seen = self.layout.all_gather_object(directory.exists())  # ranks may see different disks
        if any(seen) and not all(seen):
            missing = [rank for rank, exists in enumerate(seen) if not exists]
            raise CheckpointError(f"{directory} does not exist for ranks {missing}; all ranks must see the same disk")
        if not any(seen):
            logger.warning("%s does not exist: starting with a fresh optimizer and schedule", directory)
            return
        join(self.layout, self.device)
        self._load_optimizer(directory)
        self._load_schedules(directory)

    def start_profile(self, directory: Path, name: str) -> None:
        """Begin a profile of all threads of this process, the device's operations included."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        options = _ExperimentalConfig(profile_all_threads=True)
        self._profile = torch.profiler.profile(activities=activities, experimental_config=options)
        self._profile_path = directory / f"{name}_policy_rank{self.layout.rank}.json.gz"
        self._profile.start()

    def stop_profile(self) -> None:
        """Write the profile that `start_profile` has begun."""
        assert self._profile is not None
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._profile_path))
        self._profile = None

    def close(self) -> None:
        """Finish the running save. The process stays in its process group."""
        self._saving.close()

    def train_flops(self, batch: TrainingBatch) -> float:
        """Return the floating-point operations of training on a batch once, over all ranks."""
        return train_flops(self._num_matmul_parameters, self._model.config, batch[keys.LENGTHS].tolist())

    @property
    def _scoring_batching(self) -> micro_batches.MicroBatching:
        return micro_batches.scoring_micro_batching(self.config)

    @property
    def _is_rank0(self) -> bool:
        return self.layout.rank == 0


class TeacherWorker(ScoringWorker[TeacherConfig]):
    """A frozen teacher on one rank of a layout: weights are in `precision`, dropout is off.

    Args:
        config: the section of a teacher; the number of ranks is that of `layout`, not of the section.
        section: its key, for errors.
        layout: this rank's position, and how it finds the others.
        model_path: a Hugging Face name or a directory that every rank can read.
        temperature: of the policy's sampling; the logits are divided by it.

    Raises:
        ConfigError: a model, override, device or layout that is not available.
        PolicyError: the other ranks did not join before the deadline.
    """

    _frozen_parts = ("weights",)

    def __init__(
        self, config: TeacherConfig, *, section: str, layout: RankLayout, model_path: str, temperature: float
    ) -> None:
        self.config = config
        self._section = section
        self.layout = layout
        self.device = resolve_device(config.device)
        prepare_allocator(self.device)
        if layout.world_size > 1:  # a process of its own
            allow_bfloat16_units()
        self._build_model(model_path, temperature=temperature)

    @property
    def _scoring_batching(self) -> micro_batches.MicroBatching:
        return micro_batches.teacher_micro_batching(self.config, self._section)

    @abstractmethod
    def _build_model(self, model_path: str, *, temperature: float) -> None:
        """Make the model; the last step of the constructor."""


def call_on_rank0(
    use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT],
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    is_rank0: bool,
) -> ResultT | None:
    """Return the result of `use` on rank 0 and None on the other ranks, which only take part in gathering.

    All weights are gathered even when `use` stops before the last one or raises.
    """
    try:
        return use(weights) if is_rank0 else None
    finally:
        for _ in weights:
            pass


def make_policy_worker(config: PolicyConfig, **arguments: Any) -> PolicyWorker:
    """Return a policy worker of the chosen backend; `arguments` are those of `PolicyWorker` but `config`."""
    section = config.parallelism
    return config.BACKENDS.entry(section.backend, key="policy.backend").make(section, config, **arguments)


def make_teacher_worker(config: TeacherConfig, *, section: str, **arguments: Any) -> TeacherWorker:
    """Return a teacher worker of the chosen backend; `arguments` are those of `TeacherWorker` but `config`."""
    chosen = config.parallelism
    entry = config.BACKENDS.entry(chosen.backend, key=f"{section}.backend")
    return entry.make(chosen, config, section=section, **arguments)
