"""`FSDP2Policy`: trains a Hugging Face causal model under FSDP2, in this process, on a thread of its own."""

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.config.policy import Policy
from nemo_rl.errors import CheckpointError, ConfigError, PolicyError
from nemo_rl.interfaces import LossFn
from nemo_rl.policy.flops import matmul_parameters, train_flops
from nemo_rl.policy.hf_export import copy_weights, named_weights, save_weights
from nemo_rl.policy.hf_model import load_model, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import expected_optimizer_steps, micro_batches, split_optimizer_steps
from nemo_rl.policy.optim import make_optimizer, make_scheduler
from nemo_rl.policy.sharding import needs_sharding, shard
from nemo_rl.policy.thread import PolicyThread
from nemo_rl.policy.training import Trainer, over_optimizer_steps
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class FSDP2Policy:
    """The trained model on one rank; satisfies `interfaces.Policy`.

    Weights are float32 and computation is in `precision`. FSDP2 wraps the model where it does something: on CUDA, and
    for bfloat16, whose casts it does; float32 on a CPU is the bare model. Dropout is always off, so that the same
    weights give the same log-probs whenever they are asked.

    Args:
        config: the section `policy`.
        model_path: a Hugging Face name or a folder; the reference's weights too.
        temperature: of sampling; the logits are divided by it.
        needs_reference: keep a frozen copy of the first weights for `reference_logprobs`.
        num_samples_per_step: samples expected in a batch; with `train_global_batch_size`, the optimizer steps of one.
        seed: of torch's random numbers, for optimizers that draw some.
        tokenizer: saved beside the weights; None: nothing is.

    Raises:
        ConfigError: a model, override, optimizer, schedule or device that cannot be had.
    """

    def __init__(
        self,
        config: Policy,
        *,
        model_path: str,
        temperature: float,
        needs_reference: bool,
        num_samples_per_step: int,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.num_optimizer_steps = expected_optimizer_steps(num_samples_per_step, config.train_global_batch_size)
        self._model_path = model_path
        self._temperature = temperature
        self._tokenizer = tokenizer
        self._thread = PolicyThread()
        try:
            self._thread.run_blocking(self._build, needs_reference, seed)
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T] float32 on the CPU: log_softmax(logits / temperature) of the tokens with a mask, else 0."""
        return await self._thread.run(self._logprobs, self._module, batch)

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """The same under the weights that training began with, also after `load`."""
        if self._reference is None:
            raise PolicyError("the policy was made without a reference")
        return await self._thread.run(self._logprobs, self._reference, batch)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        """All optimizer steps of one batch, each over whole groups; then one step of the schedule.

        Returns the loss function's metrics and `loss`, `grad_norm`, `lr` (that was used), `global_valid_seqs`,
        `global_valid_toks`, `num_optimizer_steps`, `num_skipped_steps`, `train_flops`. A step whose gradient is not
        finite is skipped with a warning.

        Raises:
            PolicyError: the batch lacks a key that the loss reads.
        """
        missing = sorted(loss_fn.required_keys - set(batch.keys()))
        if missing:
            raise PolicyError(f"the loss reads {', '.join(missing)}, which the batch does not have")
        return await self._thread.run(self._train_step, batch, loss_fn)

    async def with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` on the policy's thread; float32 tensors are the weights themselves: copy, do not keep."""
        dtype = torch.float32 if self.config.precision == "float32" else torch.bfloat16
        return await self._thread.run(lambda: use(named_weights(self._model, dtype)))

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Write `weights/` in float32 (config.json names the policy's precision, which loaders follow), `tokenizer/`
        and, if asked, `optimizer/optimizer.pt` with the state of optimizer and schedule."""
        await self._thread.run(self._save, Path(path), save_optimizer)

    async def load(self, path: Path) -> None:
        """Go on from what `save` wrote, exactly; without `optimizer/` from the weights alone, with a warning.

        Raises:
            CheckpointError: nothing there, or of another model.
        """
        await self._thread.run(self._load, Path(path))

    async def offload(self) -> None:
        await self._thread.run(self._move, torch.device("cpu"))

    async def onload(self) -> None:
        await self._thread.run(self._move, self.device)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._thread.close()

    def train_flops(self, batch: TrainingBatch) -> float:
        """Floating-point operations of training on a batch once."""
        return train_flops(self._num_matmul_parameters, self._model.config, batch[keys.LENGTHS].tolist())

    def _build(self, needs_reference: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self._model: PreTrainedModel = load_model(self._model_path, self.config.hf_config_overrides)
        self._num_matmul_parameters = matmul_parameters(self._model)
        self._reference = self._frozen_copy() if needs_reference else None
        self._module = self._logprobs_of(self._model)
        if self.config.dtensor_cfg.activation_checkpointing:
            recompute_activations(self._model)
        if needs_sharding(self.config, self.device):
            shard(self._module, self.config, self.device)
        self._optimizer = make_optimizer(self.config, self._module.parameters())
        self._scheduler = make_scheduler(self.config, self._optimizer)
        self._trainer = Trainer(
            module=self._module,
            device=self.device,
            optimizer=self._optimizer,
            micro_batch_size=self.config.train_micro_batch_size,
            max_grad_norm=self.config.max_grad_norm,
        )

    def _frozen_copy(self) -> CausalLogprobs:
        """The model as it is, in the precision it is computed in (buffers such as rotary frequencies stay float32)."""
        module = self._logprobs_of(copy.deepcopy(self._model)).requires_grad_(False)
        if self.config.precision == "bfloat16":
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return module

    def _logprobs_of(self, model: PreTrainedModel) -> CausalLogprobs:
        module = CausalLogprobs(model, temperature=self._temperature, chunk_size=self.config.logprob_chunk_size)
        return module.to(self.device)

    @torch.no_grad()
    def _logprobs(self, module: CausalLogprobs, batch: TrainingBatch) -> torch.Tensor:
        result = torch.zeros(batch[keys.TOKEN_IDS].shape, dtype=torch.float32)
        size = self.config.logprob_batch_size or self.config.train_micro_batch_size
        inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
        for rows, part in micro_batches(inputs, torch.arange(len(result)), size):
            part = part.to(self.device)
            logprobs = module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0)
            result[rows, : logprobs.shape[1]] = logprobs.cpu()
        return result

    def _train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        lr = float(self._optimizer.param_groups[0]["lr"])
        parts = split_optimizer_steps(batch[keys.GROUP_ID], self.num_optimizer_steps)
        steps = [self._trainer.optimizer_step(batch, rows, loss_fn) for rows in parts]
        if self._scheduler is not None and not all(step.is_skipped for step in steps):
            self._scheduler.step()
        return {**over_optimizer_steps(steps), "lr": lr, "train_flops": self.train_flops(batch)}

    def _save(self, path: Path, save_optimizer: bool) -> None:
        save_weights(self._model, path / "weights", config_dtype=self.config.precision)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(path / "weights")
            self._tokenizer.save_pretrained(path / "tokenizer")
        if not save_optimizer:
            return
        state: dict[str, Any] = {
            "optimizer": get_optimizer_state_dict(self._module, self._optimizer, options=_whole_state()),
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
        }
        (path / "optimizer").mkdir(parents=True, exist_ok=True)
        torch.save(state, path / "optimizer" / "optimizer.pt")

    def _load(self, path: Path) -> None:
        try:
            saved = load_model(str(path / "weights"), {})
        except ConfigError as error:
            raise CheckpointError(f"{path / 'weights'}: {error}") from error
        self._load_optimizer(path / "optimizer" / "optimizer.pt")
        try:
            copy_weights(saved, self._model)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path / 'weights'} holds another model: {error}") from error

    def _load_optimizer(self, file: Path) -> None:
        if not file.exists():
            logger.warning("%s does not exist: optimizer and schedule start afresh", file)
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        set_optimizer_state_dict(self._module, self._optimizer, state["optimizer"], options=_whole_state())
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.dtensor_cfg.cpu_offload:
            return
        for module in (self._module, self._reference):
            if module is not None:
                module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
        torch.cuda.empty_cache()


def resolve_device(name: str) -> torch.device:
    """`policy.device`: auto is CUDA where there is one."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("policy.device", name, "this machine has no CUDA device")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _whole_state() -> StateDictOptions:
    """Full tensors on the CPU under the parameters' names, whatever the number of ranks."""
    return StateDictOptions(full_state_dict=True, cpu_offload=True)
