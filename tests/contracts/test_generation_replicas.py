"""Two real vLLM replicas: one is killed while requests run, all are answered, and refits are right afterwards."""

import asyncio
from typing import Any

import psutil
import torch

from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.distributed.cluster import shutdown
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.types import Completion
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, answers, exact_logprobs, request, tiny_model

PROMPT = (5, 6, 7)
LONG = 400  # tokens: runs for seconds


def engine_processes() -> list[psutil.Process]:
    """vLLM's engine processes that this process' Ray cluster runs."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if process.is_running() and "EngineCore" in process.name()]


def check_exact(model: Any, completion: Any) -> None:
    exact = exact_logprobs(model, PROMPT, completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


async def publish(engine: Any, model: Any, weight_version: int, sync: TransportWeightSync) -> None:
    await sync.publish(UntrainedPolicy(model), engine, weight_version=weight_version)  # type: ignore[arg-type]


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
