"""The policy and teacher workers on Megatron-core."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig, TeacherConfig, resolve_chunk_size
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.interfaces import LossFn, OffloadPart
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores, TopK
from nemo_rl.policy import optimizers, step_report
from nemo_rl.policy.adapter_files import DIRECTORY as ADAPTER_DIRECTORY
from nemo_rl.policy.batch_transfer import ScoredRows
from nemo_rl.policy.context_parallel import context_ranks, sliced_tokens
from nemo_rl.policy.hf_model import (
    ModelTensors,
    empty_model,
    load_config,
    matmul_parameters,
    open_tensors,
    recompute_activations,
    tensors_of_files,
)
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.backend import MegatronConfig, TrainedMegatronConfig
from nemo_rl.policy.megatron.balance import StageBalance, routed_tokens
from nemo_rl.policy.megatron.experts import freeze_routers
from nemo_rl.policy.megatron.kernels import choose_kernels
from nemo_rl.policy.megatron.lora import StageAdapters
from nemo_rl.policy.megatron.mixtures import read_mixture
from nemo_rl.policy.megatron.model import DTYPES, Stage, transformer_config
from nemo_rl.policy.megatron.optimizer import MainWeights, OptimizerState
from nemo_rl.policy.megatron.optimizer_keys import to_torch_config
from nemo_rl.policy.megatron.parallel import make_groups, megatron_device_context
from nemo_rl.policy.megatron.routing import StageRouting
from nemo_rl.policy.megatron.weights import StageWeights
from nemo_rl.policy.micro_batches import MicroBatching, columns_of, count_valid, micro_batches, training_micro_batching
from nemo_rl.policy.offload import optimizer_tensors
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.truncation import sampling_mask_metrics
from nemo_rl.policy.worker import ConfigT, PolicyWorker, ScoringWorker, TeacherWorker
from nemo_rl.token_columns import ROUTED_EXPERTS
from nemo_rl.types import TrainingBatch

IndexedMicroBatch = tuple[torch.Tensor, TrainingBatch]  # rows of the batch, and the micro-batch itself


def make_stage(
    model: PreTrainedModel,
    config: PolicyConfig | TeacherConfig,
    *,
    temperature: float,
    device: torch.device,
    layout: RankLayout,
) -> Stage:
    """Make a rank's stage without weights, which `stage_weights` loads; it computes in `precision`.

    `model` may be on the meta device.
    """
    kernels = choose_kernels(device.type)
    settings = transformer_config(model.config, config, device, kernels)
    stage = Stage(
        settings,
        model.config,
        inverse_frequencies=_inverse_frequencies(model),
        temperature=temperature,
        chunk_size=resolve_chunk_size(config.logprob_chunk_size, model.config.get_text_config().vocab_size),
        is_packed=config.sequence_packing.enabled,
        context=context_ranks(layout, parts=layout.tensor_parallel_size if settings.sequence_parallel else 1),
        kernels=kernels,
    )
    for parameter in stage.parameters():  # torch's norms are made in float32
        parameter.data = parameter.data.to(device, settings.params_dtype)
    if isinstance(config, PolicyConfig) and config.moe.freeze_router:
        freeze_routers(stage)
    return stage.to(device)


def _inverse_frequencies(model: PreTrainedModel) -> torch.Tensor:
    """Compute the frequencies of the rotary embedding, which are in no file: [width of a head / 2]."""
    base: Any = model.base_model
    return type(base.rotary_emb)(config=model.config).inv_freq


def stage_weights(stage: Stage, model: PreTrainedModel) -> StageWeights:
    """Return the weights of the model that the stage holds."""
    return StageWeights(stage, model.config, {name: tensor.shape for name, tensor in model.state_dict().items()})


def frozen_stage(
    model: PreTrainedModel,
    tensors: ModelTensors,
    config: PolicyConfig | TeacherConfig,
    *,
    temperature: float,
    device: torch.device,
    layout: RankLayout,
) -> Stage:
    """Make a stage with this rank's shards of the model's weights, in `precision` and without gradients."""
    stage = make_stage(model, config, temperature=temperature, device=device, layout=layout).requires_grad_(False)
    stage_weights(stage, model).load(tensors, lambda parameter, shard: parameter.copy_(shard))
    return stage


class MegatronScoringWorker(ScoringWorker[ConfigT]):
    """The scoring of the policy and of teachers."""

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = self._scoring_batching
        return score(module, batch, wanted, size=size, device=self.device, layout=self.layout)


class MegatronPolicyWorker(MegatronScoringWorker[PolicyConfig], PolicyWorker):
    """The model on one rank of a layout, by Megatron-core: tensor, pipeline and data parallel.

    It computes in `precision` and steps float32 weights. Megatron's process groups, and the CPU's substitute for CUDA
    (parallel.py), are global to a process, hence a process of its own.

    Arguments and errors are those of `PolicyWorker`.
    """

    _adapters: StageAdapters | None = None

    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        config, layout, section = self.config, self.layout, self.config.section_of(TrainedMegatronConfig)
        section.check_model(load_config(model_path, config.hf_config_overrides), key="policy.megatron_cfg")
        make_groups(layout, self.device, section)
        model = empty_model(model_path, config.hf_config_overrides)
        tensors = open_tensors(model_path, model, config.hf_config_overrides)
        self._num_matmul_parameters = matmul_parameters(model)
        stage = make_stage(model, config, temperature=temperature, device=self.device, layout=layout)
        stage.truncation = self.truncation
        self._weights = stage_weights(stage, model)
        if section.peft.enabled:
            self._adapters = StageAdapters(stage, model, section.peft, base=model_path)
            self._num_matmul_parameters = matmul_parameters(model.requires_grad_(False)) + self._adapters.num_parameters
        trained = self._weights if self._adapters is None else self._adapters.weights
        self._main = MainWeights(stage, counts_in_norm=trained.counts_in_norm)
        self._weights.load(tensors, self._main.store)
        if self._adapters is not None:
            self._adapters.initialize(seed, self._main)
        self._main.copy_to_model()
        self._reference = self._make_reference(stage, model, tensors, temperature) if needs_reference else None
        balance = None
        if config.moe.balances:
            balance = StageBalance(stage, config.moe, layout=layout, group=parallel.data_group())
        mixture = read_mixture(model.config)
        if mixture is not None:
            stage.routing = StageRouting(stage, mixture, config.router_replay)
        if section.activation_checkpointing:
            kept = [one for one in (balance, stage.routing) if one is not None]
            recompute_activations(stage.decoder.layers, partial(_recomputation, kept))
        self._model = model
        self.module = stage
        self._distributed = _data_parallel(stage, section, layout, self.device)
        if self._distributed.ddp_config.use_distributed_optimizer:
            self._main.divide(self._distributed)
        self._has_gradient_buffers = True
        torch_names = to_torch_config(config)
        groups = self._main.groups(decay_norm_and_bias=torch_names.optimizer.decay_norm_and_bias)
        self._optimizer = optimizers.make_optimizer(torch_names, groups)
        self._scheduler = optimizers.make_scheduler(torch_names, self._optimizer)
        self._state = OptimizerState(self._optimizer, self._main, trained, layout)
        self._trainer = MegatronTrainer(
            module=self._distributed,
            main=self._main,
            device=self.device,
            optimizer=self._optimizer,
            batching=training_micro_batching(config),
            max_grad_norm=config.max_grad_norm,
            layout=layout,
            balance=balance,
        )

    def _make_reference(self, stage: Stage, model: PreTrainedModel, tensors: ModelTensors, temperature: float) -> Stage:
        """Return a frozen copy of the initial model, or the stage itself, whose adapters can be disabled."""
        if self._adapters is not None:
            return stage
        where: dict[str, Any] = {"device": self.device, "layout": self.layout}
        reference = frozen_stage(model, tensors, self.config, temperature=temperature, **where)
        reference.truncation = self.truncation
        return reference

    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights, which every rank gathers from those of its own copy of the model.

        Divided float32 weights are gathered from all copies.
        """
        value = self._main.of
        if self._main.is_divided:
            value = _itself if dtype == DTYPES[self.config.precision] else self._main.whole
        if self._adapters is not None:
            value = self._adapters.merged(value)
        return tensors_of_files(self._model, self._weights.all(value, dtype))

    def reference_logprobs(self, batch: TrainingBatch) -> ScoredRows | None:
        if self._adapters is None:
            return super().reference_logprobs(batch)
        with self._adapters.disabled():  # another policy, which replays no routes
            return super().reference_logprobs(batch.exclude((keys.COLUMNS, ROUTED_EXPERTS)))

    def _routing_metrics(self) -> dict[str, float]:
        routing = self.module.routing
        return routing.take_metrics(self.layout) if isinstance(routing, StageRouting) else {}

    def _load_weights(self, path: Path) -> None:
        if self._adapters is not None:
            self._adapters.load(path / ADAPTER_DIRECTORY)
            return
        directory = path / "weights"
        try:
            tensors = open_tensors(str(directory), self._model, {})
        except ConfigError as error:
            raise CheckpointError(f"{directory} cannot be loaded, or holds another model: {error.problem}") from error
        self._weights.load(tensors, self._main.store)
        self._main.copy_to_model()

    def _start_optimizer_save(self, directory: Path) -> None:
        self._saving.begin_state(self._state.whole(self._saving.memory), directory)

    def _load_optimizer(self, directory: Path) -> None:
        self._state.load(directory)

    def offload(self, *parts: OffloadPart) -> None:
        if self._has_own_memory and (not parts or "optimizer" in parts) and self._has_gradient_buffers:
            # Between steps they hold nothing that has to be kept.
            self._distributed.offload_grad_buffers(synchronize=False, empty_cache=False)
            self._has_gradient_buffers = False
        super().offload(*parts)

    def onload(self, *parts: OffloadPart) -> None:
        super().onload(*parts)
        if (not parts or "optimizer" in parts) and not self._has_gradient_buffers:
            self._distributed.restore_grad_buffers(synchronize=False)
            self._has_gradient_buffers = True

    def _part_tensors(self, part: OffloadPart) -> Iterator[torch.Tensor]:
        if part == "weights":
            yield from (*self.module.parameters(), *self.module.buffers(), *self._main.tensors())
        elif part == "optimizer":
            yield from optimizer_tensors(self._optimizer)
        elif self._reference is not None and self._adapters is None:
            yield from (*self._reference.parameters(), *self._reference.buffers())


def _recomputation(
    kept: Sequence[StageBalance | StageRouting],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts of a layer's forward pass, and of its recomputation, in which routers know the same."""
    return nullcontext(), _entered([one.recall() for one in kept])


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _data_parallel(
    stage: Stage, section: TrainedMegatronConfig, layout: RankLayout, device: torch.device
) -> DistributedDataParallel:
    reduction = section.reduction_on(device.type, layout.num_shards)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=section.distributed_data_parallel_config.grad_reduce_in_fp32,
        overlap_grad_reduce=reduction.is_overlapped,
        use_distributed_optimizer=reduction.divides_optimizer,
    )
    distributed = DistributedDataParallel(stage.config, settings, stage)
    if reduction.is_overlapped:
        stage.config.no_sync_func = distributed.no_sync
    return distributed


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


class MegatronTeacherWorker(MegatronScoringWorker[TeacherConfig], TeacherWorker):
    """A teacher by tensor, pipeline and data parallelism, in a process of its own.

    Arguments and errors are those of `TeacherWorker`.
    """

    def _build_model(self, model_path: str, *, temperature: float) -> None:
        config, section = self.config, self._section
        model_config = load_config(model_path, config.hf_config_overrides, section=section)
        backend = config.section_of(MegatronConfig)
        backend.check_model(model_config, key=f"{section}.megatron_cfg")
        make_groups(self.layout, self.device, backend)
        model = empty_model(model_path, config.hf_config_overrides, section=section)
        tensors = open_tensors(model_path, model, config.hf_config_overrides, section=section)
        where: dict[str, Any] = {"device": self.device, "layout": self.layout}
        self.module = frozen_stage(model, tensors, config, temperature=temperature, **where)
        self._model = model

    def _part_tensors(self, part: OffloadPart) -> Iterator[torch.Tensor]:
        if part == "weights":
            yield from (*self.module.parameters(), *self.module.buffers())


def score(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """Return an iterator of (rows, scores) of this rank's rows, without gradients; only the last stage has any.

    All micro-batches are computed before the first is returned; their scores wait on the CPU. `mode: R2` of
    `policy.router_replay` adds their experts, which all stages tell.
    """

    def move_to_cpu(
        part: IndexedMicroBatch, scores: TokenScores, *, non_loss_data: bool
    ) -> tuple[torch.Tensor, TokenScores]:
        topk = scores.topk and TopK(scores.topk.ids.cpu(), scores.topk.logprobs.cpu())
        return part[0], TokenScores(scores.logprobs.cpu(), topk=topk)

    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS, keys.COLUMNS, strict=False)
    parts = list(micro_batches(inputs, torch.arange(len(batch)), size, layout))
    with torch.no_grad():
        read = _run(module, parts, wanted, move_to_cpu, device=device, forward_only=True, collect_non_loss_data=True)
    routing = cast(Stage, module).routing
    if routing is not None and (routes := routing.take_records()) and read:
        read = [(rows, scores._replace(routes=own)) for (rows, scores), own in zip(read, routes, strict=True)]
    return ((rows, scores) for rows, scores in read if len(rows) > 0)


def accumulate_gradients(
    module: nn.Module,
    parts: Sequence[IndexedMicroBatch],
    wanted: RequiredScores,
    loss: Callable[[IndexedMicroBatch, TokenScores], tuple[torch.Tensor, Any]],
    *,
    device: torch.device,
    contexts: Sequence[AbstractContextManager[None]] = (),
) -> list[Any]:
    """Sum the gradients of all losses, also over ranks, and return the reports of `loss` on the last stage.

    `contexts` are those of the forward passes of the micro-batches, if they need any.
    """

    def loss_and_report(part: IndexedMicroBatch, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor, Any]:
        value, report = loss(part, scores)
        # The previous stage waits for a gradient even if the loss reads no log-prob. It is a tensor of its own, of one
        # entry, since the schedule frees it before the backward pass.
        value = value.new_ones(1) * value + scores.logprobs.sum() * 0
        return value, torch.zeros((), dtype=torch.int, device=device), report

    return _run(module, parts, wanted, loss_and_report, device=device, contexts=contexts, forward_only=False)


def _run(
    module: nn.Module,
    parts: Sequence[IndexedMicroBatch],
    wanted: RequiredScores,
    read: Callable[..., Any],
    *,
    device: torch.device,
    contexts: Sequence[AbstractContextManager[None]] = (),
    **arguments: Any,
) -> list[Any]:
    own_contexts = iter(contexts)

    def forward_step(iterator: Iterator[IndexedMicroBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows, part = next(iterator)
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        asked = wanted if len(rows) else RequiredScores()  # a dummy part needs no scores
        candidate_ids = None if asked.candidates is None else part[asked.candidates]
        tokens = part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0
        with next(own_contexts, nullcontext()):
            scores = model(*tokens, asked, candidate_ids, lengths, columns_of(part))
        return scores, partial(read, (rows, part))

    width = max((part[keys.TOKEN_IDS].shape[1] for _, part in parts), default=1)
    with megatron_device_context(device):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=[module],
            num_microbatches=len(parts),
            seq_length=width,
            micro_batch_size=max((len(part) for _, part in parts), default=1),
            **arguments,
        )


@dataclass(frozen=True, slots=True)
class MegatronTrainer:
    """A stage and its optimizer, with its micro-batching and the limit of the gradient norm."""

    module: Any  # megatron.core's DistributedDataParallel around a Stage
    main: MainWeights
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout
    balance: StageBalance | None = None

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> step_report.OptimizerStep:
        """Take one optimizer step on these rows and return its report, which is the same on every rank.

        A step without valid tokens, or with a loss or gradient that is not finite, is skipped.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            return step_report.skip_without_tokens(normalizer, len(rows))

        def loss(part: IndexedMicroBatch, scores: TokenScores) -> tuple[torch.Tensor, dict[str, Metric]]:
            return _loss(part, scores, loss_fn, normalizer)

        parts = list(micro_batches(batch, rows, self.batching, self.layout))
        self.module.zero_grad_buffer()
        contexts = self._contexts(parts)
        wanted = loss_fn.required_scores
        reports = accumulate_gradients(self.module, parts, wanted, loss, device=self.device, contexts=contexts)
        metrics, reductions = _aggregate_metrics(reports)
        if self.balance is not None:
            losses = self.balance.take_losses()
            metrics |= {name: float(value) for name, value in losses.items()}
            reductions |= dict.fromkeys(losses, "sum")
        values, reductions = step_report.reduce_over_ranks(self.layout.all_gather_data_parallel((metrics, reductions)))
        self.main.copy_gradients_from_buffers()
        grad_norm = self.main.clip(self.max_grad_norm)
        skip_cause = step_report.find_skip_cause(values["loss"], grad_norm)
        if skip_cause is None:
            self.optimizer.step()
            self.main.copy_to_model()
        if self.balance is not None:
            self.balance.end_step(is_taken=skip_cause is None)
        self.main.clear_gradients()
        return step_report.OptimizerStep(values, reductions, normalizer, grad_norm, skip_cause)

    def _contexts(self, parts: Sequence[IndexedMicroBatch]) -> list[AbstractContextManager[None]]:
        """Return the contexts in which routers balance the experts of each micro-batch; all ranks call it together."""
        if self.balance is None:
            return []
        weights = self.balance.weights([part[keys.LENGTHS].tolist() if len(rows) else [] for rows, part in parts])
        found = []
        for (rows, part), weight in zip(parts, weights, strict=True):
            lengths, width = part[keys.LENGTHS].tolist(), part[keys.TOKEN_IDS].shape[1]
            stage: Stage = self.module.module
            mask = routed_tokens(lengths, width, is_packed=stage.is_packed, is_empty=len(rows) == 0)
            if stage.context is not None:
                mask = sliced_tokens(sum(lengths), stage.context, self.device) & (len(rows) > 0)
            found.append(self.balance.micro_batch(None if mask is None else mask.to(self.device), weight))
        return found


def _loss(
    part: IndexedMicroBatch, scores: TokenScores, loss_fn: LossFn, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, Metric]]:
    rows, batch = part
    if len(rows) == 0:  # zero gradients, in step with the ranks that have samples left
        return scores.logprobs.sum() * 0, {}
    loss, metrics = loss_fn(scores, batch, normalizer)
    metrics = {**metrics, **sampling_mask_metrics(scores, batch, normalizer)}
    return loss, {**metrics, "loss": Metric(loss.detach().clone())}  # the schedule frees its inputs


def _aggregate_metrics(
    reports: list[dict[str, Metric]],
) -> tuple[dict[str, float], dict[str, step_report.Reduction]]:
    """Return the metrics of all micro-batches of a rank; only the last stage has any."""
    metrics: dict[str, torch.Tensor] = {}
    reductions: dict[str, step_report.Reduction] = {}
    for report in reports:
        for name, metric in report.items():
            metrics[name] = step_report.accumulate_metric(metric, metrics.get(name))
            reductions[name] = metric.reduction
    return {name: float(value) for name, value in metrics.items()}, reductions
