"""A Hugging Face model's configuration and a `megatron_cfg` as Megatron's own configuration of a model."""

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.policy.megatron import mapping

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    model: PreTrainedConfig, config: PolicyConfig | TeacherConfig, device: torch.device
) -> TransformerConfig:
    """What Megatron's layers and schedules read.

    Fused kernels of Megatron's and Apex's are off: they change nothing but speed, and need what may not be installed.
    Weights are not initialised, since all are loaded. Losses are sums over micro-batches and ranks (a "per-token loss"
    that nothing divides), so gradients are added up, not averaged.
    """
    section = config.megatron_cfg
    dtype = DTYPES[config.precision]
    is_cpu = device.type == "cpu"
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=mapping.head_dim(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=mapping.has_head_norms(model),
        add_bias_linear=False,
        add_qkv_bias=mapping.has_input_bias(model),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=section.tensor_model_parallel_size,
        pipeline_model_parallel_size=section.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=section.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=section.num_layers_in_last_pipeline_stage,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=DTYPES[section.pipeline_dtype or config.precision],
        variable_seq_lengths=True,  # micro-batches are cut to their longest sample
        moe_token_dispatcher_type="alltoall",  # there are no experts, but the check of the line above asks for it
        batch_p2p_comm=not is_cpu,
        deallocate_pipeline_outputs=True,
        cuda_graph_scope=[],  # none; the default warns
        use_cpu_initialization=is_cpu,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=_added_up,
    )


def _added_up(model: list[Any], num_tokens: Any = None, **arguments: Any) -> None:
    """Gradients of all ranks added up, and divided by nothing: the loss has divided already."""
    finalize_model_grads(model, None, **arguments)
