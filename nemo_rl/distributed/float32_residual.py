"""The residual stream of a bfloat16 model in float32, for policy and engine alike: what blocks add up is not rounded.

Megatron's name for it is `fp32_residual_connection`. Norms read the float32 sums and give the blocks bfloat16, so that
matrix products, attention and activations stay as they are. It takes hooks on a Hugging Face model, which change no
name and no weight.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def keep_float32_residual(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let the decoder layers of a model that computes in bfloat16 sum up what they add in float32; return the hooks.

    Layers cast their input [..., H], which is bfloat16 for the first one alone: what is added to float32 is float32.
    The model must be of a kind that `can_keep_float32_residual`, and FSDP2 must not cast the inputs of its layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    norms = [module for module in model.modules() if _is_norm(module)]
    return [
        *(layer.register_forward_pre_hook(_widen_input) for layer in layers),
        *(norm.register_forward_hook(_narrow_output) for norm in norms),
    ]


@torch.no_grad()
def can_keep_float32_residual(model: PreTrainedModel) -> bool:
    """Return whether a model with bfloat16 weights runs so: its blocks must read the residual stream through norms."""
    probed: Any = model.base_model
    outputs: list[Any] = []
    hooks = keep_float32_residual(model)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            hooks.append(module.register_forward_hook(lambda layer, inputs, output: outputs.append(output)))
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        hidden = probed(input_ids=tokens, use_cache=False).last_hidden_state
    except (RuntimeError, IndexError):  # a product of both dtypes; a layer that is called with keywords alone
        return False
    finally:
        for hook in hooks:
            hook.remove()
    sums = {(output[0] if isinstance(output, tuple) else output).dtype for output in outputs}
    return sums == {torch.float32} and hidden.dtype == torch.bfloat16


def _is_norm(module: nn.Module) -> bool:
    """Return whether the module is one of vectors alone."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(p.ndim == 1 for p in own) and next(module.children(), None) is None


def _widen_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return inputs[0].float(), *inputs[1:]


def _narrow_output(norm: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(torch.bfloat16)
