"""`LocalPolicy`: the policy in this process, one rank on a thread of its own."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.interfaces import LossFn, RequiredScores, TokenScores, TopK
from nemo_rl.policy.base_rank import PolicyWorker, matmul_parameters, score_micro_batches
from nemo_rl.policy.hf_model import decoder_layers, load_config, load_model, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.lora import DIRECTORY as ADAPTER_DIRECTORY
from nemo_rl.policy.lora import Adapters, AdaptersDisabled
from nemo_rl.policy.micro_batches import scoring_micro_batching, training_micro_batching
from nemo_rl.policy.optim import make_optimizer, make_scheduler
from nemo_rl.policy.ranks import SINGLE_RANK, PolicyThread, RankLayout
from nemo_rl.policy.saving import copy_weights_to_cpu, load_optimizer, load_weights, named_weights
from nemo_rl.policy.sharding import check_tensor_parallel, frozen_needs_sharding, needs_sharding, shard
from nemo_rl.policy.training import Trainer
from nemo_rl.types import TrainingBatch


class FSDP2PolicyWorker(PolicyWorker):
    """The model on one rank of a layout, by FSDP2 and DTensor.

    Weights are float32 and computation is in `precision`. FSDP2 wraps the model where it does something: among several
    ranks, on CUDA, and for bfloat16, whose casts it does; float32 alone on a CPU is the bare model. Dropout is always
    off, so that the same weights give the same log-probs whenever they are asked.

    Arguments and errors are those of `PolicyWorker`. The reference is a copy; with adapters, the policy without them.
    """

    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        config, layout = self.config, self.layout
        if layout.tensor_parallel_size > 1:
            check_tensor_parallel(layout.tensor_parallel_size, load_config(model_path, config.hf_config_overrides))
        model = load_model(model_path, config.hf_config_overrides)
        self._model = model
        self._adapters = None
        if config.dtensor_cfg.lora_cfg.enabled:
            self._adapters = Adapters(model, config.dtensor_cfg.lora_cfg, base=model_path, seed=seed)
        self._num_matmul_parameters = matmul_parameters(model)
        self.module = CausalLogprobs(
            model,
            temperature=temperature,
            chunk_size=config.logprob_chunk_size,
            packing_key="policy.sequence_packing.enabled" if config.sequence_packing.enabled else None,
        )
        self._reference = self._make_reference() if needs_reference else None
        if config.dtensor_cfg.activation_checkpointing:
            recompute_activations(decoder_layers(model))
        if needs_sharding(config, layout, self.device):
            shard(self.module, config, layout, self.device)  # and bring it to the device, or leave it off
        self._optimizer = make_optimizer(config, [p for p in self.module.parameters() if p.requires_grad])
        self._scheduler = make_scheduler(config, self._optimizer)
        self._trainer = Trainer(
            module=self.module,
            device=self.device,
            optimizer=self._optimizer,
            batching=training_micro_batching(config),
            max_grad_norm=config.max_grad_norm,
            layout=layout,
        )

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = scoring_micro_batching(self.config)
        return score_micro_batches(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self._model, dtype, adapter_scale=self._adapters.scale if self._adapters else None)

    def _start_weights_save(self, path: Path) -> None:
        if self._adapters is not None:
            copies = copy_weights_to_cpu(self._adapters.tensors(), is_rank0=self._is_rank0)
            if self._is_rank0:
                self._saving.begin_files(self._adapters.save, copies, path / ADAPTER_DIRECTORY)
            if not self.config.dtensor_cfg.lora_cfg.save_merged:
                return
        super()._start_weights_save(path)

    def _load_weights(self, path: Path) -> None:
        if self._adapters is None:
            load_weights(self._model, path / "weights")
        else:
            self._adapters.load(path / ADAPTER_DIRECTORY)

    def _start_optimizer_save(self, directory: Path) -> None:
        self._saving.begin_optimizer(self.module, self._optimizer, directory)

    def _load_optimizer(self, directory: Path) -> None:
        load_optimizer(self.module, self._optimizer, directory)

    def _make_reference(self) -> nn.Module:
        """The model that training begins with: under adapters it stays as it is, else it is copied."""
        return self._frozen_copy() if self._adapters is None else AdaptersDisabled(self.module, self._adapters)

    def _frozen_copy(self) -> nn.Module:
        """The model as it is, in the precision it is computed in (buffers such as rotary frequencies stay float32).

        Among several ranks, and where weights are kept off the GPU, FSDP2 holds it as it does the policy; else there is
        nothing that it would do.
        """
        module = copy.deepcopy(self.module).requires_grad_(False)
        if self.config.precision == "bfloat16":
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if not frozen_needs_sharding(self.config, self.layout, self.device):
            return module.to(self.device)
        shard(module, self.config, self.layout, self.device)
        return module

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.dtensor_cfg.cpu_offload:
            return
        for module in (self.module, self._reference):
            if module is not None:
                module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
        torch.cuda.empty_cache()


ResultT = TypeVar("ResultT")


class LocalPolicy:
    """A `FSDP2PolicyWorker` whose calls leave the event loop free; satisfies `interfaces.PolicyConfig`.

    The arguments are those of `PolicyWorker`; without a layout it is a rank alone.
    """

    def __init__(self, config: PolicyConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        self._thread = PolicyThread()
        try:
            self._worker = self._thread.run_blocking(partial(FSDP2PolicyWorker, config, layout=layout, **arguments))
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._worker.logprobs, batch)

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._worker.reference_logprobs, batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._thread.run(self._worker.topk_logprobs, batch, k)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._thread.run(self._worker.train_step, batch, loss_fn)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` on the policy's thread."""
        return cast(ResultT, await self._thread.run(self._worker.run_with_weights, use))

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        await self._thread.run(partial(self._worker.save, Path(path), save_optimizer=save_optimizer))

    async def finish_save(self) -> None:
        await self._thread.run(self._worker.finish_save)

    async def load(self, path: Path) -> None:
        await self._thread.run(self._worker.load, Path(path))

    async def offload(self) -> None:
        await self._thread.run(self._worker.offload)

    async def onload(self) -> None:
        await self._thread.run(self._worker.onload)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        try:
            await self._thread.run(self._worker.close)
        finally:
            self._thread.close()
