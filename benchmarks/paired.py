"""Shared by the benchmarks with a real engine: a run's own requests and batch, and the bare engine on the same."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.types import Completion, FailedRequest, GenerationRequest

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"


class Recorder:
    """Stands before the engine and the policy of a run and keeps what one step sent to them."""

    def __init__(self, run: TrainingRun) -> None:
        self.requests: list[GenerationRequest] = []
        self.batch: TensorDict | None = None
        generate, train_step = run.generation.generate, run.policy.train_step

        async def recording(requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            self.requests += requests
            async with aclosing(generate(requests)) as results:  # type: ignore[type-var]
                async for result in results:
                    yield result

        async def recorded_train_step(batch: TensorDict, loss_fn: Any) -> dict[str, float]:
            self.batch = batch
            return await train_step(batch, loss_fn)

        run.generation.generate = recording  # type: ignore[method-assign]
        run.policy.train_step = recorded_train_step  # type: ignore[method-assign]


async def bare_engine(run: TrainingRun, requests: Sequence[GenerationRequest], tag: str) -> float:
    """Seconds of E."""
    engine = run.generation._engine  # type: ignore[attr-defined]

    async def one(request: GenerationRequest) -> None:
        params = SamplingParams(
            max_tokens=request.sampling.max_new_tokens,
            temperature=request.sampling.temperature,
            seed=request.seed,
            stop_token_ids=list(request.sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.token_ids)}
        async for _ in engine.generate(prompt, params, f"{tag}{request.request_id}"):
            pass

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started = time.perf_counter()
    await asyncio.gather(*(one(request) for request in requests))
    return time.perf_counter() - started
