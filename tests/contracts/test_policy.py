"""What every training backend promises (`interfaces.Policy`), against plain Hugging Face models."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nemo_rl.config.policy import Policy as PolicyConfig
from nemo_rl.errors import CheckpointError, ConfigError, PolicyError
from nemo_rl.interfaces import Normalizer, Policy
from nemo_rl.policy.fsdp2 import FSDP2Policy
from tests.unit.policy.tiny import MODELS, Exploding, WeightedNLL, make_batch, plain_logprobs, saved_model

ResultT = TypeVar("ResultT")
LENGTHS = [9, 5, 12, 3, 7, 12, 2, 6]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: saved_model(name, folder) for name in MODELS}


def make_policy(path: Path, *, optimizer_steps: int = 1, temperature: float = 1.0, **config: Any) -> FSDP2Policy:
    settings: dict[str, Any] = {
        "model_name": str(path),
        "precision": "float32",
        "device": "cpu",
        "train_global_batch_size": len(LENGTHS) // optimizer_steps,
        "train_micro_batch_size": 3,
        "logprob_chunk_size": 4,
        "max_grad_norm": None,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}},
    }
    needs_reference = config.pop("needs_reference", False)
    tokenizer = config.pop("tokenizer", None)
    return FSDP2Policy(
        PolicyConfig.model_validate({**settings, **config}),
        model_path=str(path),
        temperature=temperature,
        needs_reference=needs_reference,
        num_samples_per_step=len(LENGTHS),
        seed=0,
        tokenizer=tokenizer,
    )


def using(policy: FSDP2Policy, use: Callable[[FSDP2Policy], Awaitable[ResultT]]) -> ResultT:
    """Run `use` and close the policy."""

    async def main() -> ResultT:
        try:
            return await use(policy)
        finally:
            await policy.close()

    return asyncio.run(main())


async def weights_of(policy: FSDP2Policy) -> dict[str, torch.Tensor]:
    return await policy.with_weights(lambda pairs: {name: tensor.clone() for name, tensor in pairs})


def trained(path: Path, batch: TensorDict, num_steps: int = 1, **config: Any) -> tuple[list[dict[str, float]], dict]:
    """Metrics of each training step, and the weights after them."""

    async def use(policy: FSDP2Policy) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        metrics = [await policy.train_step(batch, WeightedNLL()) for _ in range(num_steps)]
        return metrics, await weights_of(policy)

    return using(make_policy(path, **config), use)


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_plain_model(name: str, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    logprobs = using(make_policy(models[name], temperature=0.7), lambda p: p.logprobs(batch))
    with torch.no_grad():
        expected = plain_logprobs(plain(models[name]), batch, temperature=0.7)
    assert logprobs.dtype == torch.float32
    assert expected.min() < -1
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model(name: str, models: dict[str, Path]) -> None:
    """One step of SGD with learning rate 1 moves every weight by its gradient."""
    batch = make_batch(LENGTHS)
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}
    metrics, after = trained(models[name], batch, optimizer=sgd)
    model = plain(models[name])
    loss = -(batch["advantages"] * plain_logprobs(model, batch)).sum() / batch["token_mask"].sum()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    before = dict(model.named_parameters())
    assert after.keys() >= gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(before[parameter] - after[parameter], gradient, rtol=1e-4, atol=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert metrics[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 8, "logprob_chunk_size": None},
        {"dtensor_cfg": {"activation_checkpointing": True}},
    ],
    ids=["one by one", "all at once", "recomputed"],
)
def test_result_does_not_depend_on_how_it_is_computed(config: dict[str, Any], models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    expected_metrics, expected = trained(models["qwen2"], batch, num_steps=2)
    metrics, weights = trained(models["qwen2"], batch, num_steps=2, **config)
    for got, want in zip(metrics, expected_metrics, strict=True):
        for name in got.keys() - {"num_micro_batches"}:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_optimizer_steps_follow_each_other_along_groups(models: dict[str, Path]) -> None:
    """Two steps of one batch are the two steps of its halves."""
    batch = make_batch(LENGTHS)
    metrics, weights = trained(models["llama"], batch, optimizer_steps=2)

    async def halves(policy: FSDP2Policy) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = [(await policy.train_step(half, WeightedNLL()))["loss"] for half in batch.split(4)]
        return losses, await weights_of(policy)

    losses, expected = using(make_policy(models["llama"]), halves)
    assert metrics[0]["num_optimizer_steps"] == 2
    assert metrics[0]["num_micro_batches"] == 2  # the mean: each half has 3 + 1 samples
    assert metrics[0]["loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert metrics[0]["global_valid_toks"] == float(batch["token_mask"].sum())
    assert metrics[0]["global_valid_seqs"] == 8
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_gradient_is_clipped_and_its_norm_reported_before(models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}
    metrics, after = trained(models["llama"], batch, optimizer=sgd, max_grad_norm=0.01)
    before = dict(plain(models["llama"]).named_parameters())
    moved = torch.stack([(before[n] - after[n]).norm() for n in before]).norm()
    assert metrics[0]["grad_norm"] > 0.1
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


def test_non_finite_gradient_leaves_the_weights_as_they_are(models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    schedule = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}

    async def use(policy: FSDP2Policy) -> None:
        before = await weights_of(policy)
        metrics = await policy.train_step(batch, Exploding())
        after = await weights_of(policy)
        assert metrics["num_skipped_steps"] == 1
        assert metrics["num_optimizer_steps"] == 0
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert (await policy.train_step(batch, WeightedNLL()))["lr"] == 1e-2  # the schedule has not moved
        assert (await policy.train_step(batch, WeightedNLL()))["lr"] == 5e-3

    using(make_policy(models["llama"], scheduler=schedule), use)


def test_batch_without_a_valid_token_is_skipped(models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    batch["sample_mask"] = torch.zeros(len(LENGTHS))
    metrics, after = trained(models["llama"], batch)
    assert (metrics[0]["num_skipped_steps"], metrics[0]["loss"]) == (1, 0)
    assert all(torch.equal(after[n], p) for n, p in plain(models["llama"]).named_parameters())


def test_loss_that_reads_a_missing_key_is_refused(models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS).exclude("advantages")
    with pytest.raises(PolicyError, match="advantages"):
        using(make_policy(models["llama"]), lambda p: p.train_step(batch, WeightedNLL()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reference_keeps_the_first_weights(precision: str, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)

    async def use(policy: FSDP2Policy) -> None:
        first = await policy.logprobs(batch)
        await policy.train_step(batch, WeightedNLL())
        reference = await policy.reference_logprobs(batch)
        assert torch.equal(reference, first)
        assert not torch.allclose(await policy.logprobs(batch), reference, atol=1e-2)

    using(make_policy(models["qwen2"], needs_reference=True, precision=precision), use)


def test_reference_that_was_not_asked_for_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(PolicyError, match="without a reference"):
        using(make_policy(models["qwen2"]), lambda p: p.reference_logprobs(make_batch(LENGTHS)))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_bfloat16_is_near_float32_and_keeps_float32_weights(name: str, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    sgd = {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-4}}  # steps that bfloat16 weights would lose

    async def use(policy: FSDP2Policy) -> tuple[torch.Tensor, dict[str, float], set[torch.dtype]]:
        logprobs = await policy.logprobs(batch)
        metrics = await policy.train_step(batch, WeightedNLL())
        return logprobs, metrics, {w.dtype for w in (await weights_of(policy)).values()}

    exact, exact_metrics, _ = using(make_policy(models[name], optimizer=sgd), use)
    policy = make_policy(models[name], optimizer=sgd, precision="bfloat16")
    logprobs, metrics, dtypes = using(policy, use)
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.3
    assert metrics["loss"] == pytest.approx(exact_metrics["loss"], abs=0.05)
    assert metrics["grad_norm"] == pytest.approx(exact_metrics["grad_norm"], rel=0.05)
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in policy._rank.module.parameters()} == {torch.float32}


def test_weights_have_the_names_of_the_checkpoint_with_tied_ones_once(models: dict[str, Path]) -> None:
    for name, has_head in (("qwen2", False), ("llama", True)):
        weights = using(make_policy(models[name]), weights_of)
        expected = dict(plain(models[name]).named_parameters())
        assert weights.keys() == expected.keys()
        assert ("lm_head.weight" in weights) is has_head
        assert all(torch.equal(weights[n], expected[n]) for n in expected)


def test_float32_weights_are_not_copied(models: dict[str, Path]) -> None:
    async def use(policy: FSDP2Policy) -> bool:
        own = {p.data_ptr() for p in policy._rank.module.parameters()}
        return own == await policy.with_weights(lambda pairs: {t.data_ptr() for _, t in pairs})

    assert using(make_policy(models["qwen2"]), use)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_goes_on_exactly_after_loading(precision: str, models: dict[str, Path], tmp_path: Path) -> None:
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(4)]
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
    settings: dict[str, Any] = {
        "precision": precision,
        "optimizer_steps": 2,
        "scheduler": [linear, {"name": "torch.optim.lr_scheduler.ConstantLR"}, {"milestones": [3]}],
    }

    async def first(policy: FSDP2Policy) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        for batch in batches[:2]:
            await policy.train_step(batch, WeightedNLL())
        await policy.save(tmp_path, save_optimizer=True)
        return [await policy.train_step(b, WeightedNLL()) for b in batches[2:]], await weights_of(policy)

    async def second(policy: FSDP2Policy) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        await policy.load(tmp_path)
        return [await policy.train_step(b, WeightedNLL()) for b in batches[2:]], await weights_of(policy)

    metrics, weights = using(make_policy(models["qwen2"], **settings), first)
    resumed_metrics, resumed = using(make_policy(models["qwen2"], **settings), second)
    assert [m["lr"] for m in metrics] == pytest.approx([7e-3, 1e-2 / 3])
    assert resumed_metrics == metrics
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_saved_folder_is_a_hugging_face_model(precision: str, models: dict[str, Path], tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)

    async def use(policy: FSDP2Policy) -> dict[str, torch.Tensor]:
        await policy.train_step(batch, WeightedNLL())
        await policy.save(tmp_path, save_optimizer=False)
        return await weights_of(policy)

    words = WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]")
    weights = using(make_policy(models["qwen2"], precision=precision, tokenizer=tokenizer), use)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    for folder in ("weights", "tokenizer"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).convert_tokens_to_ids("two") == 2
    assert not (tmp_path / "optimizer").exists()
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == precision
    assert loaded.dtype == getattr(torch, precision)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())


def test_loading_without_optimizer_or_without_anything(models: dict[str, Path], tmp_path: Path) -> None:
    async def use(policy: FSDP2Policy) -> None:
        await policy.save(tmp_path / "weights only", save_optimizer=False)
        await policy.load(tmp_path / "weights only")
        with pytest.raises(CheckpointError, match="nothing"):
            await policy.load(tmp_path / "nothing")

    using(make_policy(models["llama"]), use)


def test_checkpoint_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    using(make_policy(models["llama"]), lambda p: p.save(tmp_path, save_optimizer=False))
    with pytest.raises(CheckpointError, match="another model"):
        using(make_policy(models["gpt2"]), lambda p: p.load(tmp_path))


def test_model_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        make_policy(tmp_path / "none")


def test_offload_and_onload_change_nothing_on_a_cpu(models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)

    async def use(policy: Policy) -> bool:
        before = await policy.logprobs(batch)
        await policy.offload()
        await policy.onload()
        return torch.equal(before, await policy.logprobs(batch))

    assert using(make_policy(models["llama"]), use)


def test_event_loop_goes_on_during_a_training_step(models: dict[str, Path]) -> None:
    """The loss waits, on the policy's thread, for something that only the event loop can do."""

    async def use(policy: FSDP2Policy) -> float:
        loop = asyncio.get_running_loop()

        class Waiting(WeightedNLL):
            def __call__(self, logprobs: torch.Tensor, batch: TensorDict, normalizer: Normalizer) -> Any:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=120)
                return super().__call__(logprobs, batch, normalizer)

        return (await policy.train_step(make_batch(LENGTHS), Waiting()))["num_optimizer_steps"]

    assert using(make_policy(models["llama"]), use) == 1
