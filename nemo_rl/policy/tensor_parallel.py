"""Tensor parallelism: every layer's matrices split over the ranks of a row.

Attention is split by heads and the MLP by its inner width: the first matrix of each by columns, the second by rows,
whose partial results are added up over the ranks (Megatron-LM, arXiv 1909.08053). Embeddings, norms and the output
layer are the same on each rank of a row, so tied embeddings stay one tensor.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedConfig

from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import decoder_layers

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_HEADS_DIM = 2  # of [B, T, heads, width of a head], which the norms of Qwen3's queries and keys see


def check_tensor_parallel(size: int, model_config: PreTrainedConfig, *, section: str = "policy") -> None:
    """Refuse a `tensor_parallel_size` of `section` that the model cannot be split by; needs no weights.

    Raises:
        ConfigError: names the sizes that are possible, or the models that are.
    """
    if size == 1:
        return
    key = f"{section}.dtensor_cfg.tensor_parallel_size"
    if model_config.model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(key, size, f"no plan for models of type {model_config.model_type!r}; supported: {supported}")
    widths = {name: getattr(model_config, name) for name in _DIVIDED}
    allowed = [n for n in range(1, min(widths.values()) + 1) if all(width % n == 0 for width in widths.values())]
    if size not in allowed:
        shown = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigError(key, size, f"must divide the model's {shown}; allowed: {', '.join(map(str, allowed))}")


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each layer's matrices by this rank's part of them; `mesh` has the dimension "tp"."""
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh["tp"], _plan(layer))


def _plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
        # Weights are whole on each rank, and their gradients are added up over the ranks' heads.
        "self_attn.q_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
    }
    present = dict(layer.named_modules())
    return {name: style for name, style in plan.items() if name in present}
