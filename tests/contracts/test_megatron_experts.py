"""Mixtures of experts on Megatron's ranks against one Hugging Face process in float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.distributed.expert_routers import find_routers
from tests.contracts.layouts import BATCHING, EXPERTS, LENGTHS, UNEVEN, Layouts, assert_near, plain_model
from tests.contracts.policies import SGD, clones
from tests.contracts.rank_pool import RankPool
from tests.support.quick import quick
from tests.unit.policy.fsdp2.test_balance import losses_by_hand, routed
from tests.unit.policy.tiny import EVEN, WeightedNLL, make_batch, plain_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {**EVEN, "head_dim": 8, "tie_word_embeddings": False}


def qwen3_moe() -> PreTrainedModel:
    """Four experts in the second layer of three, whose weights do not sum to 1."""
    sizes = {**SMALL, "num_hidden_layers": 3, "mlp_only_layers": [0, 2]}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False)
    )


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2))


def glm4_moe() -> PreTrainedModel:
    """DeepSeek-V3's routers: of four groups of two experts two, of those four; a bias; a shared expert."""
    model = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **SMALL,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=24,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        )
    )
    mixed: Any = model.model.layers[1].mlp
    mixed.gate.e_score_correction_bias.normal_(0, 0.3)
    return model


MIXTURES: dict[str, Callable[[], PreTrainedModel]] = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "glm4_moe": glm4_moe}
QUICK = {  # each way once; the rest of the product is slow
    ("megatron one rank", "mixtral", "packed"),
    ("megatron ep 2", "qwen3_moe", "samples"),
    ("megatron ep 2", "glm4_moe", "packed"),
    ("megatron ep 4", "mixtral", "samples"),
    ("megatron tp 2 ep 2", "glm4_moe", "samples"),
    ("megatron tp 2 etp 2", "mixtral", "samples"),
    ("megatron dp 2 tp 2 ep 2", "mixtral", "packed"),
    ("megatron dp 2 pp 2 ep 2", "glm4_moe", "samples"),
}
CASES = [
    (layout, name, batching)
    for layout in EXPERTS
    for name in MIXTURES
    for batching in BATCHING
    if not (name == "qwen3_moe" and "pp 2" in layout)  # its three layers are not two equal stages
]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, paths = tmp_path_factory.mktemp("mixtures"), {}
    for name, make in MIXTURES.items():
        torch.manual_seed(0)
        paths[name] = directory / name
        make().save_pretrained(paths[name])
    return paths


@pytest.fixture(scope="module")
def run(pool: RankPool, mixtures: dict[str, Path]) -> Layouts:
    return Layouts(pool, mixtures)


def in_files(model: PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers writes for the model, under the files' names."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def plain_loss(model: PreTrainedModel, batch: TensorDict) -> torch.Tensor:
    return -(batch["advantages"] * plain_logprobs(model, batch)).sum() / batch["token_mask"].sum()


@pytest.mark.parametrize(("layout", "name", "batching"), quick(CASES, QUICK))
def test_mixture_learns_as_in_one_process(
    layout: str, name: str, batching: str, run: Layouts, mixtures: dict[str, Path], tmp_path: Path
) -> None:
    """Log-probs, loss, all gradients, their norm; weights come back under the files' names, bit for bit."""
    batch, model = make_batch(UNEVEN), plain_model(mixtures[name])
    calls = [("run_with_weights", clones), ("logprobs", batch), ("train_step", batch, WeightedNLL())]
    written, logprobs, metrics, after = run(
        layout, name, *calls, ("run_with_weights", clones), optimizer=SGD, **BATCHING[batching]
    )
    before = in_files(model, tmp_path / "before")
    assert written.keys() == before.keys()
    assert all(torch.equal(written[key], before[key]) for key in before)
    expected = plain_logprobs(model, batch)
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=1e-5)
    loss = plain_loss(model, batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item(), rel=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= torch.zeros(()) if parameter.grad is None else parameter.grad
    assert_near(after, in_files(model, tmp_path / "after"))


def test_a_rank_without_samples_keeps_up_with_experts_that_get_no_token(
    run: Layouts, mixtures: dict[str, Path], tmp_path: Path
) -> None:
    batch, model = make_batch([3]), plain_model(mixtures["mixtral"])
    config: dict[str, Any] = {"optimizer": SGD, "num_samples": 1}
    calls = [("train_step", batch, WeightedNLL()), ("run_with_weights", clones)]
    _, after = run("megatron ep 2", "mixtral", *calls, **config)
    plain_loss(model, batch).backward()
    idle = model.model.layers[0].mlp.experts.down_proj.grad.abs().sum((1, 2)) == 0
    assert 2 <= idle.sum() < 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    assert_near(after, in_files(model, tmp_path))


@pytest.mark.parametrize(
    ("layout", "name", "is_divided"),
    [
        ("megatron ep 2", "qwen3_moe", True),
        ("megatron tp 2 ep 2", "glm4_moe", False),
        ("megatron dp 2 tp 2 ep 2", "mixtral", True),
    ],
)
def test_two_clipped_steps_of_adamw_are_those_of_one_process(
    layout: str, name: str, is_divided: bool, run: Layouts, mixtures: dict[str, Path], tmp_path: Path
) -> None:
    """With layers recomputed; entries whose gradient is rounding noise, of which Adam takes the sign, are left out."""
    batches, model = [make_batch(UNEVEN, seed=seed) for seed in range(2)], plain_model(mixtures[name])
    kwargs: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}
    section = {"distributed_data_parallel_config": {"use_distributed_optimizer": is_divided}}
    *_, after = run(
        layout,
        name,
        *(("train_step", batch, WeightedNLL()) for batch in batches),
        ("run_with_weights", clones),
        optimizer={"name": "torch.optim.AdamW", "kwargs": kwargs},
        max_grad_norm=0.5,
        megatron_cfg={"activation_checkpointing": True, **section},
    )
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    noisy = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters()}
    for batch in batches:
        plain_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for key, parameter in model.named_parameters():
            noisy[key] |= (parameter.grad.abs() < 1e-7) & (parameter.grad != 0)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    expected = in_files(model, tmp_path / "after")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(noisy[key])
    left_out = in_files(model, tmp_path / "noisy")
    assert sum(float(mask.sum()) for mask in left_out.values()) < 0.02 * sum(p.numel() for p in model.parameters())
    assert after.keys() == expected.keys()
    for key, weight in after.items():
        kept = left_out[key] == 0 if "bias" not in key else torch.ones(weight.shape, dtype=torch.bool)
        torch.testing.assert_close(weight[kept], expected[key][kept], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "name", "size", "weights"),
    [
        ("megatron ep 2", "mixtral", 8, {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.02}),
        ("megatron dp 2 tp 2 ep 2", "glm4_moe", 8, {"aux_loss_coeff": 0.3}),
        ("megatron dp 2 pp 2 ep 2", "glm4_moe", 1, {"z_loss_coeff": 0.02}),
    ],
)
def test_balance_losses_and_their_gradients_are_those_of_one_process(
    layout: str,
    name: str,
    size: int,
    weights: dict[str, float],
    run: Layouts,
    mixtures: dict[str, Path],
    tmp_path: Path,
) -> None:
    """With layers recomputed, also where a stage recomputes those of another micro-batch than it has just computed."""
    batch, model = make_batch(UNEVEN), plain_model(mixtures[name])
    config = {"optimizer": SGD, "moe": weights, "train_micro_batch_size": size}
    calls = [("train_step", batch, WeightedNLL()), ("run_with_weights", clones)]
    metrics, after = run(layout, name, *calls, megatron_cfg={"activation_checkpointing": True}, **config)
    balance, z = losses_by_hand(name, routed(model, batch))
    loss = plain_loss(model, batch)
    (loss + weights.get("aux_loss_coeff", 0) * balance + weights.get("z_loss_coeff", 0) * z).backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["router_z"] == pytest.approx(z.item(), rel=1e-5)
    if size > 1:
        assert metrics["router_balance"] == pytest.approx(balance.item(), rel=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= torch.zeros(()) if parameter.grad is None else parameter.grad
    assert_near(after, in_files(model, tmp_path))


def test_biases_follow_the_load_and_frozen_routers_stay(run: Layouts) -> None:
    """As under FSDP2, on two stages, where the first has no router."""
    step = ("train_step", make_batch(UNEVEN), WeightedNLL())
    config = {"optimizer": SGD, "moe": {"bias_update_rate": 0.01, "freeze_router": True}}
    calls = [("run_with_weights", clones), step, ("run_with_weights", clones)]
    before, _, after = run("megatron dp 2 pp 2 ep 2", "glm4_moe", *calls, **config)
    *_, expected = run("plain", "glm4_moe", *calls, **config)
    (bias,) = [key for key in after if key.endswith("e_score_correction_bias")]
    assert set(((after[bias] - before[bias]) / 0.01).round().tolist()) >= {-1.0, 1.0}
    assert torch.equal(after[bias], expected[bias])
    gate = bias.replace("e_score_correction_bias", "weight")
    assert torch.equal(after[gate], before[gate])
    moved = [key for key in after if not torch.equal(after[key], before[key])]
    assert len(moved) > len(after) / 2


def recorded_routes(lengths: list[int], *, num_layers: int, num_experts: int, topk: int) -> torch.Tensor:
    """Return random experts [B, T, L, k], as an engine records them: none after a row's tokens, nor for some tokens."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(lengths), max(lengths), num_layers, num_experts)
    routes = torch.rand(shape, generator=generator).topk(topk).indices.to(torch.uint8)
    for row, length in enumerate(lengths):
        routes[row, length:] = 255
    routes[1, 2] = 255
    return routes


@contextmanager
def forced_routes(model: PreTrainedModel, routes: torch.Tensor, lengths: list[int]) -> Iterator[None]:
    """Let transformers' routers send the samples, each computed alone and in order, to these experts."""
    kind = model.config.model_type

    def force(layer: int, rows: Iterator[int]) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            row = next(rows)
            given = routes[row, : lengths[row], layer].long()
            logits, _, live = output
            ids = torch.where(given == 255, live, given)
            scores = (logits.sigmoid() if kind == "glm4_moe" else logits.softmax(-1)).gather(1, ids)
            scores = scores / scores.sum(-1, keepdim=True) if kind != "qwen3_moe" else scores
            return logits, scores * (1.5 if kind == "glm4_moe" else 1.0), ids

        return hook

    hooks = [
        router.register_forward_hook(force(layer, iter(range(len(lengths)))))
        for layer, router in enumerate(find_routers(model))
    ]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("layout", "name", "batching", "size"),
    [
        ("megatron ep 2", "mixtral", "packed", 3),
        ("megatron ep 2", "qwen3_moe", "samples", 3),
        ("megatron tp 2 ep 2", "glm4_moe", "samples", 3),
        ("megatron dp 2 pp 2 ep 2", "glm4_moe", "samples", 1),
    ],
)
def test_tokens_go_to_the_experts_that_the_engine_recorded(
    layout: str, name: str, batching: str, size: int, run: Layouts, mixtures: dict[str, Path], tmp_path: Path
) -> None:
    """With layers recomputed; tokens without a route are routed live, and routers have their gradients."""
    batch, model = make_batch(UNEVEN), plain_model(mixtures[name])
    shapes = {"mixtral": (2, 8, 2), "qwen3_moe": (1, 4, 2), "glm4_moe": (1, 8, 4)}
    num_layers, num_experts, topk = shapes[name]
    routes = recorded_routes(UNEVEN, num_layers=num_layers, num_experts=num_experts, topk=topk)
    with_routes = batch.clone()
    with_routes["columns"] = TensorDict({"routed_experts": routes}, batch_size=[len(UNEVEN)])
    calls = [("logprobs", batch), ("logprobs", with_routes), ("train_step", with_routes, WeightedNLL())]
    config = {**BATCHING[batching], "train_micro_batch_size": size, "router_replay": {"enabled": True}}
    live, logprobs, metrics, after = run(
        layout,
        name,
        *calls,
        ("run_with_weights", clones),
        optimizer=SGD,
        megatron_cfg={"activation_checkpointing": True},
        **config,
    )
    torch.testing.assert_close(live, plain_logprobs(model, batch).detach(), rtol=0, atol=1e-5)
    with forced_routes(model, routes, UNEVEN):
        expected = plain_logprobs(model, batch)
    assert (expected - live).abs().max() > 0.1
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=1e-5)
    loss = -(batch["advantages"] * expected).sum() / batch["token_mask"].sum()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert find_routers(model)[0].weight.grad.abs().max() > 1e-3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= torch.zeros(()) if parameter.grad is None else parameter.grad
    assert_near(after, in_files(model, tmp_path))


@pytest.mark.parametrize("mode", ["R3", "observe"])
@pytest.mark.parametrize(
    ("layout", "batching"), [("megatron tp 2 ep 2", "packed"), ("megatron dp 2 pp 2 ep 2", "samples")]
)
def test_metrics_of_the_routers_are_those_of_one_fsdp2_rank(
    layout: str, batching: str, mode: str, run: Layouts
) -> None:
    """With layers recomputed, also those of a stage without experts."""
    batch = make_batch(UNEVEN)
    routes = recorded_routes(UNEVEN, num_layers=1, num_experts=8, topk=4)
    batch["columns"] = TensorDict({"routed_experts": routes}, batch_size=[len(UNEVEN)])
    config: dict[str, Any] = {"router_replay": {"enabled": True, "mode": mode}, **BATCHING[batching]}
    calls = [("train_step", batch, WeightedNLL())]
    (found,) = run(layout, "glm4_moe", *calls, megatron_cfg={"activation_checkpointing": True}, **config)
    (expected,) = run("plain", "glm4_moe", *calls, **config)
    names = {name for name in expected if name.startswith("moe/")}
    assert len(names) == 10
    assert names <= found.keys()
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-5)
    assert (found["moe/other_experts"] > 0.5) == (mode == "observe")
    assert 0 < found["moe/missing_routes"] < 0.2


@pytest.mark.parametrize(
    ("first", "second", "moe"),
    [
        ("megatron dp 2 tp 2 ep 2", "megatron tp 2 etp 2", {}),
        ("megatron dp 2 pp 2 ep 2", "plain", {"freeze_router": True}),
        ("plain", "megatron ep 2", {"freeze_router": True}),
    ],
)
def test_training_goes_on_from_a_checkpoint_on_another_layout(
    first: str, second: str, moe: dict[str, bool], run: Layouts, tmp_path: Path
) -> None:
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
    is_divided = {"distributed_data_parallel_config": {"use_distributed_optimizer": True}}
    section = {"megatron_cfg": is_divided} if first != "plain" else {}
    # with an epsilon above rounding noise, of which Adam would take the sign
    adam = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "eps": 1e-3}}
    last = [steps[1], ("logprobs", make_batch(LENGTHS))]
    save = ("save", tmp_path, {"save_optimizer": True})
    *_, logprobs = run(first, "mixtral", steps[0], save, *last, moe=moe, optimizer=adam, **section)
    *_, resumed = run(second, "mixtral", ("load", tmp_path), *last, moe=moe, optimizer=adam)
    torch.testing.assert_close(resumed, logprobs, rtol=0, atol=1e-4)
    saved = plain_model(tmp_path / "weights")  # transformers reads it
    assert saved.config.architectures == ["MixtralForCausalLM"]
    assert (tmp_path / "weights" / "model.safetensors").exists()
