"""The kernels of Megatron's layers, chosen by the device and by what is installed: its fusions, a layer's modules."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from transformers import PreTrainedConfig

from nemo_rl.policy.megatron.mapping import has_head_norms, has_output_bias

MIN_TRANSFORMER_ENGINE = "1.9.0"  # before, its norm of queries and keys harmed convergence, by Megatron's own note


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels beside torch's own a stage computes with."""

    compiled: bool = False  # torch.compile's, which on CUDA are Triton's
    transformer_engine: bool = False
    apex_gradients: bool = False  # Apex's products that add to a weight's gradient in place

    @property
    def fusions(self) -> dict[str, bool]:
        """Return the options of `TransformerConfig` that choose fused kernels (megatron-core 0.16.1)."""
        return {
            "bias_activation_fusion": self.compiled,  # SwiGLU and its gradient, by jit_fuser
            "bias_dropout_fusion": self.compiled,  # bias and residual sum, by jit_fuser
            "gradient_accumulation_fusion": self.apex_gradients,
            "apply_rope_fusion": self.transformer_engine,
            "masked_softmax_fusion": False,  # belongs to Megatron's own attention; CausalAttention replaces it
            "persist_layer_norm": False,  # belongs to Apex's LayerNorm; these models have RMSNorm
        }


def choose_kernels(device_type: str) -> Kernels:
    """Return the kernels of a device: on CUDA all that are installed, on a CPU torch's own."""
    if device_type != "cuda":
        return Kernels()
    return Kernels(
        compiled=importlib.util.find_spec("triton") is not None,
        transformer_engine=transformer_engine.HAVE_TE and is_te_min_version(MIN_TRANSFORMER_ENGINE),
        apex_gradients=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


class NormOfParts(torch.nn.RMSNorm):
    """A norm of the tokens of each tensor-parallel rank, over which Megatron then sums the gradient of its weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]  # read by Megatron


def layer_spec(
    model: PreTrainedConfig,
    kernels: Kernels,
    *,
    core_attention: type,
    experts: type | None = None,
    splits_residual: bool = False,
) -> ModuleSpec:
    """Return the specification of a layer around an attention: Megatron's linear layers and norms, or their wrappers
    of TransformerEngine's; with `experts` in place of the MLP if the layer has some, whose matrices are Megatron's.

    Norms stay apart from the linear layers after them, so that parameters have the same names either way.
    """
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_head_norms(model))
    layer: Any = spec.submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    attention.core_attention = core_attention
    if splits_residual:  # which Megatron's wrapper of torch's norm refuses
        layer.input_layernorm = layer.pre_mlp_layernorm = NormOfParts
        if has_head_norms(model):
            attention.q_layernorm = attention.k_layernorm = NormOfParts
    if kernels.transformer_engine:
        layer.input_layernorm = layer.pre_mlp_layernorm = transformer_engine.TENorm
        attention.linear_qkv = mlp.linear_fc1 = transformer_engine.TEColumnParallelLinear
        attention.linear_proj = mlp.linear_fc2 = transformer_engine.TERowParallelLinear
        if has_head_norms(model):
            attention.q_layernorm = attention.k_layernorm = transformer_engine.TENorm
    if has_output_bias(model):
        attention.linear_proj = _with_bias(cast(Any, attention.linear_proj))
    if experts is not None:
        layer.mlp = experts
    return spec


@lru_cache
def _with_bias(linear: type) -> type:
    """Return an output projection of attention with a bias, which Megatron gives to all matrices or to none."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        linear.__init__(self, *args, **{**kwargs, "bias": True})

    return type(f"{linear.__name__}WithBias", (linear,), {"__init__": __init__})
