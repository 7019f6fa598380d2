"""The policy and teacher workers on FSDP2 and DTensor.

Policy weights are float32 and computation is in `precision`; teacher weights are in `precision`. FSDP2 wraps the model
where it is of use: on several ranks, on CUDA, and for the casts of bfloat16. A single float32 rank on a CPU runs the
bare model. Dropout is always off, so that the same weights always give the same log-probs.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.interfaces import RequiredScores, TokenScores
from nemo_rl.policy.fsdp2.backend import DTensorConfig, TrainedDTensorConfig, check_tensor_parallel
from nemo_rl.policy.fsdp2.lora import DIRECTORY as ADAPTER_DIRECTORY
from nemo_rl.policy.fsdp2.lora import Adapters, AdaptersDisabled
from nemo_rl.policy.fsdp2.sharding import frozen_needs_sharding, needs_sharding, shard
from nemo_rl.policy.fsdp2.training import FSDP2Trainer, score_micro_batches
from nemo_rl.policy.fsdp2.weights import load_weights, named_weights
from nemo_rl.policy.hf_model import decoder_layers, load_config, load_model, matmul_parameters, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import scoring_micro_batching, teacher_micro_batching, training_micro_batching
from nemo_rl.policy.optim import make_optimizer, make_scheduler
from nemo_rl.policy.saving import copy_weights_to_cpu, load_optimizer
from nemo_rl.policy.worker import PolicyWorker, TeacherWorker
from nemo_rl.types import TrainingBatch


def make_policy_worker(options: TrainedDTensorConfig, /, config: PolicyConfig, **arguments: Any) -> "FSDP2PolicyWorker":
    """Return a policy worker; the factory of the entry `FSDP2`."""
    return FSDP2PolicyWorker(config, **arguments)


def make_teacher_worker(options: DTensorConfig, /, config: TeacherConfig, **arguments: Any) -> "FSDP2TeacherWorker":
    """Return a teacher worker; the factory of the entry `FSDP2_TEACHER`."""
    return FSDP2TeacherWorker(config, **arguments)


class FSDP2PolicyWorker(PolicyWorker):
    """The policy on one rank, by FSDP2 and DTensor.

    The reference is a frozen copy; with adapters, the policy without them. Arguments and errors are those of
    `PolicyWorker`.
    """

    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        config, layout, section = self.config, self.layout, self.config.section_of(TrainedDTensorConfig)
        if layout.tensor_parallel_size > 1:
            check_tensor_parallel(layout.tensor_parallel_size, load_config(model_path, config.hf_config_overrides))
        model = load_model(model_path, config.hf_config_overrides)
        self._model = model
        self._adapters = None
        if section.lora_cfg.enabled:
            self._adapters = Adapters(model, section.lora_cfg, base=model_path, seed=seed)
        self._num_matmul_parameters = matmul_parameters(model)
        self.module = CausalLogprobs(
            model,
            temperature=temperature,
            chunk_size=config.logprob_chunk_size,
            packing_key="policy.sequence_packing.enabled" if config.sequence_packing.enabled else None,
        )
        self._reference = self._make_reference() if needs_reference else None
        if section.activation_checkpointing:
            recompute_activations(decoder_layers(model))
        if needs_sharding(config, layout, self.device):
            shard(self.module, config, layout, self.device)  # moves it to the device, unless weights are offloaded
        self._optimizer = make_optimizer(config, [p for p in self.module.parameters() if p.requires_grad])
        self._scheduler = make_scheduler(config, self._optimizer)
        self._trainer = FSDP2Trainer(
            module=self.module,
            device=self.device,
            optimizer=self._optimizer,
            batching=training_micro_batching(config),
            max_grad_norm=config.max_grad_norm,
            layout=layout,
        )

    def _make_reference(self) -> nn.Module:
        """Return the initial model: adapters leave it unchanged, otherwise it is copied."""
        return self._frozen_copy() if self._adapters is None else AdaptersDisabled(self.module, self._adapters)

    def _frozen_copy(self) -> nn.Module:
        """Return a copy of the model in the precision of its computation; buffers, e.g. rotary frequencies, stay
        float32."""
        module = copy.deepcopy(self.module).requires_grad_(False)
        if self.config.precision == "bfloat16":
            _cast_parameters(module)
        if not frozen_needs_sharding(self.config, self.layout, self.device):
            return module.to(self.device)
        shard(module, self.config, self.layout, self.device)
        return module

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
            if not self.config.section_of(TrainedDTensorConfig).lora_cfg.save_merged:
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

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.section_of(DTensorConfig).cpu_offload:
            return
        for module in (self.module, self._reference):
            if module is not None:
                module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)
        torch.cuda.empty_cache()


class FSDP2TeacherWorker(TeacherWorker):
    """A teacher on one rank, by FSDP2 and DTensor. Arguments and errors are those of `TeacherWorker`."""

    def _build_model(self, model_path: str, *, temperature: float) -> None:
        config, layout, section = self.config, self.layout, self._section
        if layout.tensor_parallel_size > 1:
            model_config = load_config(model_path, config.hf_config_overrides, section=section)
            check_tensor_parallel(layout.tensor_parallel_size, model_config, key=f"{section}.dtensor_cfg")
        self._model = load_model(model_path, config.hf_config_overrides, section=section)
        module = CausalLogprobs(
            self._model,
            temperature=temperature,
            chunk_size=config.logprob_chunk_size,
            packing_key=f"{section}.sequence_packing.enabled" if config.sequence_packing.enabled else None,
        )
        self.module = module.requires_grad_(False)
        if config.precision == "bfloat16":
            _cast_parameters(self.module)
        if frozen_needs_sharding(config, layout, self.device):
            shard(self.module, config, layout, self.device)  # moves it to the device, unless weights are offloaded
        else:
            self.module.to(self.device)

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = teacher_micro_batching(self.config, self._section)
        return score_micro_batches(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.section_of(DTensorConfig).cpu_offload:
            return
        self.module.to(device)
        torch.cuda.empty_cache()


def _cast_parameters(module: nn.Module) -> None:
    """Cast parameters, but not buffers, to bfloat16."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
