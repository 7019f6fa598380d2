"""A generation engine without a model: what it samples is a pure function of prompt, seed and sampling parameters."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from nemo_rl.interfaces import EnginePart
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, WeightSpan
from nemo_rl.weight_manifests import Weights


class FakeGeneration:
    """Samples ids of `vocab_size` words; deterministic, whatever is asked beside it or before it.

    `latency(request)` is awaited before a request is answered; requests finish in the order in which it returns.
    `failing_share` of the requests fail: which ones depends on their tokens and seed alone, so that a retry with
    the same seed fails again. `fails_first` makes each request id fail that many times, then succeed.
    Of a request that weights change under, the first half of its tokens counts as sampled before.
    All requests that were ever asked are in `requests`; calls of the other methods, in order, in `calls`.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        is_async: bool = True,
        latency: Callable[[GenerationRequest], Awaitable[None]] | None = None,
        failing_share: float = 0.0,
        fails_first: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.requests: list[GenerationRequest] = []
        self.calls: list[str] = []
        self.weight_version = 0
        self._is_async = is_async
        self._latency = latency
        self._failing_share = failing_share
        self._fails_first = fails_first
        self._attempts: dict[str, int] = {}
        self._running = asyncio.Event()
        self._running.set()

    @property
    def is_async(self) -> bool:
        return self._is_async

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        self.requests.extend(requests)
        tasks = [asyncio.ensure_future(self._answer(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        oldest = self.weight_version
        if self._latency is not None:
            await self._latency(request)
        await self._running.wait()
        attempt = self._attempts[request.request_id] = self._attempts.get(request.request_id, 0) + 1
        if attempt <= self._fails_first or draws_of(request).random() < self._failing_share:
            return FailedRequest(request.request_id, f"attempt {attempt} of {request.request_id} was made to fail")
        return with_versions(sample(request, self.vocab_size), oldest, self.weight_version)

    async def pause(self, *, keep_cache: bool = False) -> None:
        self.calls.append("pause keep_cache" if keep_cache else "pause")
        self._running.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self._running.set()

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        self.calls.append(f"update_weights {weight_version}")
        self.weight_version = weight_version

    async def sleep(self, *, discards_weights: bool = False) -> None:
        self.calls.append("sleep, discarding weights" if discards_weights else "sleep")

    async def wake(self, *parts: EnginePart) -> None:
        self.calls.append(" ".join(("wake", *parts)))

    async def close(self) -> None:
        self.calls.append("close")


def draws_of(request: GenerationRequest) -> random.Random:
    """Random numbers that depend on the prompt's tokens, the seed and the sampling parameters alone."""
    identity = repr((request.token_ids, request.seed, request.sampling)).encode()
    return random.Random(hashlib.sha256(identity).digest())


def with_versions(completion: Completion, oldest: int, newest: int) -> Completion:
    """Return the completion as if weights changed once, from `oldest` to `newest`, after half of its tokens."""
    count = len(completion.token_ids)
    if oldest == newest or count < 2:
        return replace(completion, weight_versions=(oldest, oldest))
    spans = (WeightSpan(oldest, 0, count // 2), WeightSpan(newest, count // 2, count))
    return replace(completion, weight_versions=(oldest, newest), weight_spans=spans)


def sample(request: GenerationRequest, vocab_size: int) -> Completion:
    """Return the fake engine's answer: uniform tokens until a stop id or the limit; log-probs in [-4, 0]."""
    draws, limits = draws_of(request), request.sampling
    draws.random()  # the one that decides about failing
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < limits.max_new_tokens:
        token_ids.append(draws.randrange(vocab_size))
        logprobs.append(-4 * draws.random())
        if token_ids[-1] in limits.stop_token_ids:
            return Completion(request.request_id, tuple(token_ids), tuple(logprobs), "stop")
    return Completion(request.request_id, tuple(token_ids), tuple(logprobs), "length")
