"""What every training backend says of batches and of its weights, against plain Hugging Face models, on all layouts."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.policy.truncation import Truncation
from tests.contracts.layouts import (
    BATCHING,
    FSDP2,
    LAYOUTS,
    LENGTHS,
    MEGATRON_TOGETHER,
    SPLIT_MODELS,
    UNEVEN,
    Layouts,
    assert_near,
    assert_same_metrics,
    plain_model,
)
from tests.contracts.policies import SGD, clones, first_name, make_policy, play, raising
from tests.contracts.rank_pool import Mesh, RankPool
from tests.support.quick import quick
from tests.unit.policy.tiny import (
    MODELS,
    SIZES,
    VOCABULARY,
    OfAllScores,
    WeightedNLL,
    make_batch,
    plain_logprobs,
    with_sampling_mask,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EACH = [
    *(("plain", model) for model in MODELS),
    *((layout, model) for layout in LAYOUTS[1:] for model in SPLIT_MODELS if layout not in MEGATRON_TOGETHER),
    *((layout, "qwen3") for layout in MEGATRON_TOGETHER),
]
QUICK = {("plain", model) for model in MODELS}
QUICK |= {
    (layout, name) for layout, name in zip(LAYOUTS[1:], cycle(SPLIT_MODELS), strict=False) if (layout, name) in EACH
}
QUICK |= {(layout, "qwen3") for layout in MEGATRON_TOGETHER}


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize(("layout", "name"), quick(EACH, QUICK))
def test_logprobs_are_those_of_the_plain_model(
    layout: str, name: str, batching: str, run: Layouts, models: dict[str, Path]
) -> None:
    logprobs = run.learnt(layout, name, batching)[0]
    with torch.no_grad():
        expected = plain_logprobs(plain_model(models[name]), make_batch(UNEVEN), temperature=0.7)
    assert logprobs.dtype == torch.float32
    assert expected.min() < -1
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize(("layout", "name"), quick(EACH, QUICK))
def test_gradients_are_those_of_the_plain_model(
    layout: str, name: str, batching: str, run: Layouts, models: dict[str, Path]
) -> None:
    _, _, _, metrics, logprobs_after, _, after = run.learnt(layout, name, batching)
    batch, model = make_batch(UNEVEN), plain_model(models[name])
    loss = -(batch["advantages"] * plain_logprobs(model, batch, temperature=0.7)).sum() / batch["token_mask"].sum()
    loss.backward()
    before = dict(model.named_parameters())
    gradients = {n: p.grad for n, p in before.items()}
    assert after.keys() >= gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(before[parameter] - after[parameter], gradient, rtol=1e-4, atol=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["global_valid_toks"] == float(batch["token_mask"].sum())
    assert metrics["global_valid_seqs"] == len(UNEVEN)
    with torch.no_grad():
        for parameter, weight in before.items():
            weight.copy_(after[parameter])
        expected = plain_logprobs(model, batch, temperature=0.7)
    torch.testing.assert_close(logprobs_after, expected, rtol=1e-4, atol=1e-4)


TRUNCATED = [
    ("plain", "samples"),
    ("plain", "packed"),
    ("2 x tp 2", "samples"),
    ("megatron tp 2 pp 2", "packed"),
]


@pytest.mark.parametrize(("layout", "batching"), TRUNCATED)
def test_truncated_logprobs_and_gradients_are_those_of_the_plain_model(
    layout: str, batching: str, run: Layouts, models: dict[str, Path]
) -> None:
    """On the engine's set where it was recorded, on the policy's own elsewhere."""
    model = plain_model(models["qwen3"])
    batch = with_sampling_mask(make_batch(UNEVEN), model.config.vocab_size)
    truncation = Truncation(top_p=0.8, top_k=10)
    reading = [("logprobs", batch), ("reference_logprobs", batch), ("run_with_weights", clones)]
    config = {"optimizer": SGD, "temperature": 0.7, "needs_reference": True, "truncation": truncation}
    logprobs, reference, metrics, after = run(
        layout, "qwen3", *reading[:2], ("train_step", batch, WeightedNLL()), reading[2], **config, **BATCHING[batching]
    )
    expected = plain_logprobs(model, batch, temperature=0.7, top_p=0.8, top_k=10)
    own = plain_logprobs(model, batch.exclude("columns"), temperature=0.7, top_p=0.8, top_k=10)
    assert (expected - own).abs().max() > 0.1
    sampled = batch["token_mask"] > 0
    missing = (batch["columns", "sampling_mask"] < 0).all(-1)[sampled].float().mean()
    assert metrics["sampling_mask_missing"] == pytest.approx(missing.item(), abs=1e-6)
    assert metrics["sampling_mask_mismatch"] == pytest.approx(1 - missing.item(), abs=1e-6)  # random sets are others
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(reference, expected.detach(), rtol=0, atol=1e-5)
    (-(batch["advantages"] * expected).sum() / batch["token_mask"].sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter - after[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "name"), quick(EACH, QUICK))
def test_reference_keeps_the_first_weights(layout: str, name: str, run: Layouts) -> None:
    first, reference, _, _, after, reference_after, _ = run.learnt(layout, name)
    torch.testing.assert_close(reference, first, rtol=0, atol=1e-6)
    assert torch.equal(reference_after, reference)
    assert not torch.allclose(after, reference_after, atol=1e-2)


@pytest.mark.parametrize(("layout", "name"), quick(EACH, QUICK))
def test_weights_are_the_checkpoints_with_tied_ones_once(
    layout: str, name: str, run: Layouts, models: dict[str, Path]
) -> None:
    weights = run.learnt(layout, name)[2]
    expected = dict(plain_model(models[name]).named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["tp 2", "2 x tp 2", "megatron tp 2", "megatron tp 2 pp 2"])
def test_all_scores_are_those_of_one_rank(layout: str, name: str, run: Layouts) -> None:
    """Also where ranks share the vocabulary: of 38 tokens always, of 37 Megatron's ranks, the last with padding."""
    batch = make_batch(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(-3, VOCABULARY, (*batch["token_ids"].shape, 4), generator=generator)  # below 0: none
    batch["candidate_ids"] = candidates
    calls = [("topk_logprobs", batch, 20), ("train_step", batch, OfAllScores()), ("run_with_weights", clones)]
    expected_topk, expected_metrics, expected = run("plain", name, *calls, optimizer=SGD, temperature=0.7)
    topk, metrics, weights = run(layout, name, *calls, optimizer=SGD, temperature=0.7)
    torch.testing.assert_close(topk.logprobs, expected_topk.logprobs, rtol=1e-5, atol=1e-5)
    assert (topk.ids == expected_topk.ids).float().mean() > 0.99  # two may be equally likely
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected)


def test_reference_that_was_not_asked_for_is_refused(run: Layouts) -> None:
    with pytest.raises(PolicyError, match="without a reference"):
        run("plain", "qwen2", ("reference_logprobs", make_batch(LENGTHS)))


@pytest.mark.parametrize(
    ("layout", "name"),
    [("plain", "qwen2"), ("plain", "gemma2"), *[(layout, "qwen3") for layout in (*FSDP2, *MEGATRON_TOGETHER)]],
)
def test_bfloat16_is_near_float32_and_keeps_float32_weights(layout: str, name: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS)
    config: dict[str, Any] = {
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-4}},  # steps that bfloat16 weights would lose
        "needs_reference": True,
    }
    calls = [
        ("logprobs", batch),
        ("reference_logprobs", batch),
        ("train_step", batch, WeightedNLL()),
        ("run_with_weights", clones),
        ("types_of_stepped_weights",),
    ]
    exact, _, exact_metrics, _, _ = run("plain", name, *calls, **config)
    logprobs, reference, metrics, weights, types = run(layout, name, *calls, precision="bfloat16", **config)
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.3
    assert (logprobs - reference).abs().max() < 0.1
    assert metrics["loss"] == pytest.approx(exact_metrics["loss"], abs=0.05)
    assert metrics["grad_norm"] == pytest.approx(exact_metrics["grad_norm"], rel=0.05)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert types == {torch.float32}


def test_float32_weights_alone_are_not_copied(models: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, models["qwen2"])
    own = {p.data_ptr() for p in policy.module.parameters()}
    assert own == policy.run_with_weights(lambda pairs: {t.data_ptr() for _, t in pairs})
    policy.close()


def test_experts_of_several_ranks_have_the_names_of_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    model.save_pretrained(tmp_path)
    calls = [("run_with_weights", clones), ("logprobs", make_batch(LENGTHS))]
    weights, logprobs = pool.run(Mesh(2), play, path=tmp_path, calls=calls, config={})[0]
    expected = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with torch.no_grad():
        torch.testing.assert_close(logprobs, plain_logprobs(model.eval(), make_batch(LENGTHS)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "2 x tp 2", "megatron tp 2 pp 2"])
def test_reader_of_weights_may_stop_early_or_raise(layout: str, run: Layouts) -> None:
    """The other ranks are not left in a gather that the first has given up."""
    calls = [("run_with_weights", first_name), ("run_with_weights", raising), ("logprobs", make_batch(LENGTHS))]
    name, error, logprobs = run(layout, "qwen2", *calls)
    assert name == "model.embed_tokens.weight"
    assert error == "KeyError('the reader')"
    assert len(logprobs) == len(LENGTHS)


def test_model_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        make_policy(SINGLE_RANK, tmp_path / "none")


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "megatron pp 2"])
def test_offload_and_onload_change_nothing_on_a_cpu(layout: str, run: Layouts) -> None:
    reading = ("logprobs", make_batch(LENGTHS))
    before, _, _, after = run(layout, "llama", reading, ("offload",), ("onload",), reading)
    assert torch.equal(before, after)
