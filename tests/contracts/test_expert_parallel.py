"""Experts over ranks compute what one Hugging Face process does: log-probs, losses, gradients, norm and AdamW's steps.

Rows are uneven over the ranks, some of which have none; with few tokens some experts get none, and in `empty` one half
of the experts, hence a rank, never gets any.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.expert_routers import find_routers
from nemo_rl.errors import ConfigError, WeightSyncError
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.fsdp2 import experts
from nemo_rl.policy.fsdp2.balance import BIAS
from nemo_rl.policy.fsdp2.worker import named_weights
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.weight_manifests import LocalWeights
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.conftest import start
from tests.contracts.engines import UntrainedPolicy, answers, exact_logprobs, request
from tests.contracts.layouts import EXPERTS_OVER_RANKS, MULTIPLE, assert_near, plain_model
from tests.contracts.policies import SGD, clones, make_policy, play
from tests.contracts.rank_pool import Mesh, RankPool
from tests.support.quick import quick
from tests.unit.policy.fsdp2.test_balance import losses_by_hand, routed
from tests.unit.policy.tiny import WeightedNLL, make_sharing_batch, plain_logprobs

LENGTHS = [9, 5, 12, 3, 7]
NO_GRADIENT = 1e-7  # below it AdamW's first step is the sign of rounding noise
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}}
BATCHING: dict[str, dict[str, Any]] = {
    "padded": {"train_micro_batch_size": 8},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 16}},
    "shared": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "share_prefixes": True}},
}
SEVERAL: dict[str, dict[str, Any]] = {  # micro-batches of a rank
    "padded": {"train_micro_batch_size": 1},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 14}},
    "shared": {"sequence_packing": {"enabled": True, "train_mb_tokens": 14, "share_prefixes": True}},
}
# A case in each way; the others are slow.
QUICK = {
    ("ep 2", "deepseek_v3", "padded"),
    ("ep 2", "empty", "shared"),
    ("dp 4 ep 2", "qwen3_moe", "packed"),
    ("ep 4", "mixtral", "padded"),
    ("ep 2 tp 2", "qwen3_moe", "shared"),
    ("ep 2", "gpt_oss", "padded"),
    ("dp 4 ep 2", "gpt_oss", "packed"),
}
MODELS = ("qwen3_moe", "mixtral", "deepseek_v3", "empty", "gpt_oss")
UNSPLIT = ("deepseek_v3", "empty", "gpt_oss")  # no plan of tensor parallelism
CASES = [
    (layout, model, batching)
    for layout in EXPERTS_OVER_RANKS
    for model in MODELS
    for batching in BATCHING
    if not (layout == "ep 2 tp 2" and model in UNSPLIT) and not (model == "gpt_oss" and batching == "shared")
]
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def expert_models(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models, and one whose biases keep all tokens from the second half of the experts."""
    path = tmp_path_factory.mktemp("empty")
    model = AutoModelForCausalLM.from_pretrained(models["deepseek_v3"])
    for router in find_routers(model):
        router.get_buffer(BIAS).copy_(torch.tensor([0.0] * 4 + [-9.0] * 4))
    model.save_pretrained(path)
    return {**models, "empty": path}


@pytest.fixture(scope="module")
def run(pool: RankPool, expert_models: dict[str, Path]) -> Run:
    def run(layout: str, model: str, *calls: Any, **config: Any) -> list[Any]:
        mesh = EXPERTS_OVER_RANKS[layout]
        config["dtensor_cfg"] = mesh.config["dtensor_cfg"] | config.get("dtensor_cfg", {})
        return pool.run(mesh, play, path=expert_models[model], calls=calls, config=config)[0]

    return run


def plain_loss(model: Any, batch: TensorDict, *, aux: float) -> torch.Tensor:
    mask = batch["token_mask"]
    loss = -(batch["advantages"] * plain_logprobs(model, batch) * mask).sum() / mask.sum()
    if not aux:
        return loss
    kind = "deepseek_v3" if BIAS in dict(find_routers(model)[0].named_buffers()) else ""
    return loss + aux * losses_by_hand(kind, routed(model, batch))[0]


def plain_names(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by the model's names under the names of its files."""
    return revert_weight_conversion(model, tensors)


@pytest.mark.parametrize(("layout", "model", "batching"), quick(CASES, QUICK))
def test_a_step_is_that_of_one_process(
    layout: str, model: str, batching: str, run: Run, expert_models: dict[str, Path]
) -> None:
    aux = 0.0 if batching == "shared" else 0.05  # a shared token is routed once
    batch, one = make_sharing_batch(LENGTHS), plain_model(expert_models[model])
    loss = plain_loss(one, batch, aux=0.0)
    plain_loss(one, batch, aux=aux).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in one.named_parameters()}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    calls = [("logprobs", batch), ("run_with_weights", clones), ("train_step", batch, WeightedNLL())]
    calls += [("run_with_weights", clones), ("reference_logprobs", batch)]
    config = {"num_samples": len(LENGTHS), "moe": {"aux_loss_coeff": aux}, "needs_reference": True, "optimizer": SGD}
    logprobs, before, metrics, after, reference = run(layout, model, *calls, **config, **BATCHING[batching])
    torch.testing.assert_close(reference, logprobs, rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, plain_logprobs(one, batch), rtol=0, atol=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    moved = {name: before[name] - after[name] for name in before}
    expected = plain_names(one, gradients)
    for name, gradient in expected.items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    routers = [
        name
        for name in expected
        if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight"))
    ]
    assert routers
    assert all(expected[name].abs().max() > 1e-3 for name in routers)


@pytest.mark.parametrize(("layout", "model", "batching"), quick(CASES, QUICK))
def test_two_steps_of_adamw_are_those_of_one_process(
    layout: str, model: str, batching: str, run: Run, expert_models: dict[str, Path]
) -> None:
    batch, one = make_sharing_batch(LENGTHS), plain_model(expert_models[model])
    steps = [("train_step", batch, WeightedNLL())] * 2
    config = {"num_samples": len(LENGTHS), "max_grad_norm": 0.5, "optimizer": ADAMW, **SEVERAL[batching]}
    recompute = {"activation_checkpointing": True, "keep_unsharded": batching != "padded"}
    *_, metrics, weights = run(layout, model, *steps, ("run_with_weights", clones), dtensor_cfg=recompute, **config)
    assert_two_steps_of_adamw(metrics, weights, one, batch)


def assert_two_steps_of_adamw(
    metrics: dict[str, float], weights: dict[str, torch.Tensor], one: Any, batch: TensorDict
) -> None:
    """Check the norm of the second step and the weights after it against those that `one` gets here."""
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    is_noise = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in one.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        plain_loss(one, batch, aux=0.0).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        for name, parameter in one.named_parameters():
            if parameter.grad is not None:
                is_noise[name] |= parameter.grad.abs() < NO_GRADIENT
        optimizer.step()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = plain_names(one, {name: p.detach() for name, p in one.named_parameters()})
    noise = plain_names(one, is_noise)
    for name, weight in expected.items():
        difference = (weights[name] - weight).abs().masked_fill(noise[name], 0)
        assert difference.max() < 1e-5, name


def test_training_resumes_with_experts_over_another_number_of_ranks(
    pool: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    """From experts that are sharded like other weights to two layouts with experts over ranks, and back."""
    batch, other = make_sharing_batch(LENGTHS), make_sharing_batch(LENGTHS, seed=2)
    step, reading = ("train_step", other, WeightedNLL()), ("run_with_weights", clones)
    config = {"num_samples": len(LENGTHS), "train_micro_batch_size": 8, "moe": {"bias_update_rate": 1e-3}}
    layouts = [Mesh(2), EXPERTS_OVER_RANKS["ep 2"], EXPERTS_OVER_RANKS["dp 4 ep 2"], Mesh(2)]
    path = models["deepseek_v3"]
    for index, mesh in enumerate(layouts[:-1]):
        saved, own = tmp_path / str(index), config | mesh.config
        start = [("train_step", batch, WeightedNLL())] if index == 0 else [("load", tmp_path / str(index - 1))]
        calls = [*start, ("save", saved, {"save_optimizer": True}), ("finish_save",), step, reading]
        expected = pool.run(mesh, play, path=path, calls=calls, config=own)[0][-1]
        following = layouts[index + 1]
        calls = [("load", saved), step, reading]
        weights = pool.run(following, play, path=path, calls=calls, config=config | following.config)[0][-1]
        assert_near(weights, expected)


LORA = {"enabled": True, "dim": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj"]}


def test_adapters_beside_frozen_experts_learn_as_on_one_rank(run: Run, models: dict[str, Path]) -> None:
    batch, path = make_sharing_batch(LENGTHS), models["qwen3_moe"]
    calls = [("train_step", batch, WeightedNLL()), ("logprobs", batch), ("run_with_weights", clones)]
    config = {"num_samples": len(LENGTHS), "optimizer": SGD, "dtensor_cfg": {"lora_cfg": LORA}}
    _, logprobs, weights = run("ep 2", "qwen3_moe", *calls, **config)
    _, expected_logprobs, expected = play(SINGLE_RANK, path=path, calls=calls, config=config)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    assert_near(weights, expected)
    with pytest.raises(ConfigError, match=r"target_modules = 'down_proj'.*experts are stacked weights, and have no"):
        play(
            SINGLE_RANK,
            path=path,
            calls=[],
            config={"dtensor_cfg": {"lora_cfg": LORA | {"target_modules": ["down_proj"]}}},
        )


def router_types(layout: RankLayout, *, path: Path, config: dict[str, Any]) -> tuple[set[torch.dtype], torch.Tensor]:
    """Return the types of what routers compute in a training step, and the log-probs before it."""
    batch, found = make_sharing_batch(LENGTHS), set[torch.dtype]()
    policy = make_policy(layout, path, num_samples=len(LENGTHS), **config)
    for router in find_routers(policy.module):
        router.register_forward_hook(lambda _, args, out: found.update((args[0].dtype, out[0].dtype, out[1].dtype)))
    scored = policy.logprobs(batch)
    policy.train_step(batch, WeightedNLL())
    policy.close()
    return found, merge_rows(policy.layout.all_gather_object(scored), batch)[0]


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_routers_compute_in_float32_beside_bfloat16(model: str, pool: RankPool, models: dict[str, Path]) -> None:
    mesh, config = EXPERTS_OVER_RANKS["ep 2"], {"precision": "bfloat16"}
    types, logprobs = pool.run(mesh, router_types, path=models[model], config=config | mesh.config)[0]
    alone, expected = router_types(SINGLE_RANK, path=models[model], config=config)
    assert types == alone == {torch.float32}
    assert (logprobs - expected).abs().mean() < 0.05


def play_a_few_at_a_time(layout: RankLayout, **arguments: Any) -> list[Any]:
    """Play calls with one expert of each rank gathered at a time."""
    usual, experts.GATHERED_BYTES = experts.GATHERED_BYTES, 1
    try:
        return play(layout, **arguments)
    finally:
        experts.GATHERED_BYTES = usual


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "model"), [("2 ranks", "mixtral"), ("dp 4 ep 2", "deepseek_v3")])
def test_weights_leave_as_the_files_hold_them(
    layout: str, model: str, precision: str, pool: RankPool, models: dict[str, Path]
) -> None:
    mesh, path = MULTIPLE[layout], models[model]
    config = {"precision": precision, **mesh.config}
    weights = pool.run(mesh, play_a_few_at_a_time, path=path, calls=[("run_with_weights", clones)], config=config)[0][0]
    expected = load_file(path / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        dtype = torch.float32 if name.endswith(BIAS) else getattr(torch, precision)
        assert weights[name].dtype == dtype
        assert torch.equal(weights[name], weight.to(dtype)), name


class NamedAsInFiles(UntrainedPolicy):
    """An untrained policy that publishes as the FSDP2 worker does."""

    async def run_with_weights(self, use: Callable[[Any], Any]) -> Any:
        return use(named_weights(self.model, torch.float32))


def tiny_mixture(seed: int) -> Any:
    """Return a mixture of experts with a head size that vLLM's CPU attention supports."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.1)).float().eval()


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm in process", marks=pytest.mark.slow)])
def test_an_engine_is_refitted_with_experts_and_verified(
    kind: str, engine_loop: asyncio.Runner, tmp_path: Path
) -> None:
    tiny_mixture(0).save_pretrained(tmp_path)
    engine = start(engine_loop, kind, str(tmp_path))
    sync = TransportWeightSync([(5, 6, 7), (3, 8)], WeightSyncConfig(verify=True), "float32")
    try:
        for seed in (1, 2, 3):
            changed = tiny_mixture(seed)
            engine_loop.run(sync.publish(NamedAsInFiles(changed), engine, weight_version=seed))  # type: ignore[arg-type]
            completion = engine_loop.run(answers(engine, [request("a", max_new_tokens=8)]))["a"]
            exact = exact_logprobs(changed, (5, 6, 7), completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)
    finally:
        sync.close()
        engine_loop.run(engine.close())


def test_a_refit_without_one_expert_is_refused(engine_loop: asyncio.Runner, tmp_path: Path) -> None:
    tiny_mixture(0).save_pretrained(tmp_path)
    engine = start(engine_loop, "hf", str(tmp_path))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    lacking = tuple((n, t) for n, t in named_weights(tiny_mixture(1), torch.float32) if n != name)
    with pytest.raises(WeightSyncError, match=rf"missing: \['{name}'\]"):
        engine_loop.run(engine.update_weights(LocalWeights(lacking), weight_version=1))
    engine_loop.run(engine.close())
