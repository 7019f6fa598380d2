"""What every training backend promises, on every layout of ranks, against plain Hugging Face models."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from nemo_rl.config.policy import Policy as PolicyConfig
from nemo_rl.config.teacher import Teacher
from nemo_rl.errors import CheckpointError, ConfigError, PolicyError
from nemo_rl.interfaces import Normalizer, Policy, TokenScores
from nemo_rl.policy.fsdp2 import FSDP2Policy
from nemo_rl.policy.ranks import ALONE, RankLayout
from nemo_rl.policy.teacher import RankTeacher
from tests.contracts.layouts import (
    BATCHING,
    FEWER,
    FSDP2,
    LAYOUTS,
    LENGTHS,
    MEGATRON,
    MEGATRON_TOGETHER,
    SPLIT_MODELS,
    UNEVEN,
    Layouts,
    assert_near,
    assert_same_metrics,
)
from tests.contracts.policies import SETTINGS, SGD, clones, first_name, make_policy, play, raising
from tests.contracts.rank_pool import Mesh, RankPool
from tests.unit.policy.tiny import (
    MODELS,
    SIZES,
    VOCABULARY,
    Exploding,
    OfAllScores,
    WeightedNLL,
    make_batch,
    plain_logprobs,
)

EACH = [
    *(("plain", model) for model in MODELS),
    *((layout, model) for layout in LAYOUTS[1:] for model in SPLIT_MODELS if layout not in MEGATRON_TOGETHER),
    *((layout, "qwen3") for layout in MEGATRON_TOGETHER),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have; several wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize(("layout", "name"), EACH)
def test_logprobs_are_those_of_the_plain_model(
    layout: str, name: str, batching: str, run: Layouts, models: dict[str, Path]
) -> None:
    logprobs = run.learnt(layout, name, batching)[0]
    with torch.no_grad():
        expected = plain_logprobs(plain(models[name]), make_batch(UNEVEN), temperature=0.7)
    assert logprobs.dtype == torch.float32
    assert expected.min() < -1
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize(("layout", "name"), EACH)
def test_gradients_are_those_of_the_plain_model(
    layout: str, name: str, batching: str, run: Layouts, models: dict[str, Path]
) -> None:
    _, _, _, metrics, logprobs_after, _, after = run.learnt(layout, name, batching)
    batch, model = make_batch(UNEVEN), plain(models[name])
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


@pytest.mark.parametrize(("layout", "name"), EACH)
def test_reference_keeps_the_first_weights(layout: str, name: str, run: Layouts) -> None:
    first, reference, _, _, after, reference_after, _ = run.learnt(layout, name)
    torch.testing.assert_close(reference, first, rtol=0, atol=1e-6)
    assert torch.equal(reference_after, reference)
    assert not torch.allclose(after, reference_after, atol=1e-2)


@pytest.mark.parametrize(("layout", "name"), EACH)
def test_weights_are_the_checkpoints_with_tied_ones_once(
    layout: str, name: str, run: Layouts, models: dict[str, Path]
) -> None:
    weights = run.learnt(layout, name)[2]
    expected = dict(plain(models[name]).named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[n], expected[n]) for n in expected)


VARIANTS: dict[str, dict[str, Any]] = {
    "one by one": {"train_micro_batch_size": 1},
    "all at once": {"train_micro_batch_size": 8, "logprob_chunk_size": None},
    "recomputed": {"dtensor_cfg": {"activation_checkpointing": True}},
    "offloaded": {"dtensor_cfg": {"cpu_offload": True}},
    "packed and recomputed": {**BATCHING["packed"], "dtensor_cfg": {"activation_checkpointing": True}},
    "packed in order": {"sequence_packing": {**BATCHING["packed"]["sequence_packing"], "algorithm": "concatenative"}},
    "padded by tokens": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4},
    },
}


@pytest.mark.parametrize(
    ("layout", "variant"),
    [(layout, v) for layout in FEWER for v in VARIANTS if layout not in MEGATRON or v != "offloaded"],
)
def test_result_does_not_depend_on_how_it_is_computed(layout: str, variant: str, run: Layouts) -> None:
    calls = [("train_step", make_batch(LENGTHS), WeightedNLL())] * 2 + [("with_weights", clones)]
    momentum = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
    *expected_metrics, expected = run("plain", "qwen2", *calls, optimizer=momentum)
    *metrics, weights = run(layout, "qwen2", *calls, optimizer=momentum, **VARIANTS[variant])
    for got, want in zip(metrics, expected_metrics, strict=True):
        assert_same_metrics(got, want)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", FEWER)
@pytest.mark.parametrize(("num_samples", "batching"), [(1, "packed"), (1, "samples"), (3, "samples")])
def test_ranks_without_a_sample_keep_up(num_samples: int, batching: str, layout: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS[:num_samples])
    config: dict[str, Any] = {"optimizer": SGD, "num_samples": num_samples, "train_micro_batch_size": 1}
    calls = [("logprobs", batch), ("train_step", batch, WeightedNLL()), ("with_weights", clones)]
    expected_logprobs, expected_metrics, expected = run("plain", "qwen2", *calls, **config)
    logprobs, metrics, weights = run(layout, "qwen2", *calls, **{**BATCHING[batching], **config})
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", ["2 x tp 2", "megatron tp 2", "megatron tp 2 pp 2"])
def test_all_scores_are_those_of_one_rank(layout: str, run: Layouts) -> None:
    """Also where the vocabulary of 37 is split over ranks."""
    batch = make_batch(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(-3, VOCABULARY, (*batch["token_ids"].shape, 4), generator=generator)  # below 0: none
    batch["candidate_ids"] = candidates
    calls = [("topk_logprobs", batch, 20), ("train_step", batch, OfAllScores()), ("with_weights", clones)]
    expected_topk, expected_metrics, expected = run("plain", "qwen2", *calls, optimizer=SGD, temperature=0.7)
    topk, metrics, weights = run(layout, "qwen2", *calls, optimizer=SGD, temperature=0.7)
    torch.testing.assert_close(topk.logprobs, expected_topk.logprobs, rtol=1e-5, atol=1e-5)
    assert (topk.ids == expected_topk.ids).float().mean() > 0.99  # two may be equally likely
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "2 x tp 2", "megatron dp 2"])
def test_optimizer_steps_follow_each_other_along_groups(layout: str, run: Layouts) -> None:
    """Two steps of one batch are the two steps of its halves."""
    batch = make_batch(LENGTHS)
    config: dict[str, Any] = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}}
    metrics, weights = run(
        layout, "llama", ("train_step", batch, WeightedNLL()), ("with_weights", clones), optimizer_steps=2, **config
    )
    halves = [("train_step", half, WeightedNLL()) for half in batch.split(4)]
    *of_halves, expected = run("plain", "llama", *halves, ("with_weights", clones), **config)
    num_micro_batches = {"plain": 2, "2 ranks": 2, "2 x tp 2": 2, "megatron dp 2": 2}  # 3 + 1 samples, or 2 + 2
    assert metrics["num_optimizer_steps"] == 2
    assert metrics["num_micro_batches"] == num_micro_batches[layout]
    assert metrics["loss"] == pytest.approx(sum(m["loss"] for m in of_halves) / 2, abs=1e-6)
    assert metrics["global_valid_toks"] == float(batch["token_mask"].sum())
    assert metrics["global_valid_seqs"] == 8
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", FEWER)
def test_gradient_is_clipped_and_its_norm_reported_before(layout: str, run: Layouts, models: dict[str, Path]) -> None:
    calls = [("train_step", make_batch(LENGTHS), WeightedNLL()), ("with_weights", clones)]
    metrics, after = run(layout, "qwen3", *calls, optimizer=SGD, max_grad_norm=0.01)
    before = dict(plain(models["qwen3"]).named_parameters())
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
    first, second, weights = run("megatron tp 2 pp 2", "llama", *steps, ("with_weights", clones), megatron_cfg=sections)
    assert (first["lr"], second["lr"]) == (0.0, pytest.approx(0.05))
    for name, parameter in plain(models["llama"]).named_parameters():
        left = 1.0 if parameter.ndim == 1 else 0.98
        torch.testing.assert_close(weights[name], parameter.detach() * left, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["plain", "2 x tp 2", "megatron tp 2 pp 2"])
def test_non_finite_gradient_leaves_the_weights_as_they_are(layout: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS)
    schedule = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    steps = [("train_step", batch, loss()) for loss in (Exploding, WeightedNLL, WeightedNLL)]
    weights = ("with_weights", clones)
    before, metrics, after, second, third = run(
        layout, "llama", weights, steps[0], weights, *steps[1:], scheduler=schedule
    )
    assert metrics["num_skipped_steps"] == 1
    assert metrics["num_optimizer_steps"] == 0
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert second["lr"] == 1e-2  # the schedule has not moved
    assert third["lr"] == 5e-3


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "megatron dp 2"])
def test_batch_without_a_valid_token_is_skipped(layout: str, run: Layouts, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    batch["sample_mask"] = torch.zeros(len(LENGTHS))
    metrics, after = run(layout, "llama", ("train_step", batch, WeightedNLL()), ("with_weights", clones))
    assert (metrics["num_skipped_steps"], metrics["loss"]) == (1, 0)
    assert all(torch.equal(after[n], p) for n, p in plain(models["llama"]).named_parameters())


def test_loss_that_reads_a_missing_key_is_refused(run: Layouts) -> None:
    with pytest.raises(PolicyError, match="advantages"):
        run("plain", "llama", ("train_step", make_batch(LENGTHS).exclude("advantages"), WeightedNLL()))


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_teacher_that_counts_tokens_says_what_the_plain_model_says(section: str, models: dict[str, Path]) -> None:
    batch, path = make_batch(LENGTHS), models["llama"]
    config = {"model_name": str(path), "precision": "float32", section: {"enabled": True, "logprob_mb_tokens": 24}}
    teacher = RankTeacher(
        Teacher.model_validate(config), section="teacher", layout=ALONE, model_path=str(path), temperature=0.7
    )
    with torch.no_grad():
        expected = plain_logprobs(plain(path), batch, temperature=0.7)
    torch.testing.assert_close(teacher.logprobs(batch), expected, rtol=0, atol=1e-5)
    top = teacher.topk_logprobs(batch, 2)
    needed = batch["token_mask"] > 0
    assert (top.logprobs[needed][:, 0] >= expected[needed] - 1e-5).all()


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
        ("with_weights", clones),
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
    policy = make_policy(ALONE, models["qwen2"])
    own = {p.data_ptr() for p in policy.module.parameters()}
    assert own == policy.with_weights(lambda pairs: {t.data_ptr() for _, t in pairs})
    policy.close()


def test_experts_of_several_ranks_have_the_names_of_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    model.save_pretrained(tmp_path)
    calls = [("with_weights", clones), ("logprobs", make_batch(LENGTHS))]
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
    calls = [("with_weights", first_name), ("with_weights", raising), ("logprobs", make_batch(LENGTHS))]
    name, error, logprobs = run(layout, "qwen2", *calls)
    assert name == "model.embed_tokens.weight"
    assert error == "KeyError('the reader')"
    assert len(logprobs) == len(LENGTHS)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [*[(layout, "float32") for layout in FEWER], ("plain", "bfloat16"), ("megatron tp 2 pp 2", "bfloat16")],
)
def test_training_goes_on_exactly_after_loading(layout: str, precision: str, run: Layouts, tmp_path: Path) -> None:
    """And the save holds what the policy was when it began, whatever was trained while it was written."""
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(4)]
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
    config: dict[str, Any] = {
        "precision": precision,
        "optimizer_steps": 2,
        "scheduler": [linear, {"name": "torch.optim.lr_scheduler.ConstantLR"}, {"milestones": [3]}],
    }
    save = ("save", tmp_path, {"save_optimizer": True})
    last = [*steps[2:], ("with_weights", clones)]
    *metrics, weights = run(layout, "qwen2", *steps[:2], save, *last, **config)[3:]
    *resumed_metrics, resumed = run(layout, "qwen2", ("load", tmp_path), *last, **config)[1:]
    assert [m["lr"] for m in metrics] == pytest.approx([7e-3, 1e-2 / 3])
    assert resumed_metrics == metrics
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def load_from(layout: RankLayout, *, path: Path, folders: tuple[Path, Path]) -> str:
    """The error of a policy whose first rank reads another folder than the others, as on a disk that lags."""
    policy = make_policy(layout, path, optimizer=SGD)
    try:
        policy.load(folders[min(layout.rank, 1)])
    except CheckpointError as error:
        return str(error)
    finally:
        policy.close()
    return "none"


def test_optimizer_that_only_one_rank_sees_is_an_error_on_both(
    pool: RankPool, run: Layouts, models: dict[str, Path], tmp_path: Path
) -> None:
    whole, lacking = tmp_path / "whole", tmp_path / "lacking"
    run("2 ranks", "llama", ("save", whole, {"save_optimizer": True}), ("finish_save",), optimizer=SGD)
    shutil.copytree(whole / "weights", lacking / "weights")
    errors = pool.run(Mesh(2), load_from, path=models["llama"], folders=(whole, lacking))
    assert [error.rpartition("optimizer ")[2] for error in errors] == ["is not there for ranks [1]"] * 2


MOVES = [
    *[("plain", layout) for layout in FEWER[1:]],
    *[(layout, "plain") for layout in FEWER[1:]],
    ("2 ranks", "4 ranks"),
    ("4 ranks", "tp 2"),
    ("tp 2", "2 x tp 2"),
    ("2 x tp 2", "2 ranks"),
    ("2 ranks", "megatron tp 2"),
    ("megatron tp 2", "megatron pp 2"),
    ("megatron tp 2 pp 2", "2 x tp 2"),
]


@pytest.fixture(scope="module")
def checkpoints(run: Layouts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`checkpoints(layout)`: a folder saved there after a step, and metrics and weights of the step after it."""
    kept: dict[str, tuple[Path, dict[str, float], dict[str, torch.Tensor]]] = {}

    def saved(layout: str) -> tuple[Path, dict[str, float], dict[str, torch.Tensor]]:
        if layout not in kept:
            path = tmp_path_factory.mktemp("saved")
            steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
            save = ("save", path, {"save_optimizer": True})
            _, _, metrics, weights = run(layout, "qwen3", steps[0], save, steps[1], ("with_weights", clones))
            kept[layout] = (path, metrics, weights)
        return kept[layout]

    return saved


@pytest.mark.parametrize(("written_on", "read_on"), MOVES)
def test_checkpoint_moves_between_layouts(written_on: str, read_on: str, run: Layouts, checkpoints: Any) -> None:
    path, expected_metrics, expected = checkpoints(written_on)
    calls = [("load", path), ("train_step", make_batch(LENGTHS, seed=1), WeightedNLL()), ("with_weights", clones)]
    _, metrics, weights = run(read_on, "qwen3", *calls)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected, atol=1e-4)  # AdamW divides by what may be near 0


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("plain", "float32"), ("plain", "bfloat16"), ("2 x tp 2", "float32"), ("megatron tp 2 pp 2", "bfloat16")],
)
def test_saved_folder_is_a_hugging_face_model(layout: str, precision: str, run: Layouts, tmp_path: Path) -> None:
    words = WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]")
    calls = [
        ("train_step", make_batch(LENGTHS), WeightedNLL()),
        ("save", tmp_path, {"save_optimizer": False}),
        ("with_weights", clones),
    ]
    weights = run(layout, "qwen2", *calls, precision=precision, tokenizer=tokenizer)[2]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    for folder in ("weights", "tokenizer"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).convert_tokens_to_ids("two") == 2
    assert not (tmp_path / "optimizer").exists()
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == precision
    assert loaded.dtype == getattr(torch, precision)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())


def test_loading_without_optimizer_or_without_anything(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path / "weights", {"save_optimizer": False}), ("load", tmp_path / "weights"))
    with pytest.raises(CheckpointError, match="nothing"):
        run("plain", "llama", ("load", tmp_path / "nothing"))


def test_checkpoint_of_another_model_is_refused(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path, {"save_optimizer": False}))
    with pytest.raises(CheckpointError, match="another model"):
        run("plain", "gpt2", ("load", tmp_path))


def test_state_of_another_optimizer_is_refused(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path, {"save_optimizer": True}), optimizer=SGD)
    with pytest.raises(CheckpointError, match="another optimizer"):
        run("plain", "llama", ("load", tmp_path))


def test_save_that_cannot_be_written_is_an_error(run: Layouts, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run("plain", "llama", ("save", tmp_path, {"save_optimizer": False}), ("finish_save",))


def test_model_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        make_policy(ALONE, tmp_path / "none")


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "megatron pp 2"])
def test_offload_and_onload_change_nothing_on_a_cpu(layout: str, run: Layouts) -> None:
    reading = ("logprobs", make_batch(LENGTHS))
    before, _, _, after = run(layout, "llama", reading, ("offload",), ("onload",), reading)
    assert torch.equal(before, after)


def on_a_thread(path: Path, **config: Any) -> FSDP2Policy:
    settings = {"model_name": str(path), "train_global_batch_size": 8, **SETTINGS, **config}
    return FSDP2Policy(
        PolicyConfig.model_validate(settings),
        model_path=str(path),
        temperature=1.0,
        needs_reference=True,
        num_samples_per_step=8,
        seed=0,
    )


def test_policy_on_a_thread_gives_what_its_rank_gives(run: Layouts, models: dict[str, Path], tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)
    step = ("train_step", batch, WeightedNLL())
    expected = run("plain", "qwen2", ("logprobs", batch), step, ("with_weights", clones))

    async def use(policy: Policy) -> list[Any]:
        results = [await policy.reference_logprobs(batch), await policy.train_step(batch, WeightedNLL())]
        await policy.save(tmp_path, save_optimizer=True)
        await policy.finish_save()
        assert (tmp_path / "optimizer" / ".metadata").exists()
        await policy.train_step(batch, WeightedNLL())
        await policy.offload()
        await policy.onload()
        await policy.load(tmp_path)
        results.append(await policy.with_weights(clones))
        await policy.close()
        return results

    logprobs, metrics, weights = asyncio.run(use(on_a_thread(models["qwen2"])))
    assert torch.equal(logprobs, expected[0])
    assert metrics == expected[1]
    assert all(torch.equal(weights[name], weight) for name, weight in expected[2].items())


def test_event_loop_goes_on_during_a_training_step(models: dict[str, Path]) -> None:
    """The loss waits, on the policy's thread, for something that only the event loop can do."""

    async def main() -> float:
        loop = asyncio.get_running_loop()

        class Waiting(WeightedNLL):
            def __call__(self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer) -> Any:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(timeout=120)
                return super().__call__(scores, batch, normalizer)

        policy = on_a_thread(models["llama"])
        metrics = await policy.train_step(make_batch(LENGTHS), Waiting())
        await policy.close()
        return metrics["num_optimizer_steps"]

    assert asyncio.run(main()) == 1
