"""vLLM in a Ray actor answers as it does in the trainer's process."""

import asyncio

import pytest
import torch

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.cluster import shutdown
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.router import ReplicatedGeneration
from nemo_rl.generation.vllm.actor import VllmActorGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.types import Completion, FailedRequest
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import MAX_MODEL_LEN, UntrainedPolicy, answers, exact_logprobs, request, tiny_model


@pytest.mark.slow  # tests/functional/test_many_ranks.py has two engines in actors
def test_engine_in_an_actor_answers_and_takes_new_weights(tiny_models):
    model = tiny_model(tied=True, seed=3)
    cfg = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=16)
    section = VllmGenerationConfig(in_actor=True, vllm_cfg=cfg)

    async def main():
        engine = await make_generation(section, EngineModel(str(tiny_models["tied"]), "float32", MAX_MODEL_LEN, "cpu"))
        assert isinstance(engine, ReplicatedGeneration)
        assert [type(replica) for replica in engine.replicas] == [VllmActorGeneration]
        policy = UntrainedPolicy(model)
        sync = TransportWeightSync([(5, 6, 7)], WeightSyncConfig(verify=True), "float32")
        try:
            await sync.publish(policy, engine, weight_version=4)  # type: ignore[arg-type]
            several = await answers(engine, [request("a"), request("b", seed=1), request("bad", tokens=[])])
            one = await answers(engine, [request("a")])
            policy.published = lambda name, tensor: tensor * 1.5
            with pytest.raises(WeightSyncError):
                await sync.publish(policy, engine, weight_version=5)  # type: ignore[arg-type]
        finally:
            sync.close()
            await engine.close()
        return several, one

    try:
        several, one = asyncio.run(main())
    finally:
        shutdown()
    assert isinstance(several["bad"], FailedRequest)
    assert several["a"] == one["a"]
    assert isinstance(several["b"], Completion)
    assert several["b"].weight_versions == (4, 4)
    exact = exact_logprobs(model, (5, 6, 7), several["b"].token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(several["b"].logprobs), exact, atol=1e-4, rtol=0)
