"""The policy and teacher workers on Megatron-core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.interfaces import RequiredScores, TokenScores
from nemo_rl.policy.hf_model import load_config, load_model, matmul_parameters, recompute_activations
from nemo_rl.policy.megatron.backend import MegatronConfig, TrainedMegatronConfig, to_torch_config
from nemo_rl.policy.megatron.model import Stage, transformer_config
from nemo_rl.policy.megatron.optimizer import MainWeights, OptimizerState
from nemo_rl.policy.megatron.parallel import make_groups
from nemo_rl.policy.megatron.training import MegatronTrainer, score
from nemo_rl.policy.megatron.weights import StageWeights
from nemo_rl.policy.micro_batches import scoring_micro_batching, teacher_micro_batching, training_micro_batching
from nemo_rl.policy.optim import make_optimizer, make_scheduler
from nemo_rl.policy.worker import PolicyWorker, TeacherWorker
from nemo_rl.types import TrainingBatch


def make_stage(
    model: PreTrainedModel, config: PolicyConfig | TeacherConfig, *, temperature: float, device: torch.device
) -> Stage:
    """Make a rank's stage without weights, which `stage_weights` loads; it computes in `precision`."""
    base: Any = model.base_model
    settings = transformer_config(model.config, config, device)
    stage = Stage(
        settings,
        model.config,
        inverse_frequencies=base.rotary_emb.inv_freq,
        temperature=temperature,
        chunk_size=config.logprob_chunk_size,
        is_packed=config.sequence_packing.enabled,
    )
    for parameter in stage.parameters():  # torch's norms are made in float32
        parameter.data = parameter.data.to(device, settings.params_dtype)
    return stage.to(device)


def stage_weights(stage: Stage, model: PreTrainedModel) -> StageWeights:
    """Return the weights of the model that the stage holds."""
    return StageWeights(stage, model.config, {name: tensor.shape for name, tensor in model.state_dict().items()})


def frozen_stage(
    model: PreTrainedModel, config: PolicyConfig | TeacherConfig, *, temperature: float, device: torch.device
) -> Stage:
    """Make a stage with the model's weights, in `precision` and without gradients."""
    stage = make_stage(model, config, temperature=temperature, device=device).requires_grad_(False)
    stage_weights(stage, model).load(model.state_dict(), lambda parameter: parameter)
    return stage


class MegatronPolicyWorker(PolicyWorker):
    """The model on one rank of a layout, by Megatron-core: tensor, pipeline and data parallel.

    It computes in `precision` and steps float32 weights. Megatron's process groups, and the CPU's substitute for CUDA
    (parallel.py), are global to a process, hence a process of its own.

    Arguments and errors are those of `PolicyWorker`.
    """

    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        config, layout, section = self.config, self.layout, self.config.section_of(TrainedMegatronConfig)
        section.check_model(load_config(model_path, config.hf_config_overrides), key="policy.megatron_cfg")
        make_groups(layout, self.device)
        model = load_model(model_path, config.hf_config_overrides)
        self._num_matmul_parameters = matmul_parameters(model)
        stage = make_stage(model, config, temperature=temperature, device=self.device)
        self._weights = stage_weights(stage, model)
        self._main = MainWeights(stage, counts_in_norm=self._weights.counts_in_norm)
        self._weights.load(model.state_dict(), self._main.of)
        self._main.copy_to_model()
        self._reference = None
        if needs_reference:
            self._reference = frozen_stage(model, config, temperature=temperature, device=self.device)
        if section.activation_checkpointing:
            recompute_activations(stage.decoder.layers)
        self._model: PreTrainedModel = cast(nn.Module, model).to("meta")  # pyright: ignore[reportAttributeAccessIssue]
        self.module = stage
        self._distributed = _data_parallel(stage, config)
        torch_names = to_torch_config(config)
        groups = self._main.groups(with_decay_of_all=section.optimizer is None)
        self._optimizer = make_optimizer(torch_names, groups)
        self._scheduler = make_scheduler(torch_names, self._optimizer)
        self._state = OptimizerState(self._optimizer, self._main, self._weights, layout)
        self._trainer = MegatronTrainer(
            module=self._distributed,
            main=self._main,
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
        return score(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        if self.layout.data_parallel_rank > 0:
            return iter(())
        return self._weights.all(self._main.of, dtype)

    def _load_weights(self, path: Path) -> None:
        directory = path / "weights"
        try:
            saved = load_model(str(directory), {}).state_dict()
        except ConfigError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        shapes = {name: tensor.shape for name, tensor in saved.items()}
        if shapes != self._weights.shapes:
            raise CheckpointError(f"{directory} holds another model")
        self._weights.load(saved, self._main.of)
        self._main.copy_to_model()

    def _start_optimizer_save(self, directory: Path) -> None:
        self._saving.begin_state(self._state.whole(), directory)

    def _load_optimizer(self, directory: Path) -> None:
        self._state.load(directory)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        is_leaving = device.type == "cpu"
        if is_leaving:
            self._distributed.offload_grad_buffers(empty_cache=False)  # between steps they hold nothing
        for stage in (self.module, self._reference):
            if stage is not None:
                stage.to(device)
        self._main.move(device)
        for kept in self._optimizer.state.values():
            for name, value in kept.items():
                if isinstance(value, torch.Tensor):
                    kept[name] = value.to(device)
        if is_leaving:
            torch.cuda.empty_cache()
        else:
            self._distributed.restore_grad_buffers()


def _data_parallel(stage: Stage, config: PolicyConfig) -> DistributedDataParallel:
    section = config.section_of(TrainedMegatronConfig).distributed_data_parallel_config
    distributed = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=section.grad_reduce_in_fp32,
            overlap_grad_reduce=section.overlap_grad_reduce,
        ),
        stage,
    )
    if section.overlap_grad_reduce:
        stage.config.no_sync_func = distributed.no_sync
    return distributed


class MegatronTeacherWorker(TeacherWorker):
    """A teacher by tensor, pipeline and data parallelism, in a process of its own.

    Arguments and errors are those of `TeacherWorker`.
    """

    def _build_model(self, model_path: str, *, temperature: float) -> None:
        config, section = self.config, self._section
        model_config = load_config(model_path, config.hf_config_overrides, section=section)
        config.section_of(MegatronConfig).check_model(model_config, key=f"{section}.megatron_cfg")
        make_groups(self.layout, self.device)
        model = load_model(model_path, config.hf_config_overrides, section=section)
        self.module = frozen_stage(model, config, temperature=temperature, device=self.device)
        self._model: PreTrainedModel = cast(nn.Module, model).to("meta")  # pyright: ignore[reportAttributeAccessIssue]

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = teacher_micro_batching(self.config, self._section)
        return score(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        self.module.to(device)
        torch.cuda.empty_cache()
