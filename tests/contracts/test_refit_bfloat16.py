"""A pretrained model in bfloat16 passes its first refit in a real vLLM, and one wrong matrix is found.

scripts/acceptance/bfloat16.py prints what the verification measures, over ten seeds and both kinds of engine.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.smollm2 import MAX_LENGTH, Misplaced, make_policy, probes, save_smollm2

SEEDS = range(10)

# Many seconds each; refits in float32 are verified in test_weight_sync.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def policy(model_path: Path, engine_loop: asyncio.Runner) -> Iterator[LocalPolicy]:
    made = make_policy(model_path)
    yield made
    engine_loop.run(made.close())


@pytest.fixture(scope="module", params=["own process", "in process"])
def engine(request: pytest.FixtureRequest, model_path: Path, engine_loop: asyncio.Runner) -> Iterator[VllmGeneration]:
    cfg = VllmConfig(kv_cache_memory_bytes=2**26, max_num_seqs=8, in_process=request.param == "in process")
    section = VllmGenerationConfig(vllm_cfg=cfg)
    model = EngineModel(str(model_path), "bfloat16", MAX_LENGTH, "cpu")
    started = engine_loop.run(VllmGeneration.create(section, model))
    yield started
    engine_loop.run(started.close())


def refit(runner: asyncio.Runner, model_path: Path, policy: Any, engine: VllmGeneration, seed: int) -> None:
    """Refit for the first time, and verify on prompts that differ by the seed."""
    sync = TransportWeightSync(probes(model_path, seed), WeightSyncConfig(), "bfloat16")
    try:
        runner.run(sync.publish(policy, engine, weight_version=seed))
    finally:
        sync.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_right_weights_pass(engine_loop, model_path, policy, engine, seed):
    refit(engine_loop, model_path, policy, engine, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_matrix_of_another_layer_is_found(engine_loop, model_path, policy, engine, seed):
    with pytest.raises(WeightSyncError, match="differ from the policy's by"):
        refit(engine_loop, model_path, Misplaced(policy, seed), engine, seed)
    assert engine._admission_open.is_set()
