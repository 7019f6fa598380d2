"""After a refit every engine computes what the policy computes, and a wrong refit is found."""

import asyncio
from typing import Any

import pytest
import torch

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.types import SamplingParams
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import UntrainedPolicy, answers, exact_logprobs, request, tiny_model

PROBES = [(5, 6, 7, 8), (250, 3), (11, 12, 13, 14, 15, 16), (1, 99)]
KINDS = [("hf", "tied"), ("hf", "untied"), ("vllm", "tied"), ("vllm", "untied"), ("vllm in process", "tied")]


def published(
    runner: asyncio.Runner, engine: Any, model: Any, *, weight_version: int = 1, falsify: Any = None, **keys: Any
) -> None:
    """Publish once, and verify."""
    policy = UntrainedPolicy(model)
    if falsify is not None:
        policy.published = falsify
    sync = TransportWeightSync(PROBES, WeightSyncConfig(**keys), "float32")
    try:
        runner.run(sync.publish(policy, engine, weight_version=weight_version))  # type: ignore[arg-type]
    finally:
        sync.close()
        runner.run(engine.resume()) if is_paused(engine) else None


def is_paused(engine: Any) -> bool:
    """Whether a refit that failed left it paused."""
    return engine._compute_lock.locked() if hasattr(engine, "_compute_lock") else not engine._admission_open.is_set()


@pytest.fixture(params=KINDS, ids="-".join)
def engine_and_name(request: pytest.FixtureRequest, engines: Any) -> tuple[Any, str]:
    return engines(*request.param), request.param[1]


def test_refit_is_exact(engine_loop, engine_and_name):
    engine, name = engine_and_name
    for weight_version in (3, 4):
        model = tiny_model(tied=name == "tied", seed=weight_version)
        published(engine_loop, engine, model, weight_version=weight_version)
        completion = engine_loop.run(answers(engine, [request("a", max_new_tokens=30)]))["a"]
        exact = exact_logprobs(model, (5, 6, 7), completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)
        assert completion.weight_versions == (weight_version, weight_version)


def test_refit_forgets_what_the_cache_held(engine_loop, engine_and_name):
    engine, name = engine_and_name
    prompt = list(range(100, 164))  # several blocks of the prefix cache
    for seed in (5, 6):
        model = tiny_model(tied=name == "tied", seed=seed)
        published(engine_loop, engine, model)
        completion = engine_loop.run(answers(engine, [request("a", tokens=prompt)]))["a"]
        exact = exact_logprobs(model, prompt, completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


def test_one_wrong_weight_is_found(engine_loop, engine_and_name):
    engine, name = engine_and_name

    def off(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if key != "model.layers.1.mlp.down_proj.weight":
            return tensor
        return tensor.clone().index_put_((torch.tensor(3), torch.tensor(5)), tensor[3, 5] + 1.0)

    with pytest.raises(WeightSyncError, match="differ from the policy's by"):
        published(engine_loop, engine, tiny_model(tied=name == "tied"), falsify=off)


def test_weights_that_are_not_numbers_are_found(engine_loop, engine_and_name):
    engine, name = engine_and_name

    def spoilt(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * torch.nan if key == "model.norm.weight" else tensor

    with pytest.raises(WeightSyncError):
        published(engine_loop, engine, tiny_model(tied=name == "tied"), falsify=spoilt)


def test_missing_weights_are_found(engine_loop, engine_and_name):
    engine, name = engine_and_name
    model = tiny_model(tied=name == "tied")
    kept = [(key, tensor) for key, tensor in model.named_parameters() if key != "model.norm.weight"]
    model.named_parameters = lambda *args, **kwargs: iter(kept)  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        published(engine_loop, engine, model)


def test_output_layer_that_stays_the_old_one_is_found(engine_loop, engines):
    engine = engines("vllm", "tied")
    published(engine_loop, engine, tiny_model(tied=True, seed=7))
    rpc = engine._engine.collective_rpc
    engine_loop.run(rpc("repair_output_layers", args=(False,)))
    try:
        with pytest.raises(WeightSyncError, match="differ from the policy's by"):
            published(engine_loop, engine, tiny_model(tied=True, seed=8))
    finally:
        engine_loop.run(rpc("repair_output_layers", args=(True,)))
    published(engine_loop, engine, tiny_model(tied=True, seed=8))


def test_repeated_refit_that_lacks_a_copy_is_found(engine_loop, engines):
    """The first refit is made by vLLM's own loaders; only the second shows a fault of the plan."""
    engine = engines("vllm in process", "tied")
    published(engine_loop, engine, tiny_model(tied=True, seed=9))
    worker = engine._engine._thread._core.model_executor.driver_worker.worker
    planned = next(
        t for layer in worker._plan.layers for t in layer.tensors if t.path.endswith("1.mlp.down_proj.weight")
    )
    copies = dict(planned.copies)
    planned.copies.clear()
    try:
        with pytest.raises(WeightSyncError, match="differ from the policy's by"):
            published(engine_loop, engine, tiny_model(tied=True, seed=10))
    finally:
        planned.copies.update(copies)
    published(engine_loop, engine, tiny_model(tied=True, seed=10))


def test_later_refits_are_verified_where_the_section_says_so(engine_loop, engines):
    engine = engines("hf", "tied")

    async def publish_thrice(verify: bool) -> None:
        policy = UntrainedPolicy(tiny_model(tied=True))
        sync = TransportWeightSync(PROBES, WeightSyncConfig(verify=verify), "float32")
        try:
            for weight_version in (1, 2):
                await sync.publish(policy, engine, weight_version=weight_version)  # type: ignore[arg-type]
            policy.published = lambda name, tensor: tensor * 1.5
            await sync.publish(policy, engine, weight_version=3)  # type: ignore[arg-type]
        finally:
            sync.close()

    engine_loop.run(publish_thrice(verify=False))
    with pytest.raises(WeightSyncError, match="weights 3"):
        engine_loop.run(publish_thrice(verify=True))


def test_verification_heeds_the_temperature(engine_loop, engines):
    engine = engines("hf", "tied")
    policy = UntrainedPolicy(tiny_model(tied=True), temperature=0.5)
    sync = TransportWeightSync(PROBES, WeightSyncConfig(), "float32", sampling=SamplingParams(1, temperature=0.5))
    engine_loop.run(sync.publish(policy, engine, weight_version=1))  # type: ignore[arg-type]
    sync.close()
