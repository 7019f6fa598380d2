"""Real vLLM replicas that are killed, join and leave while requests run: all are answered, and refits are right."""

import asyncio
import time
from typing import Any

import psutil
import pytest
import torch

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.cluster import shutdown
from nemo_rl.errors import GenerationError
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.types import Completion
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, answers, exact_logprobs, request, tiny_model

PROMPT = (5, 6, 7)
LONG = 400  # tokens: runs for seconds
DEADLINE_S = 300.0


def engine_processes() -> list[psutil.Process]:
    """vLLM's engine processes that this process' Ray cluster runs."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if process.is_running() and "EngineCore" in process.name()]


def check_exact(model: Any, completion: Any) -> None:
    exact = exact_logprobs(model, PROMPT, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


async def publish(engine: Any, model: Any, weight_version: int, sync: TransportWeightSync) -> None:
    await sync.publish(UntrainedPolicy(model), engine, weight_version=weight_version)  # type: ignore[arg-type]


@pytest.mark.slow  # the next test kills one in a refit; the router's own are in tests/unit/generation
def test_a_killed_replica_is_survived_and_refits_are_right_afterwards(tiny_models):
    section = VllmGenerationConfig(num_replicas=2, vllm_cfg=VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16))
    old, new = tiny_model(tied=True, seed=3), tiny_model(tied=True, seed=4)

    async def main():
        others = engine_processes()  # those that other tests share
        router = await make_generation(section, EngineModel(str(tiny_models["tied"]), "float32", MAX_MODEL_LEN, "cpu"))
        assert isinstance(router, ReplicatedGeneration)
        router._restart = None  # the machine has better things to do than to start one for this test
        sync = TransportWeightSync([PROMPT], WeightSyncConfig(verify=True), "float32")
        try:
            await publish(router, old, 1, sync)
            quick = [request(f"q{i}", seed=i, max_new_tokens=4) for i in range(4)]
            long = [request(f"l{i}", seed=i, max_new_tokens=LONG) for i in range(4)]
            running = asyncio.create_task(answers(router, long))
            first = await answers(router, quick)  # so that the long ones run by now
            victims = [engine for engine in engine_processes() if engine not in others]
            assert len(victims) == 2
            victims[0].kill()
            results = await running
            assert len(router.replicas) == 1
            await publish(router, new, 2, sync)
            after = await answers(router, quick)
        finally:
            sync.close()
            await router.close()
        return first, results, after

    try:
        first, results, after = asyncio.run(main())
    finally:
        shutdown()
    for result in (*first.values(), *results.values()):
        assert isinstance(result, Completion)
        assert result.weight_versions == (1, 1)
        check_exact(old, result)
    for result in after.values():
        assert result.weight_versions == (2, 2)
        check_exact(new, result)


def test_an_engine_that_is_stopped_in_a_refit_is_given_up_and_killed(tiny_models):
    """The driver's own engine: its refit would wait ten minutes for it."""
    cfg = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16, in_process=False, stall_timeout_s=2)
    section, model = VllmGenerationConfig(vllm_cfg=cfg), tiny_model(tied=True, seed=3)

    async def main():
        others = engine_processes()
        engine = await make_generation(section, EngineModel(str(tiny_models["tied"]), "float32", MAX_MODEL_LEN, "cpu"))
        sync = TransportWeightSync([PROMPT], WeightSyncConfig(), "float32")
        try:
            await publish(engine, model, 1, sync)
            (core,) = [process for process in engine_processes() if process not in others]
            core.suspend()
            with pytest.raises(GenerationError, match=r"did not load weights: its processes did nothing for 2 s"):
                await publish(engine, model, 2, sync)
            core.wait(DEADLINE_S)
            assert not core.is_running()
        finally:
            sync.close()
            await engine.close()

    asyncio.run(main())


@pytest.mark.slow  # two starts of Ray workers; the router's own tests have fakes
def test_a_replica_joins_and_another_leaves_while_requests_run(tiny_models):
    section = VllmGenerationConfig(in_actor=True, vllm_cfg=VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16))
    old, new = tiny_model(tied=True, seed=3), tiny_model(tied=True, seed=4)

    async def main():
        router = await make_generation(section, EngineModel(str(tiny_models["tied"]), "float32", MAX_MODEL_LEN, "cpu"))
        assert isinstance(router, ReplicatedGeneration)
        sync = TransportWeightSync([PROMPT], WeightSyncConfig(verify=True), "float32")
        try:
            await publish(router, old, 1, sync)
            router.resize(2)
            begun = time.monotonic()
            first: dict[str, Any] = {}
            while router.state.starting:  # requests are answered meanwhile
                assert time.monotonic() - begun < DEADLINE_S
                first |= await answers(router, [request(f"f{len(first)}", seed=1, max_new_tokens=16)])
            assert router.state.waiting == ("engine 1",)
            await publish(router, new, 2, sync)
            assert router.state.serving == ("engine 0", "engine 1")
            long = [request(f"l{i}", seed=i, max_new_tokens=LONG) for i in range(2)]  # one for each
            running = asyncio.create_task(answers(router, long))
            await asyncio.sleep(0)
            router.resize(1)
            late = await answers(router, [request(f"q{i}", seed=i, max_new_tokens=4) for i in range(4)])
            second = await running | late
            await publish(router, old, 3, sync)
            assert router.state.serving == ("engine 0",)
            while router.state.leaving:  # until its process has ended
                assert time.monotonic() - begun < DEADLINE_S
                await asyncio.sleep(0.05)
            third = await answers(router, [request("last", seed=2, max_new_tokens=8)])
        finally:
            sync.close()
            await router.close()
        return first, second, third

    try:
        answered = asyncio.run(main())
    finally:
        shutdown()
    assert answered[0]
    for results, version, model in zip(answered, (1, 2, 3), (old, new, old), strict=True):
        for result in results.values():
            assert isinstance(result, Completion)
            assert result.weight_versions == (version, version)
            check_exact(model, result)
