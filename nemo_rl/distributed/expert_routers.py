"""The routers of transformers' mixtures of experts, which engines observe and the policy replays.

A router is a module that returns (logits, scores, ids): logits [N, E] of N tokens and E experts, the ids [N, k] of the
k experts of each token, and the weights [N, k] of their outputs. How the experts are sharded does not matter to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

RouterOutput: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, scores, ids


def affinities(logits: torch.Tensor, *, is_sigmoid: bool) -> torch.Tensor:
    """Return those of all experts to a token, [N, E] float32, from logits [N, E]: sigmoids, or their softmax."""
    return logits.float().sigmoid() if is_sigmoid else logits.softmax(-1, dtype=torch.float32)


def probabilities(logits: torch.Tensor, *, is_sigmoid: bool) -> torch.Tensor:
    """Return a distribution over experts, [N, E] float32: the affinities divided by their sum."""
    values = affinities(logits, is_sigmoid=is_sigmoid)
    return values / values.sum(-1, keepdim=True) if is_sigmoid else values


@dataclass(frozen=True, slots=True)
class RouterKind:
    """The way in which a class of routers weights the experts of a token."""

    model_type: str
    is_sigmoid: bool = False  # affinities are sigmoids of the logits, not their softmax
    epsilon: float = 0.0  # added to the sum of the chosen affinities that they are divided by

    def scores(self, router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights [N, k] that the router would give the experts `ids` [N, k] int64, in float32.

        They are functions of the logits, so that the router has a gradient whoever chose the experts. The bias that
        balances experts without a loss only decides which are chosen.
        """
        scores = affinities(logits, is_sigmoid=self.is_sigmoid).gather(1, ids)
        if getattr(router, "norm_topk_prob", True):  # Mixtral's always does, gpt-oss's softmax is of the chosen alone
            scores = scores / (scores.sum(-1, keepdim=True) + self.epsilon)
        return scores * getattr(router, "routed_scaling_factor", 1.0)


ROUTERS: Mapping[str, RouterKind] = {  # by the name of the class in transformers 5.19
    "DeepseekV3TopkRouter": RouterKind("deepseek_v3", is_sigmoid=True, epsilon=1e-20),
    "Glm4MoeTopkRouter": RouterKind("glm4_moe", is_sigmoid=True, epsilon=1e-20),
    "GptOssTopKRouter": RouterKind("gpt_oss"),
    "MixtralTopKRouter": RouterKind("mixtral"),
    "NemotronHTopkRouter": RouterKind("nemotron_h", is_sigmoid=True, epsilon=1e-20),
    "Qwen3MoeTopKRouter": RouterKind("qwen3_moe"),
}
MODEL_TYPES = sorted(kind.model_type for kind in ROUTERS.values())


def kind_of(router: nn.Module) -> RouterKind:
    """Return the kind of a router of `find_routers`."""
    return ROUTERS[_class_name(router)]


def find_routers(model: nn.Module) -> list[Any]:
    """Return the model's routers of known kinds, in the order of its layers."""
    return [module for module in model.modules() if _class_name(module) in ROUTERS]


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class in transformers; FSDP2 prefixes those that it wraps."""
    return type(module).__name__.removeprefix("FSDP")
