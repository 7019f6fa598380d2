"""What one training step does on every layout of ranks: how it is computed, clipping, skipped steps, schedules."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.errors import PolicyError
from nemo_rl.policy.ranks import RankLayout
from tests.contracts.layouts import (
    BATCHING,
    FEWER,
    LENGTHS,
    MEGATRON,
    Layouts,
    assert_near,
    assert_same_metrics,
    plain_model,
)
from tests.contracts.policies import SGD, clones, make_policy
from tests.contracts.rank_pool import Mesh, RankPool
from tests.support.quick import quick
from tests.unit.policy.tiny import Exploding, WeightedNLL, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

FSDP2_ALONE_HAS = ("offloaded", "kept whole", "kept in shards", "sharing prefixes")
VARIANTS: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1},
    "all at once": {"train_micro_batch_size": 8, "logprob_chunk_size": None},
    "recomputed": {"dtensor_cfg": {"activation_checkpointing": True}},
    "offloaded": {"dtensor_cfg": {"cpu_offload": True}},
    "kept whole": {"train_micro_batch_size": 1, "dtensor_cfg": {"keep_unsharded": True}},
    "kept in shards": {"train_micro_batch_size": 1, "dtensor_cfg": {"keep_unsharded": False}},
    "packed and recomputed": {**BATCHING["packed"], "dtensor_cfg": {"activation_checkpointing": True}},
    "packed in order": {"sequence_packing": {**BATCHING["packed"]["sequence_packing"], "algorithm": "concatenative"}},
    "sharing prefixes": {
        "sequence_packing": {**BATCHING["packed"]["sequence_packing"], "share_prefixes": True},
        "dtensor_cfg": {"activation_checkpointing": True},
    },
    "padded by tokens": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4},
    },
}


CASES = [(layout, v) for layout in FEWER for v in VARIANTS if layout not in MEGATRON or v not in FSDP2_ALONE_HAS]
EVERY_WAY = ("plain", "2 x tp 2", "megatron tp 2 pp 2")  # together every dimension of a layout
QUICK = [
    case
    for case in CASES
    if case[0] in EVERY_WAY or case in (("4 ranks", "sharing prefixes"), ("2 ranks", "offloaded"))
]


@pytest.mark.parametrize(("layout", "variant"), quick(CASES, QUICK))
def test_result_does_not_depend_on_how_it_is_computed(layout: str, variant: str, run: Layouts) -> None:
    calls = [("train_step", make_batch(LENGTHS), WeightedNLL())] * 2 + [("run_with_weights", clones)]
    momentum = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
    *expected_metrics, expected = run("plain", "qwen2", *calls, optimizer=momentum)
    *metrics, weights = run(layout, "qwen2", *calls, optimizer=momentum, **VARIANTS[variant])
    for got, want in zip(metrics, expected_metrics, strict=True):
        assert_same_metrics(got, want)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", quick(FEWER, ["4 ranks", "2 x tp 2", "megatron dp 2", "megatron tp 2 pp 2"]))
@pytest.mark.parametrize(
    ("num_samples", "batching"), quick([(1, "packed"), (1, "samples"), (3, "samples")], [(1, "packed"), (3, "samples")])
)
def test_ranks_without_a_sample_keep_up(num_samples: int, batching: str, layout: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS[:num_samples])
    config: dict[str, Any] = {"optimizer": SGD, "num_samples": num_samples, "train_micro_batch_size": 1}
    calls = [("logprobs", batch), ("train_step", batch, WeightedNLL()), ("run_with_weights", clones)]
    expected_logprobs, expected_metrics, expected = run("plain", "qwen2", *calls, **config)
    logprobs, metrics, weights = run(layout, "qwen2", *calls, **{**BATCHING[batching], **config})
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "2 x tp 2", "megatron dp 2"])
def test_optimizer_steps_follow_each_other_along_groups(layout: str, run: Layouts) -> None:
    """Two steps of one batch are the two steps of its halves."""
    batch = make_batch(LENGTHS)
    config: dict[str, Any] = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}}
    metrics, weights = run(
        layout, "llama", ("train_step", batch, WeightedNLL()), ("run_with_weights", clones), optimizer_steps=2, **config
    )
    halves = [("train_step", half, WeightedNLL()) for half in batch.split(4)]
    *of_halves, expected = run("plain", "llama", *halves, ("run_with_weights", clones), **config)
    num_micro_batches = {"plain": 2, "2 ranks": 2, "2 x tp 2": 2, "megatron dp 2": 2}  # 3 + 1 samples, or 2 + 2
    assert metrics["num_optimizer_steps"] == 2
    assert metrics["num_micro_batches"] == num_micro_batches[layout]
    assert metrics["loss"] == pytest.approx(sum(m["loss"] for m in of_halves) / 2, abs=1e-6)
    assert metrics["global_valid_toks"] == float(batch["token_mask"].sum())
    assert metrics["global_valid_seqs"] == 8
    assert_near(weights, expected)


RECORDED = [case for case in CASES if case[1] in ("one by one", "packed and recomputed", "sharing prefixes")]


@pytest.mark.parametrize(("layout", "variant"), quick(RECORDED, [case for case in RECORDED if case[0] in EVERY_WAY]))
def test_logprobs_that_a_step_records_are_those_of_the_weights_before_it(
    layout: str, variant: str, run: Layouts
) -> None:
    batch = make_batch(LENGTHS)
    marked = batch.clone()
    marked["recorded"] = torch.tensor([-1, 0, -1, 1, 2, -1, -1, 3])
    step = ("train_step", marked, WeightedNLL())
    before, _, recorded = run(
        layout, "qwen2", ("logprobs", batch), step, ("recorded_logprobs", marked), **VARIANTS[variant]
    )
    expected = before[[1, 3, 4, 7]]
    sampled = batch["token_mask"][[1, 3, 4, 7]] > 0
    assert sampled.any(-1).all()
    torch.testing.assert_close(recorded[sampled], expected[sampled], rtol=0, atol=1e-5)


def test_each_recorded_row_is_of_the_weights_before_its_own_optimizer_step(run: Layouts) -> None:
    """A row of a skipped step, without a valid token, has none."""
    batch = make_batch(LENGTHS)
    batch["sample_mask"][4:] = 0.0
    batch["recorded"] = torch.arange(8)
    before, _, recorded = run(
        "plain",
        "qwen2",
        ("logprobs", batch),
        ("train_step", batch, WeightedNLL()),
        ("recorded_logprobs", batch),
        optimizer_steps=2,
    )
    sampled = batch["token_mask"] > 0
    torch.testing.assert_close(recorded[:4][sampled[:4]], before[:4][sampled[:4]], rtol=0, atol=1e-5)
    assert recorded[4:].isnan().all()


@pytest.mark.parametrize("layout", FEWER)
def test_gradient_is_clipped_and_its_norm_reported_before(layout: str, run: Layouts, models: dict[str, Path]) -> None:
    calls = [("train_step", make_batch(LENGTHS), WeightedNLL()), ("run_with_weights", clones)]
    metrics, after = run(layout, "qwen3", *calls, optimizer=SGD, max_grad_norm=0.01)
    before = dict(plain_model(models["qwen3"]).named_parameters())
    moved = torch.stack([(before[n] - after[n]).norm() for n in before]).norm()
    assert metrics["grad_norm"] > 0.1
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_megatrons_own_sections_decay_all_but_biases_and_norms(run: Layouts, models: dict[str, Path]) -> None:
    """A step without a gradient, at the second learning rate of a warm-up: 1 - 0.05 * 0.4 of each matrix is left."""
    batch = make_batch(LENGTHS)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    sections = {
        "optimizer": {"optimizer": "sgd", "sgd_momentum": 0, "lr": 0.1, "weight_decay": 0.4},
        "scheduler": {"lr_warmup_iters": 2, "lr_warmup_init": 0.0},
    }
    steps = [("train_step", batch, WeightedNLL())] * 2
    first, second, weights = run(
        "megatron tp 2 pp 2", "llama", *steps, ("run_with_weights", clones), megatron_cfg=sections
    )
    assert (first["lr"], second["lr"]) == (0.0, pytest.approx(0.05))
    for name, parameter in plain_model(models["llama"]).named_parameters():
        left = 1.0 if parameter.ndim == 1 else 0.98
        torch.testing.assert_close(weights[name], parameter.detach() * left, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["plain", "2 x tp 2", "megatron tp 2 pp 2"])
def test_non_finite_gradient_leaves_the_weights_as_they_are(layout: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS)
    schedule = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    steps = [("train_step", batch, loss()) for loss in (Exploding, WeightedNLL, WeightedNLL)]
    weights = ("run_with_weights", clones)
    before, metrics, after, second, third = run(
        layout, "llama", weights, steps[0], weights, *steps[1:], scheduler=schedule
    )
    assert metrics["num_skipped_steps"] == 1
    assert metrics["num_optimizer_steps"] == 0
    assert metrics["skipped_steps/nonfinite_loss"] == 1  # Exploding's loss is infinite too
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert second["lr"] == 1e-2  # the schedule has not moved
    assert third["lr"] == 5e-3


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "megatron dp 2"])
def test_batch_without_a_valid_token_is_skipped(layout: str, run: Layouts, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    batch["sample_mask"] = torch.zeros(len(LENGTHS))
    metrics, after = run(layout, "llama", ("train_step", batch, WeightedNLL()), ("run_with_weights", clones))
    assert (metrics["num_skipped_steps"], metrics["loss"]) == (1, 0)
    assert all(torch.equal(after[n], p) for n, p in plain_model(models["llama"]).named_parameters())


def test_loss_that_reads_a_missing_key_is_refused(run: Layouts) -> None:
    with pytest.raises(PolicyError, match="advantages"):
        run("plain", "llama", ("train_step", make_batch(LENGTHS).exclude("advantages"), WeightedNLL()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["megatron dp 2", "megatron dp 2 pp 2"])
def test_divided_optimizer_and_overlapping_reduction_change_nothing(layout: str, precision: str, run: Layouts) -> None:
    """Over three steps with clipping and a decay of matrices alone, and in what checkpoints get: float32 weights."""
    batch = make_batch(LENGTHS)
    calls = [("train_step", batch, WeightedNLL())] * 3 + [("run_with_weights", clones), ("logprobs", batch)]
    optimizer = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1}
    results = []
    for is_divided in (False, True):
        options = {"use_distributed_optimizer": is_divided, "overlap_grad_reduce": is_divided}
        section = {"optimizer": optimizer, "distributed_data_parallel_config": options}
        results.append(run(layout, "qwen3", *calls, megatron_cfg=section, precision=precision, max_grad_norm=0.5))
    *expected_metrics, expected, expected_logprobs = results[0]
    *metrics, weights, logprobs = results[1]
    for one, other in zip(metrics, expected_metrics, strict=True):
        assert_same_metrics(one, other)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)


class CountCollectives(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(layout: RankLayout, *, path: Path, keep_unsharded: bool) -> tuple[int, int]:
    """Return the gathers of weights and reductions of gradients of an optimizer step of four micro-batches a rank."""
    config = {"train_micro_batch_size": 1, "dtensor_cfg": {"keep_unsharded": keep_unsharded}}
    policy = make_policy(layout, path, **config)
    with CountCollectives() as seen:
        policy.train_step(make_batch([5] * 8), WeightedNLL())
    policy.close()
    return seen.counts["c10d._allgather_base_.default"], seen.counts["c10d._reduce_scatter_base_.default"]


def test_whole_weights_are_gathered_and_their_gradients_reduced_once_per_step(
    pool: RankPool, models: dict[str, Path]
) -> None:
    """Two layers and the rest, which are three groups; in shards, layers are gathered for both passes."""
    mesh = Mesh(2)
    kept = pool.run(mesh, collectives_of_a_step, path=models["qwen3"], keep_unsharded=True)
    sharded = pool.run(mesh, collectives_of_a_step, path=models["qwen3"], keep_unsharded=False)
    assert kept == [(3, 3)] * 2
    assert sharded == [(4 * (3 + 2), 4 * 3)] * 2
