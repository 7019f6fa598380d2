"""A CPU engine that repeats the copies of an earlier refit computes what a policy of any architecture computes."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.policy.fsdp2.worker import named_weights
from nemo_rl.weight_manifests import LocalWeights
from nemo_rl.weight_sync.in_process import InProcess
from nemo_rl.weight_sync.shared_memory import SharedMemory
from tests.contracts.engines import UntrainedPolicy, answers, exact_logprobs, request, section
from tests.support.quick import quick

pytestmark = pytest.mark.timeout(600)
LENGTH = 128
PROMPT = (5, 6, 7)
SIZES: dict[str, Any] = {
    "vocab_size": 300,  # which vLLM pads
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COPIED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, biases, untied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    ),
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3, norms of queries and keys": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=32)),
    "phi3, fused in its files": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, tie_word_embeddings=False)),
    "gpt2, transposed in its files": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2, n_positions=LENGTH, initializer_range=0.1)
    ),
}

# Of log-probs, between vLLM and Hugging Face: vLLM's attention with capped scores differs so much without a refit, too.
TOLERANCE = {"gemma2": 1e-2}


@contextmanager
def engine_of(
    runner: asyncio.Runner,
    model: PreTrainedModel,
    directory: Path,
    *,
    in_process: bool = True,
    dtype: str = "float32",
) -> Iterator[VllmGeneration]:
    model.save_pretrained(directory)
    options = section(in_process=in_process)
    engine = runner.run(VllmGeneration.create(options, EngineModel(str(directory), dtype, LENGTH, "cpu")))
    try:
        yield engine
    finally:
        runner.run(engine.close())


def randomized(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Change every parameter, also the norms and biases, which a new model has as ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.float().eval()


def plan_of(engine: Any) -> Any:
    return engine._engine._thread._core.model_executor.driver_worker.worker._plan


class Publisher(UntrainedPolicy):
    """Publishes as policies do: the tensors of the model's files, which for experts are not the model's own."""

    dtype = torch.float32

    async def run_with_weights(self, use: Any) -> Any:
        return use(named_weights(self.model, self.dtype))


async def refit(
    engine: VllmGeneration,
    transport: Any,
    model: PreTrainedModel,
    version: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    policy: Any = Publisher(model)
    policy.dtype = dtype
    staged = await transport.stage(policy)
    await engine.pause()
    await transport.deliver(policy, engine, staged, version)
    await engine.resume()


def difference(runner: asyncio.Runner, engine: VllmGeneration, model: PreTrainedModel) -> float:
    """Return the largest difference of a response's log-probs to those of Hugging Face."""
    completion = runner.run(answers(engine, [request("a", tokens=PROMPT, max_new_tokens=30)]))["a"]
    exact = exact_logprobs(model, PROMPT, completion.token_ids, 1.0)
    return float((torch.tensor(completion.logprobs) - exact).abs().max())


@pytest.mark.parametrize("name", quick(COPIED, ["qwen2, tied", "phi3, fused in its files"]))
def test_refits_repeat_the_copies_of_the_first_one_exactly(engine_loop, tmp_path, name):
    torch.manual_seed(0)
    model = COPIED[name]().float().eval()
    transport = InProcess()
    with engine_of(engine_loop, model, tmp_path) as engine:
        plans = []
        for version in (1, 2, 3):
            engine_loop.run(refit(engine, transport, randomized(model, version), version))
            plans.append(plan_of(engine))
            assert difference(engine_loop, engine, model) < TOLERANCE.get(name, 1e-4)
        assert plans[0] is not None
        assert plans[1] is plans[2] is plans[0]


def test_plan_holds_for_every_transport_through_host_memory_and_for_the_same_strides(engine_loop, tmp_path):
    torch.manual_seed(0)
    model = COPIED["llama, biases, untied"]().float().eval()
    file = SharedMemory()
    with engine_of(engine_loop, model, tmp_path) as engine:
        engine_loop.run(refit(engine, InProcess(), randomized(model, 1), 1))
        first = plan_of(engine)
        engine_loop.run(refit(engine, file, randomized(model, 2), 2))
        assert plan_of(engine) is first
        assert difference(engine_loop, engine, model) < 1e-4
        weight = model.model.layers[0].mlp.down_proj.weight
        weight.data = weight.data.T.contiguous().T  # the same values with other strides
        engine_loop.run(refit(engine, InProcess(), randomized(model, 3), 3))
        assert plan_of(engine) not in (None, first)
        assert difference(engine_loop, engine, model) < 1e-4
    file.close()


@pytest.mark.parametrize("name", quick(["llama, biases, untied", "qwen2, tied"], ["qwen2, tied"]))
def test_refits_in_bfloat16_repeat_the_copies_too(engine_loop, tmp_path, name):
    torch.manual_seed(0)
    model = COPIED[name]().float().eval()
    with engine_of(engine_loop, model, tmp_path, dtype="bfloat16") as engine:
        for version in (1, 2):
            engine_loop.run(refit(engine, InProcess(), randomized(model, version), version, torch.bfloat16))
            assert plan_of(engine) is not None
            rounded: Any = copy.deepcopy(model)
            rounded = rounded.to(torch.bfloat16).float()
            assert difference(engine_loop, engine, rounded) < 0.2  # one old matrix: above 1


def test_model_with_experts_is_loaded_by_vllm_each_time(engine_loop, tmp_path):
    """vLLM packs experts otherwise than matrices. It takes one kind of model a process, so this engine has its own."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).float().eval()
    transport = SharedMemory()
    with engine_of(engine_loop, model, tmp_path, in_process=False) as engine:
        for version in (1, 2):
            engine_loop.run(refit(engine, transport, randomized(model, version), version))
            assert engine_loop.run(engine._engine.collective_rpc("has_plan")) == [False]
            assert difference(engine_loop, engine, model) < 1e-4
    transport.close()


def test_weights_that_lack_one_are_refused_and_the_next_refit_is_whole(engine_loop, tmp_path):
    torch.manual_seed(0)
    model = COPIED["qwen2, tied"]().float().eval()
    with engine_of(engine_loop, model, tmp_path) as engine:
        engine_loop.run(refit(engine, InProcess(), randomized(model, 1), 1))
        lacking = tuple((n, t.detach()) for n, t in model.named_parameters() if n != "model.norm.weight")
        engine_loop.run(engine.pause())
        with pytest.raises(WeightSyncError, match=r"no weights for model\.norm\.weight"):
            engine_loop.run(engine.update_weights(LocalWeights(lacking), 2))
        engine_loop.run(engine.resume())
        assert plan_of(engine) is None
        engine_loop.run(refit(engine, InProcess(), randomized(model, 3), 3))
        assert plan_of(engine) is not None
        assert difference(engine_loop, engine, model) < 1e-4
