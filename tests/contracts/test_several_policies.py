"""Several policies, named adapters on one base: trained as if alone, and sampled side by side from one engine."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from nemo_rl.config.policies import NamedPolicyConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.generation.engines import AdapterSlots, EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.types import GenerationRequest, SamplingParams
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import MAX_MODEL_LEN, answers, exact_logprobs
from tests.contracts.layouts import LENGTHS, Layouts, plain_model
from tests.contracts.policies import SETTINGS, SGD, Call, clones, make_policy
from tests.contracts.test_weight_sync import PROBES
from tests.unit.policy.tiny import WeightedNLL, make_batch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

LORA: dict[str, Any] = {"enabled": True, "dim": 4, "alpha": 8}
CONFIG: dict[str, Any] = {
    "dtensor_cfg": {"lora_cfg": LORA},
    "scheduler": {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}},
}
SLOW_RATE = 3e-3  # learning rate of the second policy
POLICIES: dict[str, dict[str, Any]] = {
    "first": {},
    "second": {"optimizer": {"kwargs": {"lr": SLOW_RATE}}},
    "frozen": {"trainable": False},
}
READ = ("run_with_weights", clones, {"adapter_only": True})


def step(seed: int) -> Call:
    return ("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL())


def adapter_of(index: int, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"{index}:"
    return {name.removeprefix(prefix): tensor for name, tensor in sent.items() if name.startswith(prefix)}


@pytest.mark.parametrize("layout", ["plain", "2 ranks", pytest.param("tp 2", marks=pytest.mark.slow)])
def test_policies_learn_together_what_each_learns_alone(layout: str, run: Layouts) -> None:
    """With AdamW, clipped gradients and a schedule: nothing of one reaches the other."""
    batch = make_batch(LENGTHS)
    scores = [("logprobs", batch), ("reference_logprobs", batch)]
    config = {**CONFIG, "max_grad_norm": 0.5, "needs_reference": True}
    turns = [("first", 1), ("second", 2), ("second", 3), ("first", 4), ("second", 5), ("first", 6)]
    trained = [call for name, seed in turns for call in (("select", name), step(seed))]
    scored = [call for name in POLICIES for call in (("select", name), *scores)]
    together = run(layout, "qwen2", *trained, READ, *scored, **config, policies=POLICIES)
    metrics = {name: [together[2 * i + 1] for i, (each, _) in enumerate(turns) if each == name] for name in POLICIES}
    sent, rest = together[2 * len(turns)], together[2 * len(turns) + 1 :]
    for index, (name, rate) in enumerate({"first": 1e-2, "second": SLOW_RATE, "frozen": 1e-2}.items()):
        optimizer = {**SETTINGS["optimizer"], "kwargs": {**SETTINGS["optimizer"]["kwargs"], "lr": rate}}
        steps = [step(seed) for each, seed in turns if each == name]
        alone = run(layout, "qwen2", *steps, READ, *scores, **{**config, "optimizer": optimizer})
        assert metrics[name] == alone[: len(steps)]
        weights = adapter_of(index, sent)
        assert weights.keys() == alone[len(steps)].keys()
        for tensor, expected in alone[len(steps)].items():
            torch.testing.assert_close(weights[tensor], expected, rtol=0, atol=1e-6)
        for found, expected in zip(rest[3 * index + 1 : 3 * index + 3], alone[len(steps) + 1 :], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["plain", "2 ranks"])
def test_policies_go_on_exactly_from_a_checkpoint(layout: str, run: Layouts, tmp_path: Path) -> None:
    first = [("select", "first"), step(1), ("select", "second"), step(2), ("select", "first"), step(3)]
    last = [("select", "second"), step(4), ("select", "first"), step(5), READ]
    save = ("save", tmp_path, {"save_optimizer": True})
    *_, expected_second, _, expected_first, expected = run(
        layout, "qwen2", *first, save, *last, **CONFIG, policies=POLICIES
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapters", "optimizer"]
    assert sorted(p.name for p in (tmp_path / "adapters").iterdir()) == sorted(POLICIES)
    *_, second, _, resumed_first, resumed = run(layout, "qwen2", ("load", tmp_path), *last, **CONFIG, policies=POLICIES)
    assert (resumed_first, second) == (expected_first, expected_second)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_a_policy_starts_from_an_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    def published(**config: Any) -> dict[str, torch.Tensor]:
        policy = make_policy(SINGLE_RANK, models["qwen2"], **{**CONFIG, **config})
        try:
            policy.select("first")
            policy.train_step(make_batch(LENGTHS, seed=1), WeightedNLL())
            policy.save(tmp_path / "saved", save_optimizer=False)
            adapter = policy.run_with_weights(clones, adapter_only=True)
            assert adapter is not None
            return adapter
        finally:
            policy.close()

    trained = adapter_of(0, published(policies=POLICIES))
    start = str(shutil.copytree(tmp_path / "saved/adapters/first", tmp_path / "start"))
    policies = {"first": {}, "second": {"adapter_path": start}, "frozen": {"adapter_path": start, "trainable": False}}
    found = published(policies=policies)
    for index in (1, 2):
        assert all(torch.equal(tensor, trained[name]) for name, tensor in adapter_of(index, found).items())
    assert adapter_of(0, found).keys() == trained.keys()
    with pytest.raises(ConfigError, match=r"policies\.second\.adapter_path = .*of other layers"):
        published(policies=policies, dtensor_cfg={"lora_cfg": {**LORA, "target_modules": ["q_proj"]}})


def test_a_frozen_policy_is_not_trained(models: dict[str, Path]) -> None:
    policy = make_policy(SINGLE_RANK, models["qwen2"], **CONFIG, policies=POLICIES)
    try:
        with pytest.raises(PolicyError, match="no policy is named 'third'; known: first, second, frozen"):
            policy.select("third")
        policy.select("frozen")
        with pytest.raises(PolicyError, match=r"policies\.frozen\.trainable is false"):
            policy.train_step(make_batch(LENGTHS), WeightedNLL())
    finally:
        policy.close()


def test_each_token_has_the_log_prob_of_the_policy_that_sampled_it(
    tiny_models: dict[str, Path], engine_loop: asyncio.Runner, tmp_path: Path
) -> None:
    """All in one batch of vLLM, against peft's models of the checkpoint's adapters."""
    path = tiny_models["tied"]
    section = {"model_name": str(path), "train_global_batch_size": 8, **SETTINGS, **CONFIG, "optimizer": SGD}
    policy = LocalPolicy(
        PolicyConfig.model_validate(section),
        model_path=str(path),
        temperature=1.0,
        needs_reference=False,
        num_samples_per_step=8,
        seed=0,
        policies={name: NamedPolicyConfig.model_validate({"trainable": name != "frozen"}) for name in POLICIES},
    )
    prompt = tuple(range(20, 60))

    async def main() -> dict[str, Any]:
        slots = AdapterSlots(LORA["dim"], 1, tuple(POLICIES))
        model = EngineModel(str(path), "float32", MAX_MODEL_LEN, "cpu", adapters=slots)
        engine_config = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16, in_process=True)
        engine = await VllmGeneration.create(VllmGenerationConfig(vllm_cfg=engine_config), model)
        sync = TransportWeightSync(
            PROBES, WeightSyncConfig(verify=True), "float32", adapter_only=True, policies=tuple(POLICIES)
        )
        try:
            for version in (1, 2):
                for name, seed in (("first", version), ("second", 10 + version)):
                    await policy.select(name)
                    await policy.train_step(make_batch(LENGTHS, seed=seed), WeightedNLL())
                await sync.publish(policy, engine, weight_version=version)
            await policy.save(tmp_path, save_optimizer=False)
            await policy.finish_save()
            requests = [
                GenerationRequest(f"{name}-{i}", prompt, SamplingParams(12), seed=i, session_id=name, policy=name)
                for i in range(3)
                for name in POLICIES
            ]
            return await answers(engine, requests)
        finally:
            sync.close()
            await engine.close()
            await policy.close()

    completions = engine_loop.run(main())
    base = plain_model(path)
    for name in POLICIES:
        adapter = tmp_path / "adapters" / name
        b_weights = [t for n, t in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in n]
        assert any(t.any() for t in b_weights) == (name != "frozen")
        model = PeftModel.from_pretrained(plain_model(path), adapter).eval()
        for i in range(3):
            completion = completions[f"{name}-{i}"]
            assert completion.weight_versions == (2, 2)
            exact = exact_logprobs(model, prompt, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-5, rtol=0)
            difference = (exact - exact_logprobs(base, prompt, completion.token_ids, 1.0)).abs().max()
            assert (difference > 1e-2) == (name != "frozen")
