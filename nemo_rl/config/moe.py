"""`policy.moe`: the routers of a mixture of experts, for every backend. Imports no torch."""

from typing import TYPE_CHECKING

from pydantic import Field

from nemo_rl.config.images import VISION_FAMILIES
from nemo_rl.config.kinds import Section
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SIGMOID_MODEL_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "nemotron_h",
)  # whose routers add a bias per expert to the scores that choose
BALANCED_MODEL_TYPES = ("qwen3_moe", "mixtral", "gpt_oss", *SIGMOID_MODEL_TYPES)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in config.json


class MoEConfig(Section):
    """Routers of a mixture of experts: what of them is trained, and how the load of the experts is balanced."""

    freeze_router: bool = False  # routers keep their weights; bias_update_rate still moves their biases
    # weight of the balance loss of each layer: num_experts * sum(share of choices * mean probability), 1 if balanced
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    z_loss_coeff: float = Field(default=0.0, ge=0)  # weight of mean(logsumexp(router logits) ** 2) of each layer
    # Added to the bias of each expert below the mean load after an optimizer step, subtracted above it.
    bias_update_rate: float = Field(default=0.0, ge=0)

    @property
    def balances(self) -> bool:
        """Return whether a loss or a bias balances the load."""
        return bool(self.aux_loss_coeff or self.z_loss_coeff or self.bias_update_rate)


def num_experts(model: "PreTrainedConfig") -> int:
    """Return the number of routed experts per layer; 0 for a dense model."""
    text = model.get_text_config()
    return next((int(count) for name in EXPERT_COUNTS if (count := getattr(text, name, None))), 0)


def adapters_problem(model: "PreTrainedConfig") -> str | None:
    """Return why vLLM cannot hold adapters of a model beside its weights; None if it can."""
    if model.model_type in VISION_FAMILIES:
        return f"adapters beside the weights of a model of type {model.model_type!r}, which sees, are not tested"
    kind = model.get_text_config().model_type
    return f"vLLM would adapt the experts of this {kind!r} model too" if num_experts(model) else None


def check_moe(section: MoEConfig, model: "PreTrainedConfig", *, key: str = "policy.moe") -> None:
    """Raise ConfigError for settings of routers that the model does not have; needs no weights."""
    kind = model.get_text_config().model_type
    if section.freeze_router and not num_experts(model):
        raise ConfigError(f"{key}.freeze_router", True, f"a model of type {kind!r} has no router; allowed: false")
    types = {"bias_update_rate": SIGMOID_MODEL_TYPES}
    for name in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate"):
        allowed = types.get(name, BALANCED_MODEL_TYPES)
        if getattr(section, name) and kind not in allowed:
            problem = f"a model of type {kind!r}; read only for {', '.join(allowed)}; allowed: 0"
            raise ConfigError(f"{key}.{name}", getattr(section, name), problem)
