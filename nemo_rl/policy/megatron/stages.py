"""This rank's stage of a Hugging Face model: one to be trained, or frozen."""

from typing import Any

import torch
from transformers import PreTrainedModel

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.policy.megatron.model import Stage
from nemo_rl.policy.megatron.settings import transformer_config
from nemo_rl.policy.megatron.weights import StageWeights


def make_stage(
    model: PreTrainedModel, config: PolicyConfig | TeacherConfig, *, temperature: float, device: torch.device
) -> Stage:
    """Without weights yet, which `stage_weights` loads; computes in `precision`."""
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
    """Which of the model's weights the stage holds."""
    return StageWeights(stage, model.config, {name: tensor.shape for name, tensor in model.state_dict().items()})


def frozen_stage(
    model: PreTrainedModel, config: PolicyConfig | TeacherConfig, *, temperature: float, device: torch.device
) -> Stage:
    """With the model's weights, in `precision`, and without gradients."""
    stage = make_stage(model, config, temperature=temperature, device=device).requires_grad_(False)
    stage_weights(stage, model).load(model.state_dict(), lambda parameter: parameter)
    return stage
