"""The balance of experts: its losses against sums over Hugging Face's own forward passes, and its biases."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

from nemo_rl.config.moe import SIGMOID_MODEL_TYPES, MoEConfig
from nemo_rl.distributed.expert_routers import find_routers
from nemo_rl.policy.fsdp2.balance import RouterBalance
from nemo_rl.policy.fsdp2.worker import FSDP2Trainer
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CPU, CausalLogprobs
from nemo_rl.policy.micro_batches import SampleCount
from tests.unit.policy.tiny import EVEN, EXPERT_MODELS, Exploding, WeightedNLL, make_batch, plain_logprobs

LENGTHS = [9, 5, 12, 3]


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return EXPERT_MODELS[name]().float().eval()


def trainer(
    model: Any, *, packed: bool = False, recomputes: bool = False, size: int = 4, **section: float
) -> FSDP2Trainer:
    if recomputes:
        recompute_activations(decoder_layers(model))
    module = CausalLogprobs(model, temperature=1.0, chunk_size=None, packing_key="k" if packed else None)
    return FSDP2Trainer(
        module=module,
        device=CPU,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        batching=SampleCount(size),
        max_grad_norm=None,
        balance=RouterBalance.of(model, MoEConfig.model_validate(section)),
    )


def routed(model: Any, batch: TensorDict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (logits [N, E], choices [N, k]) of each layer over all samples, each computed alone, without padding."""
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in find_routers(model)]
    hooks = [
        router.register_forward_hook(lambda _, __, out, kept=kept: kept.append((out[0], out[2])))
        for kept, router in zip(seen, find_routers(model), strict=True)
    ]
    for row, length in enumerate(batch["lengths"].tolist()):
        model(input_ids=batch["token_ids"][row : row + 1, :length], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [(torch.cat([a for a, _ in layer]), torch.cat([b for _, b in layer])) for layer in seen]


def losses_by_hand(name: str, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    balance, z = torch.zeros(()), torch.zeros(())
    for logits, ids in layers:
        has_bias = name in SIGMOID_MODEL_TYPES
        p = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if has_bias else logits.softmax(1)
        share = F.one_hot(ids, logits.shape[1]).double().mean((0, 1))
        balance = balance + logits.shape[1] * (share * p.mean(0)).sum()
        z = z + torch.logsumexp(logits, 1).pow(2).mean()
    return balance, z


@pytest.mark.parametrize("name", list(EXPERT_MODELS))
@pytest.mark.parametrize(("packed", "recomputes"), [(False, False), (True, True)])
def test_gradients_are_those_of_the_loss_with_both_balance_losses(name: str, packed: bool, recomputes: bool) -> None:
    model, batch = make_model(name), make_batch(LENGTHS)
    ours = copy.deepcopy(model)
    mask = batch["token_mask"]
    loss = -(batch["advantages"] * plain_logprobs(model, batch) * mask).sum() / mask.sum()
    balance, z = losses_by_hand(name, routed(model, batch))
    (loss + 0.3 * balance + 0.02 * z).backward()
    one = trainer(ours, packed=packed, recomputes=recomputes, aux_loss_coeff=0.3, z_loss_coeff=0.02)
    report = one.optimizer_step(batch, torch.arange(len(LENGTHS)), WeightedNLL())
    assert report.metrics["router_balance"] == pytest.approx(balance.item(), rel=1e-5)
    assert report.metrics["router_z"] == pytest.approx(z.item(), rel=1e-5)
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for (key, before), after in zip(model.named_parameters(), ours.parameters(), strict=True):
        gradient = torch.zeros_like(before) if before.grad is None else before.grad
        torch.testing.assert_close(before.detach() - after.detach(), gradient, rtol=1e-4, atol=1e-5, msg=key)


def test_micro_batches_count_by_their_share_of_the_tokens() -> None:
    model, batch = make_model("qwen3_moe"), make_batch(LENGTHS)
    _, z = losses_by_hand("qwen3_moe", routed(model, batch))
    one = trainer(model, size=1, z_loss_coeff=1e-3)
    assert one.optimizer_step(batch, torch.arange(4), WeightedNLL()).metrics["router_z"] == pytest.approx(z.item())


def nemotron_h() -> PreTrainedModel:
    """Return a model with a state-space layer, one with experts, and attention."""
    sizes: dict[str, Any] = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    }
    config: dict[str, Any] = {key: value for key, value in EVEN.items() if key != "num_hidden_layers"} | {"head_dim": 8}
    layers = ["mamba", "moe", "attention"]
    return NemotronHForCausalLM(NemotronHConfig(**config, **sizes, **experts, layers_block_type=layers))


@pytest.mark.parametrize(("name", "recomputes"), [("deepseek_v3", False), ("deepseek_v3", True), ("nemotron_h", False)])
def test_a_bias_follows_the_load_of_a_step_that_was_taken(name: str, recomputes: bool) -> None:
    torch.manual_seed(0)
    model = make_model(name) if name in EXPERT_MODELS else nemotron_h().float().eval()
    batch = make_batch(LENGTHS)
    (router,) = find_routers(model)
    before: torch.Tensor = router.get_buffer("e_score_correction_bias").clone()
    ((_, ids),) = routed(model, batch)
    load = torch.bincount(ids.flatten(), minlength=8)
    one = trainer(model, recomputes=recomputes, size=2, bias_update_rate=0.01)
    one.optimizer_step(batch, torch.arange(4), Exploding())
    assert torch.equal(router.get_buffer("e_score_correction_bias"), before)
    one.optimizer_step(batch, torch.arange(4), WeightedNLL())
    moved = router.get_buffer("e_score_correction_bias") - before
    mean = sum(LENGTHS) * 2 / 8
    expected = [0.01 if n < mean else -0.01 if n > mean else 0.0 for n in load.tolist()]
    assert len(set(expected)) > 1
    assert moved.tolist() == pytest.approx(expected, abs=1e-7)
