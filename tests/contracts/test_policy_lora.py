"""LoRA, against models that peft itself makes, reads and merges."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import answers, exact_logprobs, request
from tests.contracts.layouts import BATCHING, LENGTHS, UNEVEN, Layouts, assert_near, assert_same_metrics, plain_model
from tests.contracts.policies import SETTINGS, SGD, clones, make_policy
from tests.unit.policy.tiny import WeightedNLL, make_batch, plain_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

LORA: dict[str, Any] = {"enabled": True, "dim": 4, "alpha": 8}
CONFIG: dict[str, Any] = {"dtensor_cfg": {"lora_cfg": LORA}}
LAYOUTS = ("plain", "fsdp2 alone", "2 ranks", "tp 2")
EACH = [
    ("plain", "qwen2", "samples"),
    ("plain", "llama", "packed"),
    ("fsdp2 alone", "qwen3", "samples"),
    ("2 ranks", "qwen2", "packed"),
    ("2 ranks", "llama", "samples"),
    ("tp 2", "qwen3", "packed"),
    ("2 x tp 2", "llama", "samples"),
    ("megatron dp 2", "qwen2", "packed"),
    ("megatron tp 2", "qwen3", "samples"),
    ("megatron pp 2", "llama", "packed"),
    ("megatron tp 2 sp", "qwen3", "packed"),
]
MEGATRON_LAYOUTS = ("megatron dp 2", "megatron tp 2")
WEIGHTS = "adapter/adapter_model.safetensors"


def with_adapter(path: Path, adapter: Path, *, is_trainable: bool = False) -> Any:
    return PeftModel.from_pretrained(plain_model(path), adapter, is_trainable=is_trainable).eval()


@pytest.fixture(scope="module")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with an `adapter/` that peft made, whose B is not 0."""
    directories: dict[str, Path] = {}
    for name in {name for _, name, _ in EACH}:
        torch.manual_seed(1)
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        directories[name] = tmp_path_factory.mktemp(name)
        get_peft_model(plain_model(models[name]), config).save_pretrained(str(directories[name] / "adapter"))
    return directories


@dataclass(frozen=True)
class Learnt:
    """What a policy said and saved before and after one step of SGD with a learning rate of 1."""

    before: list[Any]  # log-probs, the reference's, weights
    metrics: dict[str, float]
    after: list[Any]
    directories: tuple[Path, Path]


@pytest.fixture(scope="module")
def learnt(run: Layouts, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept: dict[tuple[str, str, str], Learnt] = {}

    def one(layout: str, model: str, batching: str) -> Learnt:
        key = (layout, model, batching)
        if key not in kept:
            batch, directory = make_batch(UNEVEN), tmp_path_factory.mktemp("learnt")
            directories = (directory / "before", directory / "after")
            saves = [("save", path, {"save_optimizer": False}) for path in directories]
            reading = [("reference_logprobs", batch), ("logprobs", batch), ("run_with_weights", clones)]
            calls = [
                *[("load", adapters[model]), *reading, saves[0], ("train_step", batch, WeightedNLL())],
                *[*reading, saves[1], ("finish_save",)],
            ]
            config = {"optimizer": SGD, "temperature": 0.7, "needs_reference": True, **BATCHING[batching], **CONFIG}
            said = run(layout, model, *calls, **config)
            kept[key] = Learnt(said[1:4], said[5], said[6:9], directories)
        return kept[key]

    return one


def expected_logprobs(model: Any, batch: TensorDict) -> torch.Tensor:
    with torch.no_grad():
        return plain_logprobs(model, batch, temperature=0.7)


@pytest.mark.parametrize(("layout", "name", "batching"), EACH)
def test_logprobs_are_those_of_pefts_model_and_the_references_those_of_the_base(
    layout: str, name: str, batching: str, learnt: Any, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    result, batch = learnt(layout, name, batching), make_batch(UNEVEN)
    base = expected_logprobs(plain_model(models[name]), batch)
    adapted = expected_logprobs(with_adapter(models[name], adapters[name] / "adapter"), batch)
    assert (adapted - base).abs().max() > 0.1
    torch.testing.assert_close(result.before[1], adapted, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.before[0], base, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.after[0], result.before[0], rtol=0, atol=2e-6)  # training does not touch it
    learnt_model = with_adapter(models[name], result.directories[1] / "adapter")
    torch.testing.assert_close(result.after[1], expected_logprobs(learnt_model, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layout", "name", "batching"), EACH)
def test_gradients_are_those_of_pefts_model(
    layout: str, name: str, batching: str, learnt: Any, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    result, batch = learnt(layout, name, batching), make_batch(UNEVEN)
    model = with_adapter(models[name], adapters[name] / "adapter", is_trainable=True)
    loss = -(batch["advantages"] * plain_logprobs(model, batch, temperature=0.7)).sum() / batch["token_mask"].sum()
    loss.backward()
    gradients = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    before, after = load_file(adapters[name] / WEIGHTS), load_file(result.directories[1] / WEIGHTS)
    assert before.keys() == after.keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        torch.testing.assert_close(before[tensor] - after[tensor], gradient, rtol=1e-4, atol=1e-5)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(("layout", "name", "batching"), EACH)
def test_engines_and_readers_of_the_checkpoint_get_the_merged_model(
    layout: str, name: str, batching: str, learnt: Any, models: dict[str, Path]
) -> None:
    result, batch = learnt(layout, name, batching), make_batch(UNEVEN)
    for directory, weights in zip(result.directories, (result.before[2], result.after[2]), strict=True):
        merged = with_adapter(models[name], directory / "adapter").merge_and_unload()
        assert_near(weights, dict(merged.named_parameters()), atol=1e-6)
        exported = AutoModelForCausalLM.from_pretrained(directory / "weights").eval()
        assert all(torch.equal(p, weights[n]) for n, p in exported.named_parameters())
    first = AutoModelForCausalLM.from_pretrained(result.directories[0] / "weights").eval()
    torch.testing.assert_close(expected_logprobs(first, batch), result.before[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["2 ranks", "tp 2", *MEGATRON_LAYOUTS])
def test_an_engine_that_holds_adapters_gets_b_with_its_scale(
    layout: str, run: Layouts, adapters: dict[str, Path]
) -> None:
    saved = load_file(adapters["qwen2"] / WEIGHTS)
    sent = run(
        layout, "qwen2", ("load", adapters["qwen2"]), ("run_with_weights", clones, {"adapter_only": True}), **CONFIG
    )[1]
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor * 2 if "lora_B" in name else tensor), name  # alpha 8 / dim 4


@pytest.mark.parametrize(
    ("named", "adapted"),
    [
        (["linear_qkv", "linear_fc2"], {"q_proj", "k_proj", "v_proj", "down_proj"}),
        (["k_proj", "up_proj"], {"k_proj", "up_proj"}),
    ],
)
def test_megatrons_layers_are_adapted_whole_or_in_part(
    named: list[str], adapted: set[str], run: Layouts, tmp_path: Path
) -> None:
    """As the backend of transformers adapts the same matrices, after steps in which all of them learn."""
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
    calls = [*steps, ("save", tmp_path, {"save_optimizer": False}), ("run_with_weights", clones)]
    metrics, _, _, weights = run(
        "megatron tp 2", "qwen2", *calls, dtensor_cfg={"lora_cfg": LORA | {"target_modules": named}}
    )
    assert {name.split(".")[-3] for name in load_file(tmp_path / WEIGHTS)} == adapted
    matrices = {"dtensor_cfg": {"lora_cfg": LORA | {"target_modules": sorted(adapted)}}}
    expected_metrics, _, expected = run("plain", "qwen2", *steps, calls[-1], **matrices)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected, atol=1e-4)


def test_two_ranks_merge_what_one_merges(learnt: Any, run: Layouts, adapters: dict[str, Path]) -> None:
    calls = [("load", adapters["llama"]), ("run_with_weights", clones)]
    expected = run("plain", "llama", *calls, **CONFIG)[1]
    weights = learnt("2 ranks", "llama", "samples").before[2]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_only_adapters_are_trained_and_merging_changes_nothing(models: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, models["qwen2"], **CONFIG)
    parameters = dict(policy.module.named_parameters())
    frozen = {name: p.detach().clone() for name, p in parameters.items() if ".lora_" not in name}
    adapters = {id(p) for name, p in parameters.items() if ".lora_" in name}
    policy.train_step(make_batch(LENGTHS), WeightedNLL())
    policy.run_with_weights(clones)
    assert {id(p) for group in policy._optimizer.param_groups for p in group["params"]} == adapters
    assert {id(p) for p in policy._optimizer.state} == adapters
    assert all(torch.equal(parameters[name], before) for name, before in frozen.items())
    policy.close()


def test_first_adapters_change_nothing_and_are_the_same_on_every_layout(run: Layouts, tmp_path: Path) -> None:
    layouts = (*LAYOUTS, *MEGATRON_LAYOUTS)
    for layout in layouts:
        save = ("save", tmp_path / layout, {"save_optimizer": False})
        (*_, weights) = run(layout, "qwen2", save, ("finish_save",), ("run_with_weights", clones), **CONFIG)
        base = run("plain", "qwen2", ("run_with_weights", clones))[0]
        assert all(torch.equal(weights[name], base[name]) for name in base)
    first, *others = [load_file(tmp_path / layout / WEIGHTS) for layout in layouts]
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.parametrize(("layout", "variant"), [("plain", "recomputed"), *[("2 ranks", v) for v in VARIANTS]])
def test_result_does_not_depend_on_how_it_is_computed(
    layout: str, variant: str, run: Layouts, adapters: dict[str, Path]
) -> None:
    """Also where a rank has no sample."""
    batch = make_batch(LENGTHS[:3])
    calls = [("load", adapters["qwen2"]), *[("train_step", batch, WeightedNLL())] * 2, ("run_with_weights", clones)]
    config: dict[str, Any] = {"num_samples": 3, "train_micro_batch_size": 1, "max_grad_norm": 0.1}
    config["optimizer"] = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
    _, *expected_metrics, expected = run("plain", "qwen2", *calls, **config, **CONFIG)
    cfg = {"dtensor_cfg": {"lora_cfg": LORA, **VARIANTS[variant]}}
    _, *metrics, weights = run(layout, "qwen2", *calls, **config, **cfg)
    for got, want in zip(metrics, expected_metrics, strict=True):
        assert_same_metrics(got, want)
    assert_near(weights, expected)


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "2 x tp 2", "megatron tp 2"])
def test_gradient_is_clipped_over_the_adapters(
    layout: str, run: Layouts, adapters: dict[str, Path], tmp_path: Path
) -> None:
    calls = [
        *[("load", adapters["qwen2"]), ("train_step", make_batch(LENGTHS), WeightedNLL())],
        *[("save", tmp_path, {"save_optimizer": False}), ("finish_save",)],
    ]
    metrics = run(layout, "qwen2", *calls, optimizer=SGD, max_grad_norm=0.01, **CONFIG)[1]
    before, after = load_file(adapters["qwen2"] / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert metrics["grad_norm"] > 0.1
    assert torch.stack([(before[n] - after[n]).norm() for n in before]).norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("layout", [*LAYOUTS, "megatron tp 2"])
def test_training_goes_on_exactly_after_loading_an_adapter_alone(layout: str, run: Layouts, tmp_path: Path) -> None:
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(4)]
    config: dict[str, Any] = {
        "scheduler": {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}},
        "dtensor_cfg": {"lora_cfg": {**LORA, "save_merged": False}},
    }
    save = ("save", tmp_path, {"save_optimizer": True})
    last = [*steps[2:], ("run_with_weights", clones)]
    *metrics, weights = run(layout, "qwen2", *steps[:2], save, *last, **config)[3:]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "optimizer"]
    *resumed_metrics, resumed = run(layout, "qwen2", ("load", tmp_path), *last, **config)[1:]
    assert [m["lr"] for m in metrics] == pytest.approx([2.5e-3, 1.25e-3])
    assert resumed_metrics == metrics
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("written_on", "read_on"),
    [
        ("plain", "2 ranks"),
        ("2 ranks", "tp 2"),
        ("tp 2", "plain"),
        ("tp 2", "megatron tp 2"),
        ("megatron tp 2", "plain"),
    ],
)
def test_checkpoint_moves_between_layouts(written_on: str, read_on: str, run: Layouts, tmp_path: Path) -> None:
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
    save = ("save", tmp_path, {"save_optimizer": True})
    *_, expected_metrics, expected = run(
        written_on, "qwen3", steps[0], save, steps[1], ("run_with_weights", clones), **CONFIG
    )
    _, metrics, weights = run(read_on, "qwen3", ("load", tmp_path), steps[1], ("run_with_weights", clones), **CONFIG)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected, atol=1e-4)  # AdamW divides by what may be near 0


@pytest.mark.parametrize("layout", ["plain", "2 ranks", "megatron dp 2"])
def test_bfloat16_is_near_float32_and_keeps_float32_adapters(
    layout: str, run: Layouts, adapters: dict[str, Path]
) -> None:
    batch = make_batch(LENGTHS)
    calls = [
        *[("load", adapters["qwen3"]), ("reference_logprobs", batch), ("logprobs", batch)],
        *[("train_step", batch, WeightedNLL()), ("types_of_stepped_weights",), ("run_with_weights", clones)],
    ]
    config = {"needs_reference": True, **CONFIG}
    _, exact_reference, exact, exact_metrics, _, _ = run("plain", "qwen3", *calls, **config)
    _, reference, logprobs, metrics, types, weights = run(layout, "qwen3", *calls, precision="bfloat16", **config)
    assert 0 < (logprobs - exact).abs().max() < 0.5
    assert 0 < (reference - exact_reference).abs().max() < 0.3
    assert metrics["grad_norm"] == pytest.approx(exact_metrics["grad_norm"], rel=0.1)
    assert types == {torch.float32}
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


def test_refit_brings_the_merged_model_to_the_engine(
    engine_loop: asyncio.Runner, engines: Any, tiny_models: dict[str, Path]
) -> None:
    """And verification finds that engine and policy agree."""
    settings = {"model_name": str(tiny_models["tied"]), "train_global_batch_size": 8, **SETTINGS, **CONFIG}
    engine = engines("hf", "tied")
    policy = LocalPolicy(
        PolicyConfig.model_validate(settings),
        model_path=str(tiny_models["tied"]),
        temperature=1.0,
        needs_reference=False,
        num_samples_per_step=8,
        seed=0,
    )
    sync = TransportWeightSync([(5, 6, 7, 8), (30, 3)], WeightSyncConfig(), "float32")

    async def refit() -> Any:
        await policy.train_step(make_batch(LENGTHS), WeightedNLL())
        await sync.publish(policy, engine, weight_version=1)
        weights = await policy.run_with_weights(clones)
        await policy.close()
        return weights, (await answers(engine, [request("a", max_new_tokens=20)]))["a"]

    weights, completion = engine_loop.run(refit())
    sync.close()
    model = plain_model(tiny_models["tied"])
    assert not all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    model.load_state_dict(weights, strict=False)
    exact = exact_logprobs(model, (5, 6, 7), completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


def test_what_is_no_adapter_of_these_layers_is_refused(run: Layouts, adapters: dict[str, Path], tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path, {"save_optimizer": False}), ("finish_save",))
    with pytest.raises(CheckpointError, match="holds no adapter"):
        run("plain", "llama", ("load", tmp_path), **CONFIG)
    for change, said in (({"dim": 2}, "other layers or of another dim"), ({"alpha": 4}, "of alpha 8, not 4")):
        config = {"dtensor_cfg": {"lora_cfg": {**LORA, **change}}}
        with pytest.raises(CheckpointError, match=said):
            run("plain", "llama", ("load", adapters["llama"]), **config)
