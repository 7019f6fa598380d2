"""Cost of a refit for running generation: the quickstart's model on real vLLM, all slots taken.

`pause`, `load` and `resume` are the three calls of a refit, `held` their sum: how long the engine is kept from sampling
[bar 50 ms]; `pause` waits for the current step. `gap` is the time from the last token before to the first one after,
with it the recomputation of keys and values; `step` is the usual time between two tokens of a request.

    uv run benchmarks/refit_pause.py
    uv run benchmarks/refit_pause.py --rounds 50 --requests 64
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM
from vllm.sampling_params import RequestOutputKind

from nemo_rl import interfaces
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmGenerationConfig
from nemo_rl.launch.models import resolve_model
from nemo_rl.types import GenerationRequest, SamplingParams
from nemo_rl.weight_sync.refit import TransportWeightSync

BAR_MS = 50
PROMPT = tuple(range(5, 32))  # 27 tokens, like the quickstart's
NUM_TOKENS = 64
BETWEEN_S = 0.5  # from one update to the next
DEADLINE_S = 60.0
ResultT = TypeVar("ResultT")


class WatchedGeneration(VllmGeneration):
    """Notes how long the calls of a refit take, and when each token comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._final_only = RequestOutputKind.DELTA  # one output a token
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.gaps: list[float] = []  # seconds between two tokens of a request
        self.last_token = 0.0  # when it came, of whatever request
        self.has_token = asyncio.Event()

    async def _sample(self, request: GenerationRequest, adapter: Any) -> Any:
        prompt = self._tokens_input(list(request.token_ids))
        last, latest = None, None
        async for output in self._engine.generate(prompt, self._params(request), request.request_id):
            latest = output
            self.last_token = time.perf_counter()
            self.has_token.set()
            if last is not None:
                self.gaps.append(self.last_token - last)
            last = self.last_token
        return latest

    async def pause(self, *, keep_cache: bool = False) -> None:
        await self._timed("pause", super().pause(keep_cache=keep_cache))

    async def update_weights(self, manifest: interfaces.Weights, weight_version: int) -> None:
        await self._timed("load", super().update_weights(manifest, weight_version))

    async def resume(self) -> None:
        await self._timed("resume", super().resume())

    async def _timed(self, name: str, call: Any) -> None:
        started = time.perf_counter()
        await call
        self.seconds[name].append(time.perf_counter() - started)


class Weights:
    """A policy as far as weight sync needs one."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        return use((name, tensor.detach()) for name, tensor in self.model.named_parameters())


async def keep_asking(engine: WatchedGeneration, names: Iterable[int]) -> None:
    for name in names:
        request = GenerationRequest(str(name), PROMPT, SamplingParams(NUM_TOKENS), name, str(name))
        async for _ in engine.generate([request]):
            pass


async def measure(engine: WatchedGeneration, policy: Weights, num_requests: int, rounds: int, keep_cache: bool) -> str:
    """One row: medians over the rounds."""
    sync = TransportWeightSync([], WeightSyncConfig(), "float32", keep_cache=keep_cache)
    sync._num_verified[engine] = 2  # not verified: that is no part of an update
    names = itertools.count()
    askers = [asyncio.create_task(keep_asking(engine, names)) for _ in range(num_requests)]
    gaps: list[float] = []
    steps: list[float] = []
    for version in range(rounds + 2):
        if version == 2:
            engine.seconds.clear()  # the first updates allocate the file and its mapping
            gaps.clear()
        engine.gaps.clear()
        await asyncio.sleep(BETWEEN_S)
        steps += engine.gaps
        await sync.publish(policy, engine, weight_version=version)  # type: ignore[arg-type]
        last_before = engine.last_token
        engine.has_token.clear()
        await asyncio.wait_for(engine.has_token.wait(), DEADLINE_S)
        gaps.append(engine.last_token - last_before)
    for asker in askers:
        asker.cancel()
    await asyncio.gather(*askers, return_exceptions=True)
    sync.close()
    calls = [engine.seconds[name] for name in ("pause", "load", "resume")]
    held = [sum(times) for times in zip(*calls, strict=True)]
    cells = [statistics.median(times) * 1e3 for times in (*calls, held, gaps, steps)]
    pause, load, resume, whole, gap, step = (f"{cell:.1f}" for cell in cells)
    row = [
        num_requests,
        "kept" if keep_cache else "recomputed",
        pause,
        load,
        resume,
        f"{whole} ({max(held) * 1e3:.0f})",
    ]
    row += [gap, step, "yes" if cells[3] <= BAR_MS else "no"]
    return "| " + " | ".join(map(str, row)) + " |"


async def main(rounds: int, numbers: Iterable[int]) -> None:
    model_path = await resolve_model("nemo_rl/quickstart")
    policy = Weights(model_path)
    print("| requests | keys and values | pause ms | load | resume | held (worst) | gap | step | at most 50 |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    engine = await WatchedGeneration.create(
        VllmGenerationConfig(), EngineModel(model_path, dtype="float32", max_model_len=128, device="cpu")
    )
    assert isinstance(engine, WatchedGeneration)
    for num_requests, keep_cache in itertools.product(numbers, (False, True)):
        print(await measure(engine, policy, num_requests, rounds, keep_cache), flush=True)
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, nargs="*", default=[32, 64])
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.requests))
