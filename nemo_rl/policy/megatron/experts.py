"""Megatron's layers of experts: their options, their routers, and how tensor-parallel ranks share the tokens.

N tokens, E experts, H hidden size. Tokens go to their experts' ranks by all-to-all: micro-batches differ in length, and
an all-gather of unequal parts is not possible.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from nemo_rl.policy.megatron.backend import MegatronConfig
from nemo_rl.policy.megatron.mixtures import Mixture


def expert_options(mixture: Mixture | None, section: MegatronConfig) -> dict[str, Any]:
    """Return the options of `TransformerConfig` (megatron-core 0.16.1) for the experts of a model.

    Experts run one after another: grouped products need TransformerEngine and give weights other names. Megatron's own
    balancing stays off; it would divide by other numbers of tokens than the loss.
    """
    options: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}  # also what variable_seq_lengths asks for
    if mixture is None:
        return options
    is_grouped = mixture.num_groups > 1
    return options | {
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.topk,
        "moe_ffn_hidden_size": mixture.width,
        "moe_layer_freq": [int(has_experts) for has_experts in mixture.has_experts],
        "moe_shared_expert_intermediate_size": mixture.shared_width,
        "moe_router_pre_softmax": not mixture.has_bias and not mixture.renormalizes,
        "moe_router_score_function": "sigmoid" if mixture.has_bias else "softmax",
        "moe_router_num_groups": mixture.num_groups if is_grouped else None,
        "moe_router_group_topk": mixture.topk_groups if is_grouped else None,
        "moe_router_topk_scaling_factor": mixture.scaling,
        "moe_router_dtype": section.moe_router_dtype or ("fp32" if mixture.has_bias else None),
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": section.expert_model_parallel_size,
        "expert_tensor_parallel_size": section.expert_tensor_parallel_size,
    }


def find_routers(stage: nn.Module) -> list[TopKRouter]:
    """Return the routers of a stage in the order of its layers."""
    return [module for module in stage.modules() if isinstance(module, TopKRouter)]


def freeze_routers(stage: nn.Module) -> None:
    """Train no router of the stage (`policy.moe.freeze_router`)."""
    for router in find_routers(stage):
        router.requires_grad_(False)


class ExpertRouter(TopKRouter):
    """Megatron's router, which keeps the logits of its last call and, of sigmoid scores, has a bias per expert.

    The bias is added to the scores that choose. Megatron itself never moves it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: torch.Tensor | None = None  # [N, E]
        if self.is_sigmoid:
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(self.weight.shape[0], dtype=torch.float32))

    @property
    def is_sigmoid(self) -> bool:
        """Return whether scores are sigmoids of the logits, not their softmax."""
        return self.score_function == "sigmoid"

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and choices of experts, [N, E] each, from logits [T, B, E]."""
        self.logits = logits.flatten(0, 1)
        return super().routing(logits, padding_mask)


class ExpertLayer(MoELayer):
    """Megatron's layer of experts, in which each tensor-parallel rank sends a part of the tokens to the experts.

    Every tensor-parallel rank has all tokens and routes them, so that the router's gradient is whole on each; gradients
    of the experts are summed over all ranks that send tokens to them.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        submodules: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts).submodules
        submodules.router = ExpertRouter
        super().__init__(config, submodules, **kwargs)
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]  also without expert parallelism

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Return [T, B, H] from [T, B, H], and no bias."""
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states)
        tokens, *routing = self._own_part(hidden_states.flatten(0, 1), probs, routing_map)
        tokens, sent_probs = self.preprocess(tokens, *routing)
        tokens, sent_probs = self.dispatch(tokens, sent_probs)
        output, _ = self.routed_experts_compute(tokens, sent_probs)
        output = self._all_parts(self.postprocess(self.combine(output), None), probs.shape[0])
        output = output.view(hidden_states.shape)
        return output if shared is None else output + shared, None

    def _own_part(
        self, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this tensor-parallel rank's rows of [N, H], [N, E] and [N, E]; missing ones have no weight."""
        size = self.attn_tp_group.size()
        if size == 1:
            return tokens, probs, routing_map
        missing = -len(tokens) % size
        tokens, probs = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (tokens, probs))
        routing_map = torch.cat([routing_map, routing_map[:1].expand(missing, -1)])
        rank = self.attn_tp_group.rank()
        return (
            scatter_to_sequence_parallel_region(tokens, group=self.attn_tp_group),
            scatter_to_sequence_parallel_region(probs, group=self.attn_tp_group),
            routing_map.chunk(size)[rank],
        )

    def _all_parts(self, output: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return all tensor-parallel ranks' rows [N, H]."""
        if self.attn_tp_group.size() == 1:
            return output
        whole = gather_from_sequence_parallel_region(
            output, tensor_parallel_output_grad=False, group=self.attn_tp_group
        )
        return whole[:num_tokens]
