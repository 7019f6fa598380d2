"""`PolicyWorker`: one rank of the policy, whichever backend computes."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.machine import resolve_device
from nemo_rl.errors import CheckpointError, PolicyError
from nemo_rl.interfaces import LossFn, RequiredScores, TokenScores, TopK
from nemo_rl.policy.logprobs import LOGPROBS_ONLY
from nemo_rl.policy.micro_batches import MicroBatching, expected_optimizer_steps, micro_batches, split_optimizer_steps
from nemo_rl.policy.ranks import RankLayout, join
from nemo_rl.policy.saving import BackgroundSave, call_on_rank0, copy_weights_to_cpu, load_schedule, save_schedule
from nemo_rl.policy.training import OptimizerStep, reduce_over_optimizer_steps
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


def matmul_parameters(model: nn.Module) -> int:
    """Weights that every token is multiplied with: all but an embedding table that is only looked up.

    A frozen one counts as two thirds: of its 6 operations a token it has no 2 for a gradient of its own.
    """
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            tables.pop(id(module.weight), None)  # tied: the output head multiplies with it
    counted = (p for p in model.parameters() if id(p) not in tables)
    return round(sum(p.numel() * (1 if p.requires_grad else 2 / 3) for p in counted))


def train_flops(num_parameters: int, config: PreTrainedConfig, lengths: Iterable[int]) -> float:
    """Operations of one forward and backward over sequences of these lengths, causal attention included.

    6 N a token for the weights (2 forward, 4 backward) and 6 L H T^2 a sequence for attention, with L layers and H the
    width of all heads together: forward 2 T^2 H for the scores and 2 T^2 H for the values, half of both under a causal
    mask, three times that with the backward. Recomputation is not counted; nor is it known which of a mixture's
    experts were used, so there the number is an upper bound.

    Example: N = 1000, L = 2, H = 8, one sequence of 10 tokens: 6*1000*10 + 6*2*8*100 = 69600.
    """
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    width = num_heads * (getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    lengths = list(lengths)
    attention = 6 * text.num_hidden_layers * width * sum(n * n for n in lengths)
    return float(6 * num_parameters * sum(lengths) + attention)


class ScoringWorker(ABC):
    """A model on one rank of a layout, which shares the rows of a batch with the others.

    Every method is collective: it is called on all ranks, in the same order, with the same arguments, and a batch is
    the whole batch, of which a rank computes its rows.
    """

    module: nn.Module
    device: torch.device
    layout: RankLayout
    _model: PreTrainedModel  # Hugging Face's, for its configuration; its weights need not be there

    @abstractmethod
    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        """This rank's rows and their scores, without gradients, a micro-batch at a time."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Everything that lies on the accelerator."""

    def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T] float32 on the CPU: log_softmax(logits / temperature) of the tokens with a mask, else 0.

        The whole batch's, on every rank.
        """
        return self._logprobs(self.module, batch)

    def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """The k most likely tokens before each token with a mask, and their log-probs: [B, T, k] on the CPU.

        Raises:
            PolicyError: k is above the vocabulary.
        """
        size = self._model.config.get_text_config().vocab_size
        if not 0 < k <= size:
            raise PolicyError(f"the {k} most likely of {size} tokens")
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for rows, scores in self._iter_scores(self.module, batch, RequiredScores(topk=k)):
            assert scores.topk is not None
            length = scores.logprobs.shape[1]
            ids[rows, :length], logprobs[rows, :length] = scores.topk.ids.cpu(), scores.topk.logprobs.cpu()
        return TopK(self._sum_over_ranks(ids), self._sum_over_ranks(logprobs))

    def offload(self) -> None:
        """Move everything off the accelerator. Nothing on a CPU, or where it lives on the CPU anyway."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _logprobs(self, module: nn.Module, batch: TrainingBatch) -> torch.Tensor:
        result = torch.zeros(batch[keys.TOKEN_IDS].shape, dtype=torch.float32)
        for rows, scores in self._iter_scores(module, batch, LOGPROBS_ONLY):
            result[rows, : scores.logprobs.shape[1]] = scores.logprobs.cpu()
        return self._sum_over_ranks(result)

    def _sum_over_ranks(self, result: torch.Tensor) -> torch.Tensor:
        """The rows of every rank, each of which has filled in its own."""
        return self.layout.all_reduce_sum(result if self.layout.is_dp_leader else result.zero_())


@torch.no_grad()
def score_micro_batches(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching | int,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """A rank's rows of a batch and their scores, micro-batches of `size` at a time; `module` is a CausalLogprobs."""
    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
    for rows, part in micro_batches(inputs, torch.arange(len(batch)), size, layout):
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        scores = module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, wanted, lengths=lengths)
        if len(rows) > 0:
            yield rows, scores


ResultT = TypeVar("ResultT")


class SupportsOptimizerStep(Protocol):
    """Learns from some rows of a batch once; what is reported is the same on every rank."""

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep: ...


class PolicyWorker(ScoringWorker):
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
    _trainer: SupportsOptimizerStep

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
        self._build_model(model_path, temperature=temperature, needs_reference=needs_reference, seed=seed)

    @abstractmethod
    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        """The model, its reference, and what trains it: the last step of the constructor."""

    @abstractmethod
    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) on the first rank; on the others, something for each that is gathered."""

    @abstractmethod
    def _load_weights(self, path: Path) -> None:
        """Those of a checkpoint. Raises CheckpointError: no weights there, or of another model."""

    @abstractmethod
    def _start_optimizer_save(self, directory: Path) -> None: ...

    @abstractmethod
    def _load_optimizer(self, directory: Path) -> None:
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
        return {**reduce_over_optimizer_steps(steps), "lr": lr, "train_flops": self.train_flops(batch)}

    def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT | None:
        """Call `use` with (name, tensor) pairs on the first rank; the others help to gather them and get None.

        Each tensor is gathered when its turn comes. Alone in float32 they are the weights themselves: copy, do not
        keep.
        """
        dtype = torch.float32 if self.config.precision == "float32" else torch.bfloat16
        return call_on_rank0(use, self._named_weights(dtype), is_rank0=self._is_rank0)

    def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to write `weights/` in float32 (config.json names the policy's precision, which loaders follow),
        `tokenizer/` and, if asked, `optimizer/`. Returns once all is copied, so that training may go on; an earlier
        save is finished first."""
        self.finish_save()
        self._start_weights_save(path)
        if self._is_rank0 and self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "tokenizer")
        if not save_optimizer:
            return
        join(self.layout, self.device)
        if self._is_rank0:
            save_schedule(self._scheduler, path / "optimizer")
        self._start_optimizer_save(path / "optimizer")

    def _start_weights_save(self, path: Path) -> None:
        copies = copy_weights_to_cpu(self._named_weights(torch.float32), is_rank0=self._is_rank0)
        if self._is_rank0:
            self._saving.begin_weights(copies, self._model, path / "weights", config_dtype=self.config.precision)
        if self._is_rank0 and self._tokenizer is not None:
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
        directory = path / "optimizer"
        seen = self.layout.all_gather_object(directory.exists())  # on a shared disk not all need see the same
        if any(seen) and not all(seen):
            raise CheckpointError(
                f"{directory} is not there for ranks {[r for r, there in enumerate(seen) if not there]}"
            )
        if not any(seen):
            logger.warning("%s does not exist: optimizer and schedule start afresh", directory)
            return
        join(self.layout, self.device)
        self._load_optimizer(directory)
        load_schedule(self._scheduler, directory)

    def close(self) -> None:
        """Finish what is being saved. The process stays in its group."""
        self._saving.close()

    def train_flops(self, batch: TrainingBatch) -> float:
        """Floating-point operations of training on a batch once, over all ranks."""
        return train_flops(self._num_matmul_parameters, self._model.config, batch[keys.LENGTHS].tolist())

    @property
    def _is_rank0(self) -> bool:
        return self.layout.rank == 0
