"""Cost of recording experts: tokens per second of an engine that records against one that does not, a round in turns.

uv run benchmarks/route_recording.py [--rounds 12]

Two CPU engines of one process sample the same requests in turns; one of them has a table of routes. The model is small,
so that the share is above that of a real one: recording costs a copy per step and layer, whatever the model's width.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.token_columns import ROUTED_EXPERTS
from nemo_rl.types import Completion, GenerationRequest, SamplingParams

VOCABULARY = 1000


def save_model(directory: str, *, width: int, num_layers: int) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        num_local_experts=8,
        max_position_embeddings=1024,
    )
    MixtralForCausalLM(config).save_pretrained(directory)


def make_requests(count: int, tag: str) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=64)
    return [
        GenerationRequest(f"{tag}-{i}", tuple(rng.integers(1, VOCABULARY, 40).tolist()), sampling, i, str(i))
        for i in range(count)
    ]


async def sample(engine: Any, requests: list[GenerationRequest], *, records: bool) -> float:
    """Return the tokens per second of a round, prompts not counted."""
    started, tokens = time.perf_counter(), 0
    async for completion in engine.generate(requests):
        assert isinstance(completion, Completion)
        assert (ROUTED_EXPERTS in completion.columns) == records
        tokens += len(completion.token_ids)
    return tokens / (time.perf_counter() - started)


async def measure(options: argparse.Namespace, directory: str) -> list[tuple[float, float]]:
    """Return (recording, not recording) of each round."""
    section = VllmGenerationConfig(vllm_cfg=VllmConfig(in_process=True, max_num_seqs=options.requests))
    engines = {}
    for records in (True, False):
        model = EngineModel(directory, options.dtype, 256, "cpu", records_routes=records)
        engines[records] = await make_generation(section, model)
    rounds = []
    try:
        for number in range(options.rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            rates = {
                r: await sample(engines[r], make_requests(options.requests, f"{number}"), records=r) for r in order
            }
            rounds.append((rates[True], rates[False]))
    finally:
        for engine in engines.values():
            await engine.close()
    return rounds[1:]  # the first one also fills caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory, width=options.width, num_layers=options.layers)
        rounds = asyncio.run(measure(options, directory))
    ratios = [recording / plain for recording, plain in rounds]
    print("| | median | range |\n|---|---|---|")
    for name, values in (
        ("recording, tokens/s", [r for r, _ in rounds]),
        ("not recording, tokens/s", [p for _, p in rounds]),
    ):
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f} |")
    print(
        f"| ratio of a round (bar: 0.98) | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
    )


if __name__ == "__main__":
    main()
