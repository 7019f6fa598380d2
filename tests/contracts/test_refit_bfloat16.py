"""A pretrained model in bfloat16 passes its first refit in a real vLLM, and one wrong matrix is found."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoTokenizer

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.smollm2 import save_smollm2

pytestmark = pytest.mark.timeout(1800)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]  # many seconds each
MAX_LENGTH = 128
QUESTIONS = ("What is 7 + 5?", "Write a poem about the sea.", "Why is the sky blue?", "Name three colours.")
MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NUM_LAYERS = 30
ResultT = TypeVar("ResultT")
Named = Iterable[tuple[str, torch.Tensor]]


class Swapped:
    """Publishes the matrix `name` of a policy as that of the layer `other`; called in the policy's thread."""

    def __init__(self, use: Callable[[Named], Any], name: str, other: str) -> None:
        self._use, self._name, self._other = use, name, other

    def __call__(self, weights: Named) -> Any:
        known = dict(weights)
        known[self._name] = known[self._other]
        return self._use(known.items())


class Misplaced:
    """A policy that publishes one matrix of a layer as that of the layer before; its log-probs are right."""

    def __init__(self, policy: LocalPolicy, seed: int) -> None:
        self.logprobs, self._policy = policy.logprobs, policy
        layer, matrix = 3 * seed % (NUM_LAYERS - 1), MATRICES[seed % len(MATRICES)]
        self._names = [f"model.layers.{index}.{matrix}.weight" for index in (layer, layer + 1)]

    async def run_with_weights(self, use: Callable[[Named], ResultT]) -> ResultT:
        return await self._policy.run_with_weights(Swapped(use, *self._names))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def policy(model_path: Path, engine_loop: asyncio.Runner) -> Iterator[LocalPolicy]:
    section = PolicyConfig(
        model_name=str(model_path),
        precision="bfloat16",
        device="cpu",
        train_micro_batch_size=4,
        max_total_sequence_length=MAX_LENGTH,
    )
    made = LocalPolicy(
        section, model_path=str(model_path), temperature=1.0, needs_reference=False, num_samples_per_step=512, seed=0
    )
    yield made
    engine_loop.run(made.close())


@pytest.fixture(scope="module")
def engine(model_path: Path, engine_loop: asyncio.Runner) -> Iterator[VllmGeneration]:
    section = VllmGenerationConfig(vllm_cfg=VllmConfig(kv_cache_memory_bytes=2**26, max_num_seqs=8))
    started = engine_loop.run(
        VllmGeneration.create(section, EngineModel(str(model_path), "bfloat16", MAX_LENGTH, "cpu"))
    )
    yield started
    engine_loop.run(started.close())


def refit(runner: asyncio.Runner, model_path: Path, policy: Any, engine: VllmGeneration, seed: int) -> None:
    """Refit for the first time, and verify on prompts that differ by the seed."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    probes = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"({seed}) {question}"}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    sync = TransportWeightSync(probes, WeightSyncConfig(), "bfloat16")
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
