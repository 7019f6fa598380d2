"""Less rounding of bfloat16 models, for policy and engines alike.

Logits: each product of two bfloat16 numbers is exact in float32, and the units that multiply them add in float32; a
matrix product that returns bfloat16 then rounds the sums. V rows of the weight, H columns.

Rotary embedding: vLLM 0.32 rotates queries and keys in float32, with bfloat16 cosines and sines, and rounds the result;
transformers rounds both products too, which is the largest part of the difference of their log-probs.

On a CPU the policy rounds where vLLM's kernels do, so that hidden states are the same bit for bit but for the order of
sums (`compute_as_on_cpu`): each norm, attention and sum of experts computes in float32 and is rounded once. What blocks
add up to the residual stream is not rounded (Megatron's `fp32_residual_connection`), in vLLM's norms as in the policy
(generation/vllm/cpu/layers.py). It takes hooks on a Hugging Face model, which change no name and no weight.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

CPU_BLOCK = 2**20  # weight elements cast at once, which fit a core's cache
MIN_CPU_ROWS = 256
ROUNDING_ATTENTION = "nemo_rl_sdpa_of_rounded"
FLOAT32_EXPERTS = "nemo_rl_float32_experts"


def float32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden [..., H] @ weight [V, H].T of bfloat16 tensors in float32, [..., V]; it has no derivative."""
    rows = hidden.flatten(0, -2)
    if rows.device.type == "cpu":  # torch 2.13 has no such product on a CPU
        product = _by_blocks(rows, weight)
    else:
        product = torch.mm(rows, weight.T, out_dtype=torch.float32)
    return product.unflatten(0, hidden.shape[:-1])


def allow_bfloat16_units() -> None:
    """Let this process multiply in the CPU's bfloat16 units; the setting is global to the process.

    Only for processes in which a single thread computes: elsewhere it would round the float32 products of other
    threads, which may belong to a policy, a scorer or a user's reward function.
    """
    _Units.are_allowed = True


class _Units:
    are_allowed = False


def _by_blocks(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast the weight block by block; oneDNN multiplies float32 numbers that are bfloat16 exactly in bfloat16 units.

    With them this takes twice as long as the product in bfloat16, without them four times, for 64 to 2,048 rows.
    """
    result = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    size = max(CPU_BLOCK // weight.shape[1], MIN_CPU_ROWS)
    wide = hidden.float()
    with _bfloat16_units() if _Units.are_allowed else nullcontext():
        for start in range(0, len(weight), size):
            block = weight[start : start + size]
            result[:, start : start + size] = wide @ block.float().T
    return result


@contextmanager
def _bfloat16_units() -> Iterator[None]:
    """Let float32 products of this process be computed in bfloat16 inside the block, if the CPU has units for it."""
    backend = cast(Any, torch.backends.mkldnn).matmul  # not in its type
    usual, backend.fp32_precision = backend.fp32_precision, "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = usual


def round_as_engine(decoder: PreTrainedModel, probe: PreTrainedModel, *, on_cpu: bool) -> bool:
    """Let a decoder that computes in bfloat16 round where its engine does, as far as it can.

    `probe` is a decoder of the same kind with bfloat16 weights. Returns whether layers are given float32 now, which
    FSDP2 must not cast.
    """
    kind = type(decoder).__name__
    if rotates := can_rotate_in_float32(probe):
        rotate_in_float32(decoder)
    else:
        logger.warning("%s does not rotate queries and keys in float32, as its engine does", kind)
    if computes := on_cpu and can_compute_as_on_cpu(probe):
        compute_as_on_cpu(decoder)
    elif on_cpu:
        logger.warning("%s does not read its residual stream through norms: sums are rounded to bfloat16", kind)
    return rotates or computes


def compute_as_on_cpu(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let a model that computes in bfloat16 round where vLLM does on a CPU; return the hooks.

    Layers cast their input [..., H], which is bfloat16 for the first one alone: what is added to float32 is float32.
    Norms read float32; their outputs, and those of experts, are rounded.
    The model must be of a kind that `can_compute_as_on_cpu`, and FSDP2 must not cast the inputs of its layers.
    """
    norms, experts = ([each for each in model.modules() if has(each)] for has in (_is_norm, _is_gated_experts))
    for each in experts:
        cast(Any, each).config._experts_implementation = FLOAT32_EXPERTS
    return [
        *(each.register_forward_pre_hook(_widen_input) for each in (*_layers(model), *norms)),
        *(each.register_forward_hook(_narrow_output) for each in (*norms, *experts)),
    ]


def _float32_experts_forward(
    experts: Any, hidden: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Return sum_k scores * expert(hidden) of tokens [N, H] in float32, in which the products' outputs stay too.

    Only what enters the last product is rounded. `ids` and `scores` are [N, k].
    """
    return grouped_mm_experts_forward(cast(Any, _WidenedExperts(experts)), hidden.float(), ids, scores.float())


class _WidenedExperts:
    """A layer's experts as transformers' forward sees them, with float32 weights."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.float() if isinstance(value, torch.Tensor) else value

    def _apply_gate(self, states: torch.Tensor) -> torch.Tensor:
        return self._experts._apply_gate(states).bfloat16().float()


ExpertsInterface.register(FLOAT32_EXPERTS, _float32_experts_forward)


def rotate_in_float32(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let a decoder rotate queries and keys in float32 and round them before its attention; return the hooks.

    Cosines and sines become float32, and so does what is multiplied with them; attention by sdpa is replaced by
    ROUNDING_ATTENTION. The model must be of a kind that `can_rotate_in_float32`.
    """
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(ROUNDING_ATTENTION)
    rotary = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    return [module.register_forward_hook(_widen_rotation) for module in rotary]


@torch.no_grad()
def can_rotate_in_float32(model: PreTrainedModel) -> bool:
    """Return whether a decoder with bfloat16 weights runs so: its attention must be one that transformers looks up."""
    usual, hooks = model.config._attn_implementation, rotate_in_float32(model)
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except (RuntimeError, TypeError, ValueError):
        return False  # a product of both dtypes
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(usual or "sdpa")
    return True


def attention_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values rounded to the dtype of the values; on a CPU as float32, in which it computes."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return (query.float(), key.float(), value.float()) if value.device.type == "cpu" else (query, key, value)


def _rounding_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    value = value.bfloat16()  # a cache has values in the dtype of its keys
    result, _ = sdpa_attention_forward(module, *attention_inputs(query, key, value), *args, **options)
    return result.bfloat16(), None


AttentionInterface.register(ROUNDING_ATTENTION, _rounding_attention_forward)
AttentionMaskInterface.register(ROUNDING_ATTENTION, sdpa_mask)


def keep_float32_routers(routers: Iterable[nn.Module]) -> None:
    """Let the routers of a mixture of experts, whose weights must be float32, read and score in float32.

    Rounded logits send tokens whose experts are nearly equal elsewhere.
    """
    for router in routers:
        router.register_forward_pre_hook(_widen_input)


@torch.no_grad()
def can_compute_as_on_cpu(model: PreTrainedModel) -> bool:
    """Return whether a model with bfloat16 weights runs so: its blocks must read the residual stream through norms."""
    probed: Any = model.base_model
    outputs: list[Any] = []
    text: Any = model.config.get_text_config()
    experts, hooks = text._experts_implementation, compute_as_on_cpu(model)
    for layer in _layers(model):
        hooks.append(layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output)))
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        hidden = probed(input_ids=tokens, use_cache=False).last_hidden_state
    except (RuntimeError, IndexError, AttributeError, TypeError, ValueError):
        return False  # a product of both dtypes; a layer called with keywords alone; other inputs or outputs
    finally:
        for hook in hooks:
            hook.remove()
        text._experts_implementation = experts
    sums = {(output[0] if isinstance(output, tuple) else output).dtype for output in outputs}
    return sums == {torch.float32} and hidden.dtype == torch.bfloat16


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _is_norm(module: nn.Module) -> bool:
    """Return whether all parameters of the module are vectors, and it has no children."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.ndim == 1 for p in own) and next(module.children(), None) is None


def _is_gated_experts(module: nn.Module) -> bool:
    return getattr(module, "has_gate", False) is True and hasattr(module, "_apply_gate")


def _widen_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return inputs[0].float(), *inputs[1:]


def _widen_rotation(rotary: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Return cosines and sines as float32 tensors of bfloat16 numbers; other outputs, such as angles, as they are."""
    return tuple(each.bfloat16().float() for each in output) if isinstance(output, tuple) else output


def _narrow_output(norm: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.bfloat16)
