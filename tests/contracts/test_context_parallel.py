"""Context and sequence parallelism against one process in float32: scores, every loss, metrics, gradients, checkpoints.

A step of SGD with a learning rate of 1 moves every weight by its gradient. Lengths are uneven and no multiple of the
ranks; one batch has a sample longer than all others together.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.losses.likelihood import NegativeLogLikelihood
from nemo_rl.policy import exchanges
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.memory import ModelShape, RankMemory
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from tests.contracts.layouts import CONTEXT, MULTIPLE, assert_near, plain_model
from tests.contracts.policies import SGD, clones, make_policy, play
from tests.contracts.rank_pool import RankPool
from tests.contracts.test_distillation import ask
from tests.contracts.test_expert_parallel import ADAMW, assert_two_steps_of_adamw, plain_loss, plain_names
from tests.contracts.test_shared_prefixes import DISTILLATION, WHOLE, assert_same_steps, learn, sharing_batch
from tests.support.quick import quick
from tests.unit.losses.evaluation import EVERY_OPTION
from tests.unit.policy.tiny import (
    OfAllScores,
    WeightedNLL,
    make_batch,
    make_sharing_batch,
    plain_logprobs,
    with_sampling_mask,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [9, 5, 12, 3, 7]
ONE_LONG = [47, 3, 5, 4, 7, 3, 6, 2, 4, 3, 5, 4]  # the others have 46 together
BATCHING: dict[str, dict[str, Any]] = {
    "padded": {"train_micro_batch_size": 2},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 51, "logprob_mb_tokens": 47}},
    # For auto, tokens of a rank: samples of 9 and 12 tokens are shared in training, that of 12 alone in scoring.
    "short packs": {"sequence_packing": {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 9}},
    # For auto: a sample of 47 tokens is shared; of samples of 12 none is.
    "packs of a rank": {"sequence_packing": {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}},
    "one pack": {"sequence_packing": {"enabled": True, "train_mb_tokens": 200, "logprob_mb_tokens": 200}},
}
# Sliding windows and soft caps; keys of one head per two ranks; norms of heads, and one head of keys on two ranks.
MODELS = {"cp 2": "gemma2", "cp 4": "llama", "cp 2 dp 2": "qwen2", "cp 2 tp 2 sp": "qwen3", "cp 2 ep 2": "qwen3_moe"}
STEPS = [
    *(("cp 2", model, "padded") for model in ("qwen2", "gemma2", "cohere", "granite", "gpt2", "deepseek_v3")),
    ("cp 2", "llama", "packed"),
    ("cp 4", "gemma2", "packed"),
    ("cp 4", "qwen2", "padded"),
    ("cp 2 dp 2", "llama", "packed"),
    ("cp 2 tp 2", "qwen3", "packed"),
    ("cp auto 2", "llama", "short packs"),
    ("cp auto 2 dp 2", "qwen2", "short packs"),
    ("cp auto 2 tp 2 sp", "qwen3", "short packs"),
    ("tp 2 sp", "llama", "packed"),
    ("2 x tp 2 sp", "qwen2", "padded"),
    ("cp 2 tp 2 sp", "qwen3", "padded"),
    ("cp 2 tp 2", "qwen3_moe", "padded"),
    ("megatron cp 2", "llama", "padded"),
    ("megatron cp 2 pp 2", "qwen2", "packed"),
    ("megatron cp 2 tp 2", "qwen3", "packed"),
    ("megatron tp 2 sp", "llama", "padded"),
    ("megatron tp 2 pp 2 sp", "qwen2", "packed"),
    ("megatron cp 2 tp 2 sp", "qwen3", "packed"),
    ("megatron cp 2 ep 2", "qwen3_moe", "one pack"),
    ("cp 2 ep 2", "qwen3_moe", "one pack"),
    ("cp 2 dp 2 ep 4", "mixtral", "one pack"),
]
QUICK_STEPS = [
    ("cp 2", "deepseek_v3", "padded"),
    ("cp 2", "llama", "packed"),
    ("cp 4", "gemma2", "packed"),
    ("cp auto 2 dp 2", "qwen2", "short packs"),
    ("tp 2 sp", "llama", "packed"),
    ("megatron cp 2 pp 2", "qwen2", "packed"),
    ("megatron cp 2 tp 2 sp", "qwen3", "packed"),
    ("cp 2 ep 2", "qwen3_moe", "one pack"),
]
LOSSES = list(product([*MODELS, "megatron cp 2 pp 2", "cp auto 2 dp 2"], ["even", "one long"]))
QUICK_LOSSES = [(layout, "one long") for layout in ("cp 2", "cp 2 ep 2", "megatron cp 2 pp 2", "cp auto 2 dp 2")]
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")


def on(layout: str, pool: RankPool, job: Callable[..., Any], **arguments: Any) -> Any:
    return job(SINGLE_RANK, **arguments) if layout == "plain" else pool.run(MULTIPLE[layout], job, **arguments)[0]


def section_of(layout: str, **options: Any) -> dict[str, Any]:
    own = {"dtensor_cfg": {}} if layout == "plain" else MULTIPLE[layout].config
    return {name: section | options for name, section in own.items()}


@pytest.mark.parametrize(("layout", "model", "batching"), quick(STEPS, QUICK_STEPS))
def test_a_step_is_that_of_hugging_face(
    layout: str, model: str, batching: str, models: dict[str, Path], pool: RankPool
) -> None:
    aux = 0.05 if model in EXPERTS and batching == "one pack" else 0.0
    batch, one = make_sharing_batch(LENGTHS), plain_model(models[model])
    loss = plain_loss(one, batch, aux=0.0)
    plain_loss(one, batch, aux=aux).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in one.named_parameters()}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    calls = [("logprobs", batch), ("run_with_weights", clones), ("train_step", batch, WeightedNLL())]
    calls += [("run_with_weights", clones), ("reference_logprobs", batch)]
    config = {"num_samples": len(LENGTHS), "moe": {"aux_loss_coeff": aux}, "needs_reference": True, "optimizer": SGD}
    config |= section_of(layout) | BATCHING[batching]
    logprobs, before, metrics, after, reference = on(layout, pool, play, path=models[model], calls=calls, config=config)
    torch.testing.assert_close(reference, logprobs, rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, plain_logprobs(one, batch), rtol=0, atol=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    if aux:
        routers = metrics["router_balance"]
        assert routers == pytest.approx((plain_loss(one, batch, aux=1.0) - loss).item(), rel=1e-5)
    for name, gradient in plain_names(one, gradients).items():
        torch.testing.assert_close(before[name] - after[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("layout", "lengths"), quick(LOSSES, QUICK_LOSSES))
def test_loss_metrics_and_gradients_are_those_of_one_process(
    layout: str, lengths: str, models: dict[str, Path], pool: RankPool
) -> None:
    path = models[MODELS.get(layout, "qwen2")]
    losses = [*EVERY_OPTION, "sft", *DISTILLATION]
    losses = losses if (layout, lengths) == ("cp 2", "one long") else losses[:: 3 if lengths == "even" else 5]
    batch = sharing_batch(path, ONE_LONG) if lengths == "one long" else sharing_batch(path)
    arguments: dict[str, Any] = {"path": path, "batch": batch, "losses": losses}
    expected = learn(SINGLE_RANK, **arguments, config=WHOLE)
    batching = BATCHING["packs of a rank" if "auto" in layout else "packed"]
    results = on(layout, pool, learn, **arguments, config=section_of(layout) | batching)
    one = plain_model(path)
    assert_same_steps(losses, results, expected, plain_names(one, dict(one.named_parameters())))


@pytest.mark.parametrize("layout", quick(MODELS, ["cp 4", "cp 2 ep 2"]))
def test_two_steps_of_adamw_are_those_of_one_process(layout: str, models: dict[str, Path], pool: RankPool) -> None:
    path = models[MODELS[layout]]
    batch, one = make_sharing_batch(LENGTHS), plain_model(path)
    calls = [*[("train_step", batch, WeightedNLL())] * 2, ("run_with_weights", clones)]
    config = {"num_samples": len(LENGTHS), "max_grad_norm": 0.5, "optimizer": ADAMW, "train_micro_batch_size": 1}
    recomputed = section_of(layout, activation_checkpointing=True, keep_unsharded=True)
    *_, metrics, weights = on(layout, pool, play, path=path, calls=calls, config=config | recomputed)
    assert_two_steps_of_adamw(metrics, weights, one, batch)


@pytest.mark.parametrize("layout", ["cp 2", "cp 2 dp 2"])
def test_adapters_learn_what_one_process_learns(layout: str, models: dict[str, Path], pool: RankPool) -> None:
    path, batch = models["qwen2"], sharing_batch(models["qwen2"], ONE_LONG)
    reading = [("logprobs", batch), ("reference_logprobs", batch), ("run_with_weights", clones)]
    calls = [*[("train_step", batch, NegativeLogLikelihood())] * 2, *reading]
    said = []
    for where in ("plain", layout):
        config = {**BATCHING["packed"], "num_samples": len(ONE_LONG), "needs_reference": True}
        config |= {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.3}}}
        config |= section_of(where, lora_cfg={"enabled": True, "dim": 4, "alpha": 8})
        said.append(on(where, pool, play, path=path, calls=calls, config=config))
    for got, want in zip(*said, strict=True):
        if isinstance(got, dict) and "loss" in got:
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["cp 2", "cp 4", "cp 2 tp 2 sp"])
def test_a_teacher_scores_as_on_one_rank(layout: str, models: dict[str, Path], pool: RankPool) -> None:
    batch = sharing_batch(models["llama"], ONE_LONG)
    arguments: dict[str, Any] = {"path": models["llama"], "batch": batch}
    arguments["calls"] = [("logprobs",), ("topk_logprobs", 6)]
    expected, expected_topk = ask(SINGLE_RANK, **arguments, logprob_batch_size=len(ONE_LONG))
    packing = {"enabled": True, "logprob_mb_tokens": 60}
    logprobs, topk = on(layout, pool, ask, **arguments, sequence_packing=packing, **section_of(layout))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(topk.logprobs, expected_topk.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(topk.ids, expected_topk.ids)


def test_all_scores_and_recorded_columns_are_cut_and_gathered(models: dict[str, Path], pool: RankPool) -> None:
    """Candidates, entropies and most likely tokens, of sets that an engine drew from."""
    batch = with_sampling_mask(make_batch(LENGTHS), 37)
    batch["candidate_ids"] = torch.randint(-1, 37, (*batch["token_ids"].shape, 5))
    calls = [("logprobs", batch), ("train_step", batch, OfAllScores()), ("run_with_weights", clones)]
    config = {"num_samples": len(LENGTHS), "optimizer": SGD, **BATCHING["packed"]}
    arguments: dict[str, Any] = {"path": models["qwen2"], "calls": calls}
    expected = on("plain", pool, play, **arguments, config=config)
    for layout in ("cp 2", "cp 4"):
        logprobs, metrics, weights = on(layout, pool, play, **arguments, config=config | section_of(layout))
        torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
        for name, value in metrics.items():
            assert value == pytest.approx(expected[1][name], rel=1e-5, abs=1e-5), name
        assert_near(weights, expected[2])


@pytest.mark.parametrize(
    ("layout", "model"),
    [("cp 2 ep 2", "qwen3_moe"), ("megatron cp 2 ep 2", "qwen3_moe"), ("megatron dp 2 pp 2 ep 2", "mixtral")],
)
def test_experts_replay_the_routes_of_the_log_prob_pass(
    layout: str, model: str, models: dict[str, Path], pool: RankPool
) -> None:
    """In two optimizer steps, the second of which would send many tokens elsewhere."""
    batch = make_sharing_batch([*LENGTHS, 12, 2, 6])
    config = {"router_replay": {"enabled": True, "mode": "R2"}, "optimizer_steps": 2, "optimizer": SGD}
    config |= BATCHING["packed"]
    arguments: dict[str, Any] = {"path": models[model], "batch": batch}
    expected_routes, expected, expected_weights = replay_own(SINGLE_RANK, **arguments, config=config)
    routes, metrics, weights = on(layout, pool, replay_own, **arguments, config=config | section_of(layout))
    inside = torch.arange(batch["token_ids"].shape[1]) < batch["lengths"].unsqueeze(1)
    assert torch.equal(routes[inside].sort(-1).values, expected_routes[inside].sort(-1).values)
    assert metrics["moe/missing_routes"] == metrics["moe/other_experts"] == 0
    assert metrics["moe/live_other_experts"] > 0.05
    assert {name for name in metrics if name.startswith("moe/")} == {n for n in expected if n.startswith("moe/")}
    for name in metrics.keys() - {"num_micro_batches"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert expected_weights is not None
    assert_near(weights, expected_weights, atol=1e-4)  # the second of two large steps multiplies rounding


def replay_own(
    layout: RankLayout, *, path: Path, batch: TensorDict, config: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, float], dict[str, torch.Tensor] | None]:
    """Return the experts [B, T, L, k] of a log-prob pass, and the metrics and the weights of a step on them."""
    policy = make_policy(layout, path, **config)
    routes = merge_rows(policy.layout.all_gather_object(policy.logprobs(batch)), batch)[1]
    replayed = batch.clone()
    replayed["columns"] = TensorDict({"routed_experts": routes}, batch_size=batch.batch_size)
    metrics = policy.train_step(replayed, WeightedNLL())
    weights = policy.run_with_weights(clones)
    policy.close()
    return routes, metrics, weights


@pytest.mark.slow  # tests/contracts/test_policy_checkpoints.py resumes on other layouts
def test_training_resumes_on_another_layout(models: dict[str, Path], pool: RankPool, tmp_path: Path) -> None:
    batch, other = make_sharing_batch(LENGTHS), make_sharing_batch(LENGTHS, seed=2)
    step, reading = ("train_step", other, WeightedNLL()), ("run_with_weights", clones)
    layouts = ["2 ranks", "cp 2", "cp 2 tp 2 sp", "megatron cp 2", "4 ranks"]
    path, config = models["qwen3"], {"num_samples": 8}
    for index, layout in enumerate(layouts[:-1]):
        saved = tmp_path / str(index)
        start = [("train_step", batch, WeightedNLL())] if index == 0 else [("load", tmp_path / str(index - 1))]
        calls = [*start, ("save", saved, {"save_optimizer": True}), ("finish_save",), step, reading]
        expected = on(layout, pool, play, path=path, calls=calls, config=config | section_of(layout))[-1]
        calls, following = [("load", saved), step, reading], layouts[index + 1]
        weights = on(following, pool, play, path=path, calls=calls, config=config | section_of(following))[-1]
        assert_near(weights, expected)


@contextmanager
def counted(sent: list[int]) -> Iterator[None]:
    """Count the numbers that each all-to-all of the block sends to other ranks."""
    usual = exchanges._all_to_all

    def counting(rows: torch.Tensor, received: list[int], parts: list[int], group: Any) -> torch.Tensor:
        sent.append(rows.numel() * (len(parts) - 1) // len(parts))
        return usual(rows, received, parts, group)

    exchanges._all_to_all = counting
    try:
        yield
    finally:
        exchanges._all_to_all = usual


def ledger(layout: RankLayout, *, path: Path, batch: TensorDict, config: dict[str, Any]) -> tuple[int, int, int]:
    """Return the numbers that a rank sends in a forward pass and in both, and the tokens of its slice."""
    policy: Any = make_policy(layout, path, **config)
    inputs = batch["token_ids"], batch["token_mask"] > 0
    sent: list[int] = []
    with counted(sent):
        scores = policy.module(*inputs, lengths=batch["lengths"].tolist())
        forward = sum(sent)
        scores.logprobs.sum().backward()
    size = -(-int(batch["lengths"].sum()) // layout.context_parallel_size)
    policy.close()
    return forward, sum(sent), size


def exchanged_bytes(memory: RankMemory) -> int:
    """Return the bytes that a rank sends per layer and token of its slice in a forward pass; backward as many.

    Queries and the result have all heads, keys and values as many that the ranks divide them.
    """
    shape, heads = memory.shape, memory.shape.num_attention_heads // memory.tensor
    groups = math.lcm(shape.num_key_value_heads // memory.tensor, memory.context)
    sent = 2 * heads + 2 * groups if memory.context > 1 else 0
    return memory.compute_bytes * sent * shape.head_dim * (memory.context - 1) // memory.context


def test_the_ledger_by_hand() -> None:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
    sizes = {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "model_type": "llama"}
    shape = ModelShape.from_config("llama", heads | sizes)
    assert exchanged_bytes(RankMemory(shape=shape, context=4)) == 2 * (2 * 4096 + 2 * 1024) * 3 // 4 == 15_360
    assert exchanged_bytes(RankMemory(shape=shape, context=32)) == 2 * 4 * 4096 * 31 // 32  # keys have as many heads
    assert exchanged_bytes(RankMemory(shape=shape)) == 0


@pytest.mark.parametrize("layout", ["cp 2", "cp 4", "cp 2 tp 2"])
def test_ranks_send_what_the_ledger_says(layout: str, models: dict[str, Path], pool: RankPool) -> None:
    batch, path, mesh = make_batch(LENGTHS), models["qwen3"], CONTEXT[layout]
    config = {"num_samples": len(LENGTHS), **section_of(layout)}
    forward, both, size = on(layout, pool, ledger, path=path, batch=batch, config=config)
    model = plain_model(path).config
    shape = ModelShape.from_config("qwen3", model.to_dict())
    memory = RankMemory(
        shape=shape, compute_bytes=4, context=mesh.context_parallel_size, tensor=mesh.tensor_parallel_size
    )
    sent_bytes = exchanged_bytes(memory)
    assert forward * 4 == sent_bytes * size * shape.num_hidden_layers
    assert both == 2 * forward
    share = (memory.context - 1) / memory.context
    assert sent_bytes / 4 <= 4 * shape.hidden_size * share


LONG_LENGTHS = [512, 2048, 64, 64, 128, 256, 1024]  # 4,096 tokens; benchmarks/long_context.py has 32,768


def saved_bytes(layout: RankLayout, *, path: Path, config: dict[str, Any]) -> int:
    """Return the bytes of distinct storages that a rank saves for the backward pass of one pack, without weights."""
    policy: Any = make_policy(layout, path, **config)
    batch = make_batch(LONG_LENGTHS)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.module(batch["token_ids"], batch["token_mask"] > 0, lengths=batch["lengths"].tolist())
    (scores.logprobs.sum() * 0).backward()
    policy.close()
    return sum(kept.values())


def test_saved_bytes_fall_with_the_ranks(models: dict[str, Path], pool: RankPool) -> None:
    config: dict[str, Any] = {"hf_config_overrides": {"max_position_embeddings": 4096}, "logprob_chunk_size": 512}

    def saved(layout: str) -> int:
        return on(layout, pool, saved_bytes, path=models["qwen3"], config=config | section_of(layout))

    whole = saved("plain")
    assert saved("cp 2") <= 0.55 * whole
    assert saved("cp 4") <= 0.30 * whole
