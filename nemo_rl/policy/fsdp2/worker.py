"""The policy and teacher workers on FSDP2 and DTensor.

Policy weights are float32 and computation is in `precision`; teacher weights are in `precision`. FSDP2 wraps the model
if useful: on several ranks, on CUDA, and for the casts of bfloat16. A single float32 rank on a CPU runs the bare
model. Dropout is always off, so that the same weights always give the same log-probs. Weights are read from a
model's files a shard at a time, and leave under the files' names, gathered and with adapters merged.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig, TeacherConfig, resolve_chunk_size
from nemo_rl.distributed.expert_routers import find_routers
from nemo_rl.distributed.file_names import FilePart, file_parts, parts_by_tensor
from nemo_rl.distributed.float32 import keep_float32_routers, round_as_engine
from nemo_rl.errors import CheckpointError, ConfigError, PolicyError
from nemo_rl.interfaces import LossFn, OffloadPart
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy import hf_model, optimizers, step_report
from nemo_rl.policy.adapter_files import DIRECTORY as ADAPTER_DIRECTORY
from nemo_rl.policy.adapter_files import POLICIES_DIRECTORY, scaled_tensors
from nemo_rl.policy.context_parallel import sliced_tokens
from nemo_rl.policy.expert_routing import ExpertRouting, make_routing
from nemo_rl.policy.fsdp2 import sharding
from nemo_rl.policy.fsdp2.backend import (
    DTensorConfig,
    TrainedDTensorConfig,
    check_context_parallel,
    check_expert_parallel,
    check_sequence_parallel,
    check_tensor_parallel,
)
from nemo_rl.policy.fsdp2.balance import RouterBalance, freeze_routers, routed_tokens
from nemo_rl.policy.fsdp2.experts import gather_experts
from nemo_rl.policy.fsdp2.lora import Adapters, AdaptersDisabled, AdapterSets, LazyMergedWeight, merge_adapter_weights
from nemo_rl.policy.fsdp2.shards import gather_full_tensor, num_holders
from nemo_rl.policy.logprobs import CPU, CausalLogprobs
from nemo_rl.policy.micro_batches import (
    MicroBatching,
    columns_of,
    count_valid,
    divided_micro_batches,
    images_of,
    in_spans,
    training_micro_batching,
)
from nemo_rl.policy.offload import optimizer_tensors
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.saving import load_optimizer, load_optimizers, load_schedule, save_schedule
from nemo_rl.policy.tree_logprobs import SharedPrefixLogprobs
from nemo_rl.policy.truncation import sampling_mask_metrics
from nemo_rl.policy.worker import ConfigT, PolicyWorker, ScoringWorker, TeacherWorker
from nemo_rl.types import TrainingBatch
from nemo_rl.weight_manifests import with_policy_index

logger = logging.getLogger(__name__)


def make_policy_worker(options: TrainedDTensorConfig, /, config: PolicyConfig, **arguments: Any) -> "FSDP2PolicyWorker":
    """Return a policy worker; the factory of the entry `FSDP2`."""
    return FSDP2PolicyWorker(config, **arguments)


def make_teacher_worker(options: DTensorConfig, /, config: TeacherConfig, **arguments: Any) -> "FSDP2TeacherWorker":
    """Return a teacher worker; the factory of the entry `FSDP2_TEACHER`."""
    return FSDP2TeacherWorker(config, **arguments)


class FSDP2ScoringWorker(ScoringWorker[ConfigT]):
    """The scoring of the policy and of teachers."""

    def _iter_scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        return score_micro_batches(
            module,
            batch,
            wanted,
            size=self._scoring_batching,
            device=self.device,
            layout=self.layout,
            keeps_unsharded=sharding.should_keep_unsharded(module, self.config, self.layout, self.device),
        )


class FSDP2PolicyWorker(FSDP2ScoringWorker[PolicyConfig], PolicyWorker):
    """The policy on one rank, by FSDP2 and DTensor.

    The reference is a frozen copy; with adapters, the policy without them. Arguments and errors are those of
    `PolicyWorker`. With `policies` it trains several adapters, each with its own `TrainingParts`.
    """

    _sets: AdapterSets | None = None  # None: a single policy
    _parts: Mapping[str, "TrainingParts"] = MappingProxyType({})  # of several policies, those that are trained, by name

    def _build_model(self, model_path: str, *, temperature: float, needs_reference: bool, seed: int) -> None:
        config, layout, section = self.config, self.layout, self.config.section_of(TrainedDTensorConfig)
        _check_ranks(layout, config, model_path, "policy")
        self._num_matmul_parameters = 0
        is_adapted = section.lora_cfg.enabled
        module, self._adapters = self._load_module(model_path, temperature, seed=seed if is_adapted else None)
        self.module = module
        self._model = self.module.model
        self._reference = None
        if needs_reference and self._adapters is not None:
            self._reference = AdaptersDisabled(self.module, self._adapters)
        elif needs_reference:
            self._reference, _ = self._load_module(model_path, temperature, is_frozen=True)
        if self._policies:
            assert self._adapters is not None  # checked with the configuration
            self._sets = AdapterSets(self._adapters, tuple(self._policies))
            self._load_starting_adapters(self._adapters, self._sets)
            self._parts = {
                name: self._make_training_parts(module, section.applied_to(config))
                for name, section in self._policies.items()
                if section.trainable
            }
        own = next(iter(self._parts.values())) if self._policies else self._make_training_parts(module, config)
        self._optimizer, self._scheduler, self._trainer = own.optimizer, own.scheduler, own.trainer

    def _load_starting_adapters(self, adapters: Adapters, sets: AdapterSets) -> None:
        """Load each `adapter_path` of the table; raises ConfigError for an adapter that does not fit the model."""
        with sets.each() as names:
            for name in names:
                if (path := self._policies[name].adapter_path) is not None:
                    try:
                        adapters.load(Path(path))
                    except CheckpointError as error:
                        raise ConfigError(f"policies.{name}.adapter_path", path, str(error)) from error

    def _make_training_parts(self, module: CausalLogprobs, config: PolicyConfig) -> "TrainingParts":
        """Return an optimizer of all trained parameters, with its schedule and trainer."""
        layout = self.layout
        trained = [(p.ndim, p) for p in module.parameters() if p.requires_grad]
        groups = optimizers.parameter_groups(trained, decay_norm_and_bias=config.optimizer.decay_norm_and_bias)
        optimizer = optimizers.make_optimizer(config, groups)
        trainer = FSDP2Trainer(
            module=module,
            device=self.device,
            optimizer=optimizer,
            batching=training_micro_batching(config),
            max_grad_norm=config.max_grad_norm,
            layout=layout,
            keeps_unsharded=sharding.should_keep_unsharded(module, config, layout, self.device),
            balance=RouterBalance.of(
                self._model, config.moe, layout=layout, group=sharding.shards_group(layout, self.device)
            ),
        )
        return TrainingParts(optimizer, optimizers.make_scheduler(config, optimizer), trainer)

    def select(self, name: str) -> None:
        """Make scoring and training those of one of `policies`; raises PolicyError for another name."""
        if self._sets is None:
            super().select(name)
            return
        self._require("weights")
        self._sets.select(name)
        if (own := self._parts.get(name)) is not None:
            self._optimizer, self._scheduler, self._trainer = own.optimizer, own.scheduler, own.trainer

    def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        """Train as `PolicyWorker.train_step` does; raises PolicyError if a frozen policy is selected."""
        if self._sets is not None and self._sets.selected not in self._parts:
            raise PolicyError(f"policies.{self._sets.selected}.trainable is false")
        return super().train_step(batch, loss_fn)

    def _load_module(
        self, model_path: str, temperature: float, *, seed: int | None = None, is_frozen: bool = False
    ) -> tuple[CausalLogprobs, Adapters | None]:
        """Return the model with this rank's shards of its weights, each read from the files alone.

        With a `seed`, adapters are trained and the model's own weights are frozen. Frozen weights are in the
        precision of the computation; buffers, e.g. rotary frequencies, stay float32.
        """
        config, layout, section = self.config, self.layout, self.config.section_of(TrainedDTensorConfig)
        model = hf_model.empty_model(model_path, config.hf_config_overrides)
        tensors = hf_model.open_tensors(model_path, model, config.hf_config_overrides)
        adapters = None if seed is None else Adapters(model, section.lora_cfg, base=model_path)
        if not is_frozen:
            self._num_matmul_parameters = hf_model.matmul_parameters(model)
        module = make_module(
            model, config, section="policy", temperature=temperature, device=self.device, layout=layout
        )
        module.truncation = self.truncation
        if is_frozen:
            module.requires_grad_(False)
        else:
            module.routing = make_routing(model, config.router_replay)
            hf_model.freeze_parameters(model, section.frozen_parameters, key="policy.dtensor_cfg.frozen_parameters")
            if config.moe.freeze_router:
                freeze_routers(model)
            if config.freeze_vision:
                hf_model.freeze_vision(model)
        if sharding.should_compile(model, section, self.device):
            sharding.compile_layers(model)
        if section.activation_checkpointing and not is_frozen:
            hf_model.recompute_activations(hf_model.decoder_layers(model))
        if config.precision == "bfloat16":
            sharding.cast_frozen(module)
        needed = sharding.frozen_needs_sharding if is_frozen else sharding.needs_sharding
        sharding.place_on_device(
            module, tensors, config, layout, self.device, is_sharded=needed(config, layout, self.device)
        )
        if adapters is not None and seed is not None:
            adapters.initialize(seed)
        return module, adapters

    def _named_adapter(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        if self._sets is None or self._adapters is None:
            yield from super()._named_adapter(dtype)
            return
        for index, policy in enumerate(self._sets.names):
            for name, tensor in scaled_tensors(self._sets.tensors(policy), self._adapters.scale, dtype):
                yield with_policy_index(name, index), tensor

    def _named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return named_weights(self._model, dtype, adapter_scale=self._adapters.scale if self._adapters else None)

    def _routing_metrics(self) -> dict[str, float]:
        routing = self.module.routing
        return routing.take_metrics(self.layout) if isinstance(routing, ExpertRouting) else {}

    def _load_weights(self, path: Path) -> None:
        if self._adapters is None:
            sharding.load_weights(self.module, self._model, path / "weights")
        elif self._sets is None:
            self._adapters.load(path / ADAPTER_DIRECTORY)
        else:
            with self._sets.each() as names:
                for name in names:
                    self._adapters.load(path / POLICIES_DIRECTORY / name)

    def _start_weights_save(self, path: Path) -> None:
        if self._sets is None or self._adapters is None:
            super()._start_weights_save(path)
            return
        with self._sets.each() as names:
            for name in names:
                self._start_adapter_save(self._adapters, path / POLICIES_DIRECTORY / name)

    def _start_optimizer_save(self, directory: Path) -> None:
        if self._sets is None:
            self._saving.begin_optimizer(self.module, self._optimizer, directory)
        else:
            self._saving.begin_optimizers(self.module, self._optimizers, directory)

    def _load_optimizer(self, directory: Path) -> None:
        if self._sets is None:
            load_optimizer(self.module, self._optimizer, directory)
        else:
            load_optimizers(self.module, self._optimizers, directory)

    def _save_schedules(self, directory: Path) -> None:
        if self._sets is None:
            super()._save_schedules(directory)
        for name, part in self._parts.items():
            save_schedule(part.scheduler, directory / name)

    def _load_schedules(self, directory: Path) -> None:
        if self._sets is None:
            super()._load_schedules(directory)
        for name, part in self._parts.items():
            load_schedule(part.scheduler, directory / name)

    @property
    def _optimizers(self) -> dict[str, Optimizer]:
        return {name: part.optimizer for name, part in self._parts.items()}

    def _part_tensors(self, part: OffloadPart) -> Iterator[torch.Tensor]:
        if part == "weights":
            yield from sharding.module_tensors(self.module)
            if self._sets is not None:
                yield from self._sets.parts_beside()
        elif part == "optimizer":
            yield from (p.grad for p in self.module.parameters() if p.grad is not None)
            for optimizer in self._optimizers.values() if self._parts else [self._optimizer]:
                yield from optimizer_tensors(optimizer)
        elif self._reference is not None and self._adapters is None:
            yield from sharding.module_tensors(self._reference)


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The parts of a worker that one policy trains with."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    trainer: "FSDP2Trainer"


class FSDP2TeacherWorker(FSDP2ScoringWorker[TeacherConfig], TeacherWorker):
    """A teacher on one rank, by FSDP2 and DTensor. Arguments and errors are those of `TeacherWorker`."""

    def _build_model(self, model_path: str, *, temperature: float) -> None:
        config, layout, section = self.config, self.layout, self._section
        _check_ranks(layout, config, model_path, section)
        self._model = hf_model.empty_model(model_path, config.hf_config_overrides, section=section)
        tensors = hf_model.open_tensors(model_path, self._model, config.hf_config_overrides, section=section)
        module = make_module(
            self._model, config, section=section, temperature=temperature, device=self.device, layout=layout
        )
        self.module = module.requires_grad_(False)
        if config.precision == "bfloat16":
            sharding.cast_frozen(module)
        if sharding.should_compile(self._model, config.section_of(DTensorConfig), self.device):
            sharding.compile_layers(self._model)
        is_sharded = sharding.frozen_needs_sharding(config, layout, self.device)
        key = f"{section}.dtensor_cfg"
        sharding.place_on_device(module, tensors, config, layout, self.device, is_sharded=is_sharded, key=key)

    def _part_tensors(self, part: OffloadPart) -> Iterator[torch.Tensor]:
        if part == "weights":
            yield from sharding.module_tensors(self.module)


def _check_ranks(layout: RankLayout, config: PolicyConfig | TeacherConfig, model_path: str, section: str) -> None:
    """Raise ConfigError for a model that the ranks of a layout cannot share."""
    if layout.world_size == layout.data_parallel_size and layout.expert_parallel_size == 1:
        return
    model, key = hf_model.load_config(model_path, config.hf_config_overrides, section=section), f"{section}.dtensor_cfg"
    check_tensor_parallel(layout.tensor_parallel_size, model, key=key)
    check_context_parallel(layout.context_parallel_size, model, tensor=layout.tensor_parallel_size, key=key)
    check_expert_parallel(layout.expert_parallel_size, model, key=key)
    check_sequence_parallel(config.section_of(DTensorConfig).sequence_parallel, model, key=key)


def make_module(
    model: PreTrainedModel,
    config: PolicyConfig | TeacherConfig,
    *,
    section: str,
    temperature: float,
    device: torch.device,
    layout: RankLayout = SINGLE_RANK,
) -> CausalLogprobs:
    """Return the model as a scorer of padded or packed sequences; raises ConfigError if packing would change it."""
    packing, key = config.sequence_packing, f"{section}.sequence_packing"
    slices, splits_residual = layout.context_parallel_size, sharding.splits_residual(config, layout)
    context = (f"{section}.dtensor_cfg.context_parallel_size", slices) if slices > 1 else None
    if splits_residual and context is None:
        context = (f"{section}.dtensor_cfg.sequence_parallel", True)
    options: dict[str, Any] = {
        "temperature": temperature,
        "chunk_size": resolve_chunk_size(config.logprob_chunk_size, model.config.get_text_config().vocab_size),
        "packing_key": f"{key}.enabled" if packing.enabled else None,
        "context": context,
        "probe_device": device,
    }
    if packing.share_prefixes:
        module: CausalLogprobs = SharedPrefixLogprobs(model, sharing_key=f"{key}.share_prefixes", **options)
    else:
        module = CausalLogprobs(model, **options)
    if module.images is not None:
        module.images.always_runs = layout.world_size > 1
    if config.precision == "bfloat16":
        keep_float32_routers(find_routers(model))
        small: Any = hf_model.small_model(model, CPU)
        probe = hf_model.text_decoder(small.to(torch.bfloat16))
        module.casts_inputs = not round_as_engine(hf_model.text_decoder(model), probe, on_cpu=device.type == "cpu")
    return module


def named_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, adapter_scale: float | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) pairs for an engine, gathered one at a time and cast; buffers keep their dtype.

    Persistent tensors, tied ones once, split and named as in the model's files; a few experts' weights are gathered at
    a time. A tensor that one rank holds whole in `dtype` is not copied: it is the live weight. With an `adapter_scale`,
    adapters are merged into copies.
    """
    own = _persistent_tensors(model)
    tensors = own if adapter_scale is None else merge_adapter_weights(own, adapter_scale)
    buffers = {name for name, _ in model.named_buffers()}
    parts = file_parts(model) if adapter_scale is None else _plain_parts(model)
    if parts is None:  # files of another shape
        whole = revert_weight_conversion(model, {name: _materialize(tensor) for name, tensor in tensors.items()})
        yield from ((name, tensor if name in buffers else tensor.to(dtype)) for name, tensor in whole.items())
        return
    names = parts_by_tensor(parts)
    for name, one in tensors.items():
        tensor = one.materialize() if isinstance(one, LazyMergedWeight) else one
        tensor = tensor if name in buffers else tensor.to(dtype)
        yield from _in_file(tensor, names[name])


def _plain_parts(model: PreTrainedModel) -> Mapping[str, FilePart] | None:
    """Return the parts of a model with adapters, by the names of the plain model."""
    parts = file_parts(model)
    if parts is None:
        return None
    plain = {name.replace(sharding.BASE_LAYER, "."): part for name, part in parts.items()}
    return {n: replace(part, tensor=part.tensor.replace(sharding.BASE_LAYER, ".")) for n, part in plain.items()}


def _persistent_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _materialize(tensor: torch.Tensor | LazyMergedWeight) -> torch.Tensor:
    return tensor.materialize() if isinstance(tensor, LazyMergedWeight) else gather_full_tensor(tensor)


def _in_file(tensor: torch.Tensor, parts: Mapping[str, FilePart]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one of the model's tensors as its files hold it."""
    if all(part.expert is None for part in parts.values()):
        whole = gather_full_tensor(tensor)
        yield from ((name, whole) for name in parts)
        return
    names: dict[int, list[str]] = defaultdict(list)
    for name, part in parts.items():
        names[-1 if part.expert is None else part.expert].append(name)
    for expert, weight in gather_experts(tensor):
        for name in names[expert]:
            yield name, weight[parts[name].rows(len(weight))]


@torch.no_grad()
def score_micro_batches(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching,
    device: torch.device,
    layout: RankLayout,
    keeps_unsharded: bool = False,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """Yield (rows, scores) of this rank's rows, a micro-batch of `size` at a time; `module` is a `CausalLogprobs`."""
    known = (keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS, keys.GROUP_ID, keys.COLUMNS, keys.IMAGE_ROWS, keys.IMAGES)
    inputs = batch.select(*known, strict=False)
    with sharding.kept_unsharded(module, is_enabled=keeps_unsharded):
        for ranks, rows, part in divided_micro_batches(inputs, torch.arange(len(batch)), size, layout):
            lengths = part[keys.LENGTHS].tolist()
            part = part.to(device)
            tokens = part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0
            options = {"lengths": lengths, "columns": columns_of(part), "images": images_of(part)}
            scores = module(*tokens, wanted, **options, is_shared=ranks is layout)
            if len(rows) > 0 and ranks.is_dp_leader:
                yield rows, scores


@dataclass(frozen=True, slots=True)
class FSDP2Trainer:
    """Module and optimizer of one rank, with its micro-batching and the limit of the gradient norm.

    With `keeps_unsharded` weights are gathered by the first micro-batch of an optimizer step and gradients reduced by
    the last one; otherwise every micro-batch does both.
    """

    module: CausalLogprobs
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout = SINGLE_RANK
    keeps_unsharded: bool = False
    balance: RouterBalance | None = None

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> step_report.OptimizerStep:
        """Take one optimizer step on these rows and return its report, which is the same on every rank.

        A step without valid tokens, or with a loss or gradient that is not finite, is skipped.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            return step_report.skip_without_tokens(normalizer, len(rows))
        metrics, reductions = self._accumulate_gradients(batch, rows, normalizer, loss_fn)
        grad_norm = clip_grad_norm(self.module.parameters(), self.max_grad_norm, self.layout)
        values = {name: float(value) for name, value in metrics.items()}
        values, reductions = step_report.reduce_over_ranks(self.layout.all_gather_object((values, reductions)))
        skip_cause = step_report.find_skip_cause(values["loss"], grad_norm)
        if skip_cause is None:
            self.optimizer.step()
        if self.balance is not None:
            self.balance.end_step(is_taken=skip_cause is None)
        self.optimizer.zero_grad(set_to_none=True)
        return step_report.OptimizerStep(values, reductions, normalizer, grad_norm, skip_cause)

    def _accumulate_gradients(
        self, batch: TrainingBatch, rows: torch.Tensor, normalizer: Normalizer, loss_fn: LossFn
    ) -> tuple[dict[str, torch.Tensor], dict[str, step_report.Reduction]]:
        metrics: dict[str, torch.Tensor] = {}
        reductions: dict[str, step_report.Reduction] = {}
        divided = list(divided_micro_batches(batch, rows, self.batching, self.layout))
        parts = [(own_rows, part) for _, own_rows, part in divided]
        weights = self._balance_weights(parts)
        with sharding.kept_unsharded(self.module, is_enabled=self.keeps_unsharded):
            for index, (own_rows, part) in enumerate(in_spans(parts)):
                if index == len(parts) - 1:
                    sharding.reduce_next_gradients(self.module)
                ranks = divided[index][0]
                is_shared = ranks is self.layout
                with self._balanced(part, is_empty=len(own_rows) == 0, weight=weights[index]):
                    found = self._micro_batch(own_rows, part.to(self.device), normalizer, loss_fn, is_shared=is_shared)
                if not ranks.is_dp_leader:
                    continue
                for name, metric in found.items():
                    metrics[name] = step_report.accumulate_metric(metric, metrics.get(name))
                    reductions[name] = metric.reduction
        losses = {} if self.balance is None else self.balance.take_losses()
        if self.layout.is_dp_leader:
            metrics |= losses
            reductions |= dict.fromkeys(losses, "sum")
        return metrics, reductions

    def _micro_batch(
        self, own_rows: torch.Tensor, part: TrainingBatch, normalizer: Normalizer, loss_fn: LossFn, *, is_shared: bool
    ) -> dict[str, Metric]:
        """Add the gradient of one micro-batch; without rows, zero gradients, in step with the ranks that have some."""
        inputs, lengths = (part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0), part[keys.LENGTHS].tolist()
        if len(own_rows) == 0:
            logprobs = self.module(*inputs, lengths=lengths, is_shared=is_shared).logprobs
            self._end_forward()
            logprobs.sum().backward()
            return {}
        wanted = loss_fn.required_scores
        candidate_ids = None if wanted.candidates is None else part[wanted.candidates]
        columns, images = columns_of(part), images_of(part)
        scores = self.module(*inputs, wanted, candidate_ids, lengths, columns, images, is_shared=is_shared)
        self._end_forward()
        return self._backward(scores, part, normalizer, loss_fn)

    def _balance_weights(self, parts: Sequence[tuple[torch.Tensor, TrainingBatch]]) -> list[float]:
        if self.balance is None:
            return [0.0] * len(parts)
        return self.balance.weights([part[keys.LENGTHS].tolist() if len(rows) else [] for rows, part in parts])

    def _balanced(self, part: TrainingBatch, *, is_empty: bool, weight: float) -> AbstractContextManager[None]:
        if self.balance is None:
            return nullcontext()
        lengths, width = part[keys.LENGTHS].tolist(), part[keys.TOKEN_IDS].shape[1]
        is_packed = self.module.is_packed
        mask = routed_tokens(lengths, width, is_packed=is_packed, is_empty=is_empty, device=self.device)
        if (context := self.module.context) is not None:
            mask = sliced_tokens(sum(lengths), context, self.device) & (not is_empty)
        return self.balance.micro_batch(mask, weight)

    def _end_forward(self) -> None:
        if self.balance is not None:
            self.balance.end_forward()

    def _backward(
        self, scores: TokenScores, part: TrainingBatch, normalizer: Normalizer, loss_fn: LossFn
    ) -> dict[str, Metric]:
        """Add this rank's part of the gradient. The factor undoes FSDP2's average over ranks: the sum is needed."""
        loss, metrics = loss_fn(scores, part, normalizer)
        num_ranks = self.layout.num_shards
        if num_ranks > 1 or self.keeps_unsharded:
            (loss * num_ranks + scores.logprobs.sum() * 0).backward()  # also if this rank's loss reads no log-prob
        elif loss.requires_grad:
            loss.backward()
        return {**metrics, **sampling_mask_metrics(scores, part, normalizer), "loss": Metric(loss)}


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, layout: RankLayout = SINGLE_RANK
) -> float:
    """Scale the gradients to a norm of at most `max_norm` and return their norm before; None: only measure it."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = _total_norm(with_gradient, layout)
    if max_norm is not None:
        for part in _group_by_mesh(with_gradient):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return float(norm)


def _total_norm(parameters: list[nn.Parameter], layout: RankLayout) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, the same on each of them."""
    local: dict[int, list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        assert p.grad is not None
        gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        local[num_holders(p, layout.world_size)].append(gradient)
    norms = {holders: torch.nn.utils.get_total_norm(gradients) for holders, gradients in local.items()}
    if layout.world_size == 1:
        return norms.get(1, torch.zeros(()))
    square = sum(float(norm) ** 2 / holders for holders, norm in norms.items())
    return layout.all_reduce_sum(torch.tensor(square, dtype=torch.float64)).sqrt().float()


def _group_by_mesh(parameters: list[nn.Parameter]) -> Collection[list[nn.Parameter]]:
    """Group parameters by device mesh: with tensor parallelism they are on one or two dimensions of it, and torch
    scales only gradients of one mesh together."""
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return parts.values()
