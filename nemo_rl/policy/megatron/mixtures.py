"""Mixtures of experts by their Hugging Face configuration: layers, routers, sizes. Imports neither torch nor Megatron.

Known are Qwen3-MoE, Mixtral, and GLM-4.5, whose routers are DeepSeek-V3's: sigmoid scores, a bias per expert that only
chooses, choices limited to groups of experts, and a shared expert beside the routed ones.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MIXTURE_TYPES = ("qwen3_moe", "mixtral", "glm4_moe")
REFUSED_MIXTURES = {
    "deepseek_v2": "its multi-head latent attention is not mapped",
    "deepseek_v3": "its multi-head latent attention is not mapped",
    "deepseek_v4": "its latent attention is not mapped",
    "glm4_moe_lite": "its multi-head latent attention is not mapped",
    "gpt_oss": "its experts' biases and attention sinks are not mapped",
    "nemotron_h": "its state-space layers are not mapped",
    "qwen2_moe": "the gate of its shared expert is not mapped",
    "qwen3_5_moe": "its linear attention is not mapped",
    "qwen3_next": "its linear attention is not mapped",
}
GROUP_CHOICES = 2  # best scores of a group that transformers ranks groups by; Megatron takes topk / number of groups


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model."""

    num_experts: int  # routed ones of a layer
    topk: int  # experts per token
    width: int  # inner width of a routed expert
    has_experts: tuple[bool, ...]  # per layer; the others are dense
    renormalizes: bool  # a token's weights sum to 1 (or to `scaling`)
    has_bias: bool = False  # sigmoid scores; a bias per expert is added to the scores that choose
    num_groups: int = 1  # groups of experts
    topk_groups: int = 1  # groups that a token's experts are in
    scaling: float | None = None  # factor of the weights
    shared_width: int | None = None  # inner width of the shared expert


def read_mixture(model: "PreTrainedConfig") -> Mixture | None:
    """Return the experts of a model; None for a dense model, or of a type that is not known."""
    reader = {"qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "glm4_moe": _glm4_moe}.get(model.model_type)
    return None if reader is None else reader(model)


def check_mixture(mixture: Mixture, model: "PreTrainedConfig", *, key: str) -> None:
    """Raise ConfigError for routers that megatron-core 0.16.1 computes otherwise; `key` is that of the section."""
    problem = None
    if mixture.has_bias and not mixture.renormalizes:
        problem = "norm_topk_prob is false, and Megatron always renormalizes sigmoid scores"
    elif mixture.num_groups > 1 and mixture.topk // mixture.topk_groups != GROUP_CHOICES:
        problem = (
            f"num_experts_per_tok {mixture.topk} of topk_group {mixture.topk_groups} groups: Megatron ranks groups by "
            f"num_experts_per_tok / topk_group scores, the model by {GROUP_CHOICES}"
        )
    elif getattr(model, "router_jitter_noise", 0):
        problem = "router_jitter_noise is not 0, which would make log-probs of training differ from those of sampling"
    if problem:
        raise ConfigError(f"{key}.enabled", True, f"the model's routers are not mapped to Megatron: {problem}")


def _qwen3_moe(model: "PreTrainedConfig") -> Mixture:
    dense, step = set(model.mlp_only_layers or ()), model.decoder_sparse_step
    layers = range(model.num_hidden_layers)
    return Mixture(
        num_experts=model.num_experts,
        topk=model.num_experts_per_tok,
        width=model.moe_intermediate_size,
        has_experts=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        renormalizes=model.norm_topk_prob,
    )


def _mixtral(model: "PreTrainedConfig") -> Mixture:
    return Mixture(
        num_experts=model.num_local_experts,
        topk=model.num_experts_per_tok,
        width=model.intermediate_size,
        has_experts=(True,) * model.num_hidden_layers,
        renormalizes=True,
    )


def _glm4_moe(model: "PreTrainedConfig") -> Mixture:
    first = model.first_k_dense_replace
    return Mixture(
        num_experts=model.n_routed_experts,
        topk=model.num_experts_per_tok,
        width=model.moe_intermediate_size,
        has_experts=tuple(layer >= first for layer in range(model.num_hidden_layers)),
        renormalizes=model.norm_topk_prob,
        has_bias=True,
        num_groups=model.n_group,
        topk_groups=model.topk_group,
        scaling=model.routed_scaling_factor,
        shared_width=model.moe_intermediate_size * model.n_shared_experts,
    )
