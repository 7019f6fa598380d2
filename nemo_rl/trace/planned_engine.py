"""An engine that samples nothing: its sequences share it in virtual time, as a curve says."""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from nemo_rl.interfaces import EnginePart
from nemo_rl.trace.workload import EngineCurve
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_manifests import Weights

RESOLUTION_S = 1e-6  # events within it happen now

Size = Callable[[GenerationRequest], tuple[int, int]]  # tokens to wait for, and the one token of the answer


@dataclass(eq=False, slots=True)
class _Sequence:
    num_tokens: int
    ended: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TrainerState:
    """State of the trainer: while the policy computes, engines that share its devices are slower."""

    def __init__(self) -> None:
        self.is_training = False
        self.engines: list[PlannedEngine] = []

    def set(self, is_training: bool) -> None:
        for engine in self.engines:
            engine.advance()
        self.is_training = is_training
        for engine in self.engines:
            engine.reschedule()


class PlannedEngine:
    """Answers requests after as many steps as they have tokens; a step takes what the curve says.

    All running sequences are at the same step, so one clock of steps tells when each ends: at the step at which it
    began plus its tokens. An answer has one token, whatever it took. Requests beyond `max_num_seqs` wait in
    their order.
    """

    is_async = True

    def __init__(self, curve: EngineCurve, max_num_seqs: int, size: Size, trainer: TrainerState) -> None:
        self.weight_version = 0
        self.is_paused = False
        self._curve, self._max_num_seqs, self._size, self._trainer = curve, max_num_seqs, size, trainer
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, _Sequence]] = []  # a heap: the step of the end, order of arrival
        self._waiting: deque[_Sequence] = deque()
        self._num_arrived = 0
        self._num_prefilling = 0  # take a place, and no part in steps
        self._step, self._at = 0.0, self._loop.time()  # steps done at that time
        self._timer: asyncio.TimerHandle | None = None
        trainer.engines.append(self)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        num_tokens, first = self._size(request)
        version = self.weight_version
        sequence = _Sequence(num_tokens)
        self.advance()
        self._waiting.append(sequence)
        self.reschedule()
        await sequence.ended
        yield Completion(request.request_id, (first,), (0.0,), "stop", (version, self.weight_version))

    def advance(self) -> None:
        """Count the steps done since the last call."""
        now = self._loop.time()
        if self._running and not self.is_paused:
            self._step += (now - self._at) / self._step_s
        self._at = now

    def reschedule(self) -> None:
        """End what has ended, begin what fits, and wait for the next end; right after `advance`."""
        while self._running and self._next_end_s <= RESOLUTION_S:
            ended = heapq.heappop(self._running)[2].ended
            if not ended.done():
                ended.set_result(None)
        while self._waiting and len(self._running) + self._num_prefilling < self._max_num_seqs:
            sequence = self._waiting.popleft()
            if sequence.ended.done():  # its request was cancelled
                continue
            if self._curve.request_s:
                self._num_prefilling += 1
                self._loop.call_later(self._curve.request_s, self._end_prefill, sequence)
            else:
                self._begin(sequence)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self.is_paused:
            self._timer = self._loop.call_at(self._at + self._next_end_s, self._on_time)

    def _begin(self, sequence: _Sequence) -> None:
        self._num_arrived += 1
        heapq.heappush(self._running, (self._step + sequence.num_tokens, self._num_arrived, sequence))

    def _end_prefill(self, sequence: _Sequence) -> None:
        self.advance()
        self._num_prefilling -= 1
        if not sequence.ended.done():
            self._begin(sequence)
        self.reschedule()

    @property
    def _next_end_s(self) -> float:
        return max(self._running[0][0] - self._step, 0.0) * self._step_s

    @property
    def _step_s(self) -> float:
        return max(self._curve.seconds(len(self._running), is_training=self._trainer.is_training), 1e-12)

    def _on_time(self) -> None:
        self.advance()
        self.reschedule()

    async def pause(self, *, keep_cache: bool = False) -> None:
        self.advance()
        self.is_paused = True
        self.reschedule()

    async def resume(self) -> None:
        self.advance()
        self.is_paused = False
        self.reschedule()

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        self.weight_version = weight_version

    async def sleep(self, *, discards_weights: bool = False) -> None:
        """Do nothing: it holds no memory."""

    async def wake(self, *parts: EnginePart) -> None:
        """Do nothing: it holds no memory."""

    async def close(self) -> None:
        """Do nothing."""
