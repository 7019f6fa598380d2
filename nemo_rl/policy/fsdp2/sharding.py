"""FSDP2 and tensor parallelism around a model: placement and loading of shards, and when a layer is whole."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.distributed.expert_routers import find_routers
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.context_parallel import SLICED_ATTENTION, context_ranks
from nemo_rl.policy.fsdp2.backend import COMPILED_MODEL_TYPES, KEPT_SHARE, DTensorConfig, TrainedDTensorConfig
from nemo_rl.policy.fsdp2.experts import FSDP_DIM, find_experts, split_experts
from nemo_rl.policy.fsdp2.shards import own_part
from nemo_rl.policy.hf_model import ModelTensors, decoder_layers, open_tensors
from nemo_rl.policy.log_softmax import has_kernels
from nemo_rl.policy.logprobs import CPU, CausalLogprobs
from nemo_rl.policy.ranks import RankLayout, device_mesh, join
from nemo_rl.policy.truncation import VocabularyShard

BASE_LAYER = ".base_layer."  # part of the names of peft's layers (lora.py)
_HEADS_DIM = 2  # dimension of heads in [B, T, heads, head width], the input of Qwen3's norms of queries and keys


def needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """Return whether FSDP2 is useful: a single float32 rank on a CPU has nothing to shard, move or cast."""
    return layout.init_method is not None or device.type == "cuda" or config.precision == "bfloat16"


def frozen_needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """Return whether FSDP2 is useful for a frozen model: on a single rank only if its weights are offloaded."""
    return layout.world_size > 1 or (device.type == "cuda" and config.section_of(DTensorConfig).cpu_offload)


def shard(
    module: CausalLogprobs,
    config: PolicyConfig | TeacherConfig,
    layout: RankLayout,
    device: torch.device,
    *,
    key: str = "policy.dtensor_cfg",
) -> None:
    """Split rows over the context-parallel ranks, layers and vocabulary over the tensor-parallel ones and experts over
    theirs, then wrap the layers, and the rest as one, in FSDP2.

    Weights and gradients keep their dtype. In bfloat16, weights are cast when a layer gathers them and gradients are
    reduced in float32. Layers move to the device one at a time, so that it never holds the whole model.
    """
    join(layout, device)
    mesh = device_mesh(layout, device)
    is_residual_split = splits_residual(config, layout)
    module.context = context_ranks(layout, parts=layout.tensor_parallel_size if is_residual_split else 1)
    if module.context is not None:
        module.model.set_attn_implementation(SLICED_ATTENTION)
    if layout.tensor_parallel_size > 1:
        _split_matrices(module, mesh, is_residual_split=is_residual_split)
    param_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    is_offloaded = config.section_of(DTensorConfig).cpu_offload
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    of_layers = replace(precision, cast_forward_inputs=module.casts_inputs)
    if layout.expert_parallel_size > 1:
        split_experts(module, mesh, key=key)
        of_experts = replace(precision, cast_forward_inputs=False)  # scores stay float32
        for _, experts in find_experts(module):
            _shard_experts(experts, mesh, mp_policy=of_experts, offload_policy=offload)
    for layer in decoder_layers(module):
        if param_dtype is not None:
            for router in find_routers(layer):  # routers stay in float32, like the scores
                fully_shard(
                    router, mesh=mesh["shards"], mp_policy=replace(precision, param_dtype=None), offload_policy=offload
                )
        fully_shard(layer, mesh=mesh["shards"], mp_policy=of_layers, offload_policy=offload)
    fully_shard(module, mesh=mesh["shards"], mp_policy=precision, offload_policy=offload)


def _split_matrices(module: CausalLogprobs, mesh: DeviceMesh, *, is_residual_split: bool) -> None:
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    split_layers(module, mesh, is_residual_split=is_residual_split)
    split_vocabulary(module, mesh)
    if is_residual_split:
        split_residual(module.model, mesh)
    for name, parameter in module.named_parameters():  # torch makes new weights of norms, which train by default
        if name in frozen:
            parameter.requires_grad_(False)


def _shard_experts(experts: nn.Module, mesh: DeviceMesh, **policies: Any) -> None:
    """Shard one rank's experts of a layer over the ranks that copy them; their gradients are summed over all tokens."""
    copies = mesh["edp"]
    wrapped = fully_shard(experts, mesh=copies, shard_placement_fn=lambda _: Shard(FSDP_DIM), **policies)
    wrapped.set_gradient_divide_factor(float(mesh["shards"].size()))  # as the gradients of other weights are
    if copies.size() > 1:  # gloo has no scaled sum; over one rank torch 2.13 would divide twice
        wrapped.set_force_sum_reduction_for_comms(True)


def shards_group(layout: RankLayout, device: torch.device) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share the tokens of a step; None for a single one."""
    return device_mesh(layout, device).get_group("shards") if layout.num_shards > 1 else None


def splits_residual(config: PolicyConfig | TeacherConfig, layout: RankLayout) -> bool:
    """Return whether tensor-parallel ranks each hold a part of the tokens between the layers."""
    return layout.tensor_parallel_size > 1 and config.section_of(DTensorConfig).sequence_parallel


def split_layers(model: nn.Module, mesh: DeviceMesh, *, is_residual_split: bool = False) -> None:
    """Replace each layer's matrices by this rank's shards of them; `mesh` has the dimension "tp".

    With `is_residual_split` the layers take, and return, DTensors of which each rank has a part of the tokens.
    """
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh["tp"], _plan(layer) | (_residual_plan() if is_residual_split else {}))


def split_vocabulary(module: CausalLogprobs, mesh: DeviceMesh) -> None:
    """Replace embedding and output layer by this rank's part of the vocabulary; `mesh` has the dimension "tp".

    Both stay whole if the ranks do not divide the vocabulary evenly, which FSDP2 needs, or if the model computes its
    logits in a way of its own.
    """
    ranks, model = mesh["tp"], module.model
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not module.is_chunked or not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
        return
    num_tokens = head.out_features
    if num_tokens % ranks.size() or table.num_embeddings != num_tokens:
        return
    is_tied = head.weight is table.weight
    parallelize_module(table, ranks, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(head, ranks, ColwiseParallel())
    if is_tied:
        head.weight = table.weight
    module.vocabulary = VocabularyShard(ranks.get_group(), ranks.get_local_rank() * (num_tokens // ranks.size()))


def split_residual(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Let the embedding return, and the last norm take, a part of the tokens; the output layer has all of them."""
    cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False)
    parallelize_module(model.get_input_embeddings(), mesh["tp"], cut)
    parallelize_module(model.base_model, mesh["tp"], {"norm": SequenceParallel()})
    model.base_model.norm.register_forward_hook(_gather_tokens)  # type: ignore[operator, union-attr]


def _gather_tokens(norm: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
    """Return all tokens of a DTensor, of which each rank computes the same afterwards."""
    return output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def should_compile(model: PreTrainedModel, section: DTensorConfig, device: torch.device) -> bool:
    """Return whether decoder layers are compiled; by default only if Triton works, which compiles for CUDA.

    Adapters are left alone by default: a layer is compiled again when they are switched off for the reference.
    """
    if section.compile != "auto":
        return section.compile
    is_adapted = isinstance(section, TrainedDTensorConfig) and section.lora_cfg.enabled
    is_known = model.config.model_type in COMPILED_MODEL_TYPES and section.tensor_parallel_size == 1 and not is_adapted
    return device.type == "cuda" and is_known and has_kernels(device)


def compile_layers(model: nn.Module) -> None:
    """Compile each decoder layer by itself at its first use (`compile`); equal layers share their kernels.

    Attention over packed sequences keeps its own kernel. At the second length of a micro-batch torch compiles once
    more, for every length.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward)  # within FSDP2's hooks, which torch cannot compile


@contextmanager
def kept_unsharded(module: nn.Module, *, is_enabled: bool) -> Iterator[None]:
    """Return a context in which a module that FSDP2 wraps keeps its whole weights from the first use on.

    Gradients are summed in each rank's memory and reduced by the backward pass that `reduce_next_gradients` announces;
    without one they must not exist. All ranks enter and leave it together.
    """
    if not is_enabled or not isinstance(module, FSDPModule):
        yield
        return
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_forward(False)
    module.set_reshard_after_backward(False)
    try:
        yield
    finally:
        reduce_next_gradients(module)
        module.set_reshard_after_forward(True)
        module.set_reshard_after_forward(False, recurse=False)  # its default: the root comes first again
        reshard(module)


def reshard(module: nn.Module) -> None:
    """Free gathered weights; after scoring the root still holds its own."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def reduce_next_gradients(module: nn.Module) -> None:
    """Let the next backward pass reduce the gradients that `kept_unsharded` has summed, with its own."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)


def should_keep_unsharded(
    module: nn.Module, config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device
) -> bool:
    """Return whether a pass over several micro-batches may keep the whole weights; the same on every rank."""
    section = config.section_of(DTensorConfig)
    if not isinstance(module, FSDPModule):
        return False
    if section.keep_unsharded != "auto" or section.cpu_offload:
        return section.keep_unsharded is True
    budget = KEPT_SHARE * _device_memory(device, layout.world_size)
    return min(layout.all_gather_object(budget)) >= unsharded_bytes(module, config.precision)


def unsharded_bytes(module: nn.Module, precision: str) -> int:
    """Return the memory of whole weights in `precision` and their gradients in float32, of one tensor-parallel rank.

    Example: 1.5e9 trained weights in bfloat16: 9 GB; 4e9 frozen ones: 8 GB.
    """
    bytes_of_weight = 2 if precision == "bfloat16" else 4
    return sum(_num_unsharded(p) * (bytes_of_weight + 4 * p.requires_grad) for p in module.parameters())


def _plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
        # Weights are replicated, and their gradients are summed over the ranks' heads.
        "self_attn.q_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
    }
    present = dict(layer.named_modules())
    styles = {name: style for name, style in plan.items() if name in present}
    return {part: each for name, style in styles.items() for part, each in _parts(name, style, present).items()}


def _parts(name: str, style: ParallelStyle, present: Mapping[str, nn.Module]) -> dict[str, ParallelStyle]:
    """Return the plan of one layer: its own, or that of the matrices of an adapted one (lora.py).

    W + scale B A is divided as W is: its rows by those of B, its columns by those of A. The other matrix is replicated.
    """
    base = f"{name}{BASE_LAYER}".rstrip(".")
    if base not in present:
        return {name: style}
    divided = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    return {base: style, f"{name}.{divided}.default": style}


def _residual_plan() -> dict[str, ParallelStyle]:
    """Return the plan of a layer between whose matrices each rank has a part of the tokens [1, n, H]."""
    return {
        "input_layernorm": SequenceParallel(),  # weights are replicated, and their gradients summed over the tokens
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


def _num_unsharded(parameter: nn.Parameter) -> int:
    """Return the entries of a parameter that a rank holds after FSDP2 has gathered it."""
    split: list[int] = []
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split = [parameter.device_mesh[name].size() for name in ("tp", "ep") if name in names]
    return parameter.numel() // math.prod(split)


def _device_memory(device: torch.device, num_ranks: int) -> int:
    """Return the bytes of an accelerator, or of this machine's memory divided by the ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks


def module_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers, those of FSDP2 as shards."""
    reshard(module)
    yield from module.parameters()
    yield from module.buffers()


def place_on_device(
    module: CausalLogprobs,
    tensors: ModelTensors,
    config: PolicyConfig | TeacherConfig,
    layout: RankLayout,
    device: torch.device,
    *,
    is_sharded: bool,
    key: str = "policy.dtensor_cfg",
) -> None:
    """Shard a module that is on the meta device, make the memory of this rank's shards, and read their values.

    `key` is the section's, for errors.
    """
    if is_sharded:
        shard(module, config, layout, device, key=key)
    is_kept_on_cpu = is_sharded and config.section_of(DTensorConfig).cpu_offload
    materialize(module, module.model, CPU if is_kept_on_cpu else device)
    copy_tensors(module, module.model, tensors)


def cast_frozen(module: nn.Module) -> None:
    """Cast the parameters that are not trained, but no buffers and routers, to bfloat16."""
    kept = {id(parameter) for router in find_routers(module) for parameter in router.parameters()}
    for parameter in module.parameters():
        if not parameter.requires_grad and id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


@torch.no_grad()
def materialize(module: nn.Module, model: PreTrainedModel, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory; rotary frequencies and the like get their values.

    `module` contains `model`; its parameters may be shards.
    """
    module.to_empty(device=device)
    model.tie_weights()  # moving one by one unties parameters that are not sharded
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # transformers then computes only what no file holds
    model.initialize_weights()


@torch.no_grad()
def copy_tensors(module: nn.Module, model: PreTrainedModel, tensors: ModelTensors) -> None:
    """Overwrite the model's weights, or this rank's shards of them; a rank reads no more than its shard at a time."""
    reshard(module)
    names, done = tensors.shapes().keys(), set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        plain = name.replace(BASE_LAYER, ".")
        if plain in names and id(tensor) not in done:
            done.add(id(tensor))
            index, local = own_part(tensor)
            if local.numel() > 0:
                local.copy_(tensors.read(plain, index))


def load_weights(module: nn.Module, model: PreTrainedModel, directory: Path) -> None:
    """Load a Hugging Face directory; raises CheckpointError for no weights there, or those of another model."""
    try:
        copy_tensors(module, model, open_tensors(str(directory), model, {}))
    except ConfigError as error:
        raise CheckpointError(f"{directory} cannot be loaded, or holds another model: {error.problem}") from error
