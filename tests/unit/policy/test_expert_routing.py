"""Replayed routes give the log-probs and gradients of a plain transformers model whose routers take these experts."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import PolicyError
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.policy.ranks import SINGLE_RANK
from tests.contracts.expert_models import (
    EXPERTS,
    MISSING,
    SIZES,
    TOP_K,
    batch_with_routes,
    expert_model,
    hf_routes,
    layers_with_experts,
)
from tests.contracts.policies import SETTINGS, SGD, clones, make_policy
from tests.unit.policy.tiny import WeightedNLL, make_sharing_batch, plain_logprobs

LENGTHS = [9, 5, 12, 3, 7, 12, 2, 6]
PACKED: dict[str, Any] = {"sequence_packing": {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 16}}
TREES: dict[str, Any] = {"sequence_packing": {**PACKED["sequence_packing"], "share_prefixes": True}}
WHOLE_BATCH: dict[str, Any] = {"train_micro_batch_size": 8, "logprob_batch_size": 8}
RECOMPUTED = {"dtensor_cfg": {"activation_checkpointing": True}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("mixtral", PACKED),
    ("deepseek_v3", {}),
    ("qwen3_moe", TREES | RECOMPUTED),
    ("deepseek_v3", PACKED | RECOMPUTED),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("experts")
    for kind in ("qwen3_moe", "mixtral", "deepseek_v3"):
        expert_model(kind).save_pretrained(directory / kind)
    return {kind: directory / kind for kind in ("qwen3_moe", "mixtral", "deepseek_v3")}


def scored(policy: Any, name: str, batch: TensorDict) -> torch.Tensor:
    return merge_rows([getattr(policy, name)(batch)], batch)[0]


@contextmanager
def forced(model: Any, rows: torch.Tensor) -> Iterator[None]:
    """Let routers of a plain model send each token t to rows[t], where given, by arithmetic of its own."""

    def weights(router: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if hasattr(router, "routed_scaling_factor"):  # DeepSeek-V3
            chosen = torch.stack([1 / (1 + torch.exp(-row[at])) for row, at in zip(logits, ids, strict=True)])
            return chosen / chosen.sum(1, keepdim=True) * router.routed_scaling_factor
        chosen = torch.stack([row.exp()[at] for row, at in zip(logits, ids, strict=True)])
        return chosen / chosen.sum(1, keepdim=True)

    def hook(layer: int) -> Any:
        def force(router: Any, inputs: Any, output: Any) -> Any:
            logits, _, live = output
            ids = torch.stack(
                [
                    row if own[0] == MISSING else own.long()
                    for row, own in zip(live, rows[: len(live), layer], strict=True)
                ]
            )
            return logits, weights(router, logits, ids), ids

        return force

    hooks = [
        layer.mlp.gate.register_forward_hook(hook(number)) for number, layer in enumerate(layers_with_experts(model))
    ]
    yield
    for one in hooks:
        one.remove()


def expected_logprobs(model: Any, batch: TensorDict) -> torch.Tensor:
    parts = []
    for row in range(len(batch)):
        with forced(model, batch["columns", "routed_experts"][row]):
            parts.append(plain_logprobs(model, batch[row : row + 1]))
    return torch.cat(parts)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_replay_gives_logprobs_and_gradients_of_forced_routers(
    kind: str, settings: dict[str, Any], directories: dict[str, Path]
) -> None:
    model = expert_model(kind)
    batch = batch_with_routes(LENGTHS, len(layers_with_experts(model)))
    policy = make_policy(
        SINGLE_RANK, directories[kind], optimizer=SGD, router_replay={"enabled": True}, needs_reference=True, **settings
    )
    logprobs = scored(policy, "logprobs", batch)
    expected = expected_logprobs(model, batch)
    (expected * batch["advantages"]).sum().neg().div(batch["token_mask"].sum()).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    gradients = revert_weight_conversion(model, gradients)  # one tensor per expert
    before, reference = policy.run_with_weights(clones), scored(policy, "reference_logprobs", batch)
    metrics = policy.train_step(batch, WeightedNLL())
    after = policy.run_with_weights(clones)
    assert before is not None
    assert after is not None
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(reference, plain_logprobs(expert_model(kind), batch).detach(), rtol=0, atol=2e-5)
    routers = [name for name in gradients if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))]
    assert len(routers) == len(layers_with_experts(model))
    assert min(gradients[name].abs().max() for name in routers) > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-3, atol=2e-5, msg=name)
    assert metrics["moe/other_experts"] == 0
    assert metrics["moe/live_other_experts"] > 0.5


def test_a_prefix_is_shared_by_the_rows_whose_experts_computed_it_alike(directories: dict[str, Path]) -> None:
    model = expert_model("qwen3_moe")
    batch = batch_with_routes(LENGTHS, len(layers_with_experts(model)), per_row=True)
    settings: dict[str, Any] = {"router_replay": {"enabled": True}, **TREES}
    policy = make_policy(SINGLE_RANK, directories["qwen3_moe"], **settings)
    expected = expected_logprobs(model, batch).detach()
    torch.testing.assert_close(scored(policy, "logprobs", batch), expected, rtol=0, atol=2e-5)
    assert policy.train_step(batch, WeightedNLL())["moe/other_experts"] == 0


def test_metrics_count_the_tokens_that_a_sampled_token_depends_on(directories: dict[str, Path]) -> None:
    model = expert_model("qwen3_moe")
    batch = batch_with_routes(LENGTHS, 2)
    batch["token_mask"][0, 6:] = 0  # the last tokens of a row, which no sampled token follows
    routes = batch["columns", "routed_experts"]
    missing = others = total = 0
    load = torch.zeros(2, EXPERTS)
    for row in range(len(LENGTHS)):
        last = int(batch["token_mask"][row].nonzero().max()) if batch["token_mask"][row].any() else 0
        tokens, given = batch["token_ids"][row, :last], routes[row, :last].long()
        if last == 0:
            continue
        live = hf_routes(model, tokens.tolist())
        for t in range(last):
            total += 1
            missing += bool((given[t] == MISSING).any())
            others += any(
                set(live[t, n].tolist()) != set(given[t, n].tolist()) for n in range(2) if given[t, n, 0] != MISSING
            )
            for n in range(2):
                load[n, live[t, n]] += 1
    policy = make_policy(
        SINGLE_RANK, directories["qwen3_moe"], optimizer=SGD, router_replay={"enabled": True, "mode": "observe"}
    )
    metrics = policy.train_step(batch, WeightedNLL())
    assert metrics["moe/missing_routes"] == pytest.approx(missing / total)
    assert metrics["moe/other_experts"] == metrics["moe/live_other_experts"] == pytest.approx(others / total)
    assert metrics["moe/load_max_over_mean"] == pytest.approx(float((load.max(1).values / load.mean(1)).max()))
    percentiles = sorted((load / load.mean(1, keepdim=True)).flatten().tolist())  # of 16 experts: median of 7 and 8
    assert metrics["moe/load_p0_over_mean"] == pytest.approx(percentiles[0])
    assert metrics["moe/load_p50_over_mean"] == pytest.approx((percentiles[7] + percentiles[8]) / 2)
    assert metrics["moe/unused_experts"] == float((load == 0).sum())


def test_own_routes_replayed_change_no_bit(directories: dict[str, Path]) -> None:
    batch = make_sharing_batch(LENGTHS)
    routes = torch.full((*batch["token_ids"].shape, 2, TOP_K), MISSING, dtype=torch.uint8)
    policy = make_policy(SINGLE_RANK, directories["qwen3_moe"], **WHOLE_BATCH)
    found: list[torch.Tensor] = []
    for layer in layers_with_experts(policy.module.model):
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: found.append(output[2]))
    live = scored(policy, "logprobs", batch)
    order = sorted(range(len(LENGTHS)), key=lambda row: -LENGTHS[row])  # of a micro-batch
    routes[order] = torch.stack(found, 1).unflatten(0, (8, -1)).to(torch.uint8)
    batch["columns"] = TensorDict({"routed_experts": routes}, batch_size=batch.batch_size)
    replaying = make_policy(SINGLE_RANK, directories["qwen3_moe"], **WHOLE_BATCH, router_replay={"enabled": True})
    assert torch.equal(scored(replaying, "logprobs", batch), live)
    assert replaying.train_step(batch, WeightedNLL()) == {
        **policy.train_step(batch, WeightedNLL()),
        "moe/missing_routes": 0,
        "moe/other_experts": 0,
        "moe/live_other_experts": 0,
    }


@pytest.mark.parametrize("settings", [{}, PACKED, TREES])
def test_r2_replays_the_experts_of_the_log_prob_pass_in_later_optimizer_steps(
    settings: dict[str, Any], directories: dict[str, Path]
) -> None:
    batch, model = make_sharing_batch(LENGTHS), expert_model("qwen3_moe")
    values = {
        **SETTINGS,
        "model_name": str(directories["qwen3_moe"]),
        "train_global_batch_size": 4,
        "optimizer": SGD,
        "router_replay": {"enabled": True, "mode": "R2"},
        **settings,
    }
    policy = LocalPolicy(
        PolicyConfig.model_validate(values),
        model_path=values["model_name"],
        temperature=1.0,
        needs_reference=False,
        num_samples_per_step=8,
        seed=0,
    )

    async def main() -> dict[str, float]:
        try:
            await policy.logprobs(batch)
            return await policy.train_step(batch, WeightedNLL())
        finally:
            await policy.close()

    metrics = asyncio.run(main())
    for row, length in enumerate(LENGTHS):
        expected = hf_routes(model, batch["token_ids"][row, :length].tolist())
        own = batch["columns", "routed_experts"][row, :length]
        assert own.dtype == torch.uint8
        assert torch.equal(own.long().sort(-1).values, expected)
    assert metrics["num_optimizer_steps"] == 2
    assert metrics["moe/missing_routes"] == metrics["moe/other_experts"] == 0
    assert metrics["moe/live_other_experts"] > 0.05  # the second step, after large changes of the weights


def test_r2_records_experts_whose_numbers_take_two_bytes(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 300, "moe_intermediate_size": 8, "intermediate_size": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes)).eval()
    model.save_pretrained(tmp_path)
    policy = make_policy(SINGLE_RANK, tmp_path, router_replay={"enabled": True, "mode": "R2"}, **PACKED)
    batch = make_sharing_batch(LENGTHS)
    routes = merge_rows([policy.logprobs(batch)], batch)[1]
    assert routes.dtype == torch.uint16
    assert routes.long().max() > 255
    for row, length in enumerate(LENGTHS):
        expected = hf_routes(model, batch["token_ids"][row, :length].tolist())
        assert torch.equal(routes[row, :length].long().sort(-1).values, expected)


def test_a_batch_without_routes_is_missing_all(directories: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, directories["mixtral"], router_replay={"enabled": True})
    assert policy.train_step(make_sharing_batch(LENGTHS), WeightedNLL())["moe/missing_routes"] == 1


def test_experts_that_the_model_lacks_are_missing(directories: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, directories["mixtral"], router_replay={"enabled": True})
    batch = batch_with_routes(LENGTHS, 3)
    batch["columns", "routed_experts"].fill_(EXPERTS)
    assert policy.train_step(batch, WeightedNLL())["moe/missing_routes"] == 1


def test_routes_of_another_number_of_layers_are_refused(directories: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, directories["mixtral"], router_replay={"enabled": True})
    with pytest.raises(PolicyError, match="experts of 2 layers, the policy has 3"):
        policy.logprobs(batch_with_routes(LENGTHS, 2))
