"""A refit of a real vLLM engine on a CPU against a memory copy of the same bytes.

uv run benchmarks/refit.py [replicas]

The model is a random Qwen2 of 124 million parameters, in float32 and bfloat16, with requests running and without. A
refit is a whole publish: write the file, pause, load into every engine, resume. Each round times one copy of all
tensors to memory of their own beside it.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.types import GenerationRequest, SamplingParams
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.shared_memory import SharedMemory

WARM_UP_ROUNDS, ROUNDS = 3, 12
BAR = 10.0  # copies
NUM_RUNNING = 8
ResultT = TypeVar("ResultT")


def make_model(dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    return model.to(dtype).eval()


class Weights:
    """A policy as far as a refit needs one; its weights are used on a thread, as a policy's are."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        self.copies = [torch.empty_like(tensor) for _, tensor in self.named]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        return await asyncio.to_thread(use, iter(self.named))

    def copy(self) -> float:
        started = time.perf_counter()
        for copy, (_, tensor) in zip(self.copies, self.named, strict=True):
            copy.copy_(tensor)
        return time.perf_counter() - started


class TimedSharedMemory(SharedMemory):
    """Notes the seconds of its two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.write_s: list[float] = []
        self.load_s: list[float] = []

    async def stage(self, policy: Any) -> Any:
        started = time.perf_counter()
        staged = await super().stage(policy)
        self.write_s.append(time.perf_counter() - started)
        return staged

    async def deliver(self, policy: Any, generation: Any, staged: Any, weight_version: int) -> None:
        started = time.perf_counter()
        await super().deliver(policy, generation, staged, weight_version)
        self.load_s.append(time.perf_counter() - started)


def requests(tag: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=1000)
    return [GenerationRequest(f"{tag}-{i}", (5, 6, 7, i), sampling, i, f"{i}") for i in range(NUM_RUNNING)]


async def generate(engine: Any, tag: int) -> None:
    async for _ in engine.generate(requests(tag)):
        pass


async def measure(dtype: str, num_replicas: int, *, is_busy: bool) -> tuple[int, list[float], list[float], Any]:
    model = make_model(getattr(torch, dtype))
    cfg = VllmConfig(kv_cache_memory_bytes=2**28, max_num_seqs=NUM_RUNNING)
    section = VllmGenerationConfig(vllm_cfg=cfg, num_replicas=num_replicas)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(Path(directory))
        engine = await make_generation(section, EngineModel(directory, dtype, 2048, "cpu"))
    policy, transport = Weights(model), TimedSharedMemory()
    sync = TransportWeightSync([], WeightSyncConfig(), dtype, transport=transport)
    refits, copies = [], []
    running = asyncio.create_task(generate(engine, 0)) if is_busy else None
    try:
        for index in range(WARM_UP_ROUNDS + ROUNDS):
            if running is not None and running.done():
                running = asyncio.create_task(generate(engine, index))
            if is_busy:
                await asyncio.sleep(0.5)  # so that they run
            started = time.perf_counter()
            await sync.publish(policy, engine, weight_version=index)  # type: ignore[arg-type]
            refit_s = time.perf_counter() - started
            if index >= WARM_UP_ROUNDS:
                refits.append(refit_s)
                copies.append(policy.copy())
            else:
                policy.copy()
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        sync.close()
        await engine.close()
    return policy.num_bytes, refits, copies, transport


if __name__ == "__main__":
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print("| dtype | engines | MB | requests run | copy s | refit s (write, load) | refit / copy, median [10] |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for dtype in ("float32", "bfloat16"):
        for is_busy in (False, True):
            size, refits, copies, transport = asyncio.run(measure(dtype, replicas, is_busy=is_busy))
            ratio = statistics.median(a / b for a, b in zip(refits, copies, strict=True))
            halves = f"{statistics.median(transport.write_s):.3f}, {statistics.median(transport.load_s):.3f}"
            print(
                f"| {dtype} | {replicas} | {size / 1e6:,.0f} | {'yes' if is_busy else 'no'} | "
                f"{statistics.median(copies):.4f} | {statistics.median(refits):.3f} ({halves}) | {ratio:.1f} |",
                flush=True,
            )
