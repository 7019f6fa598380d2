"""An engine that samples nothing: its sequences share it in virtual time, as a curve says."""

import asyncio
import heapq
import math
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


class Driver:
    """The driver's event loop: it works for one request at a time, before and after the engine does, in their order."""

    def __init__(self, request_s: float) -> None:
        self._half_s = request_s / 2
        self._turns = asyncio.Lock()

    async def work(self) -> None:
        """Do one of the two halves of the work for a request."""
        if self._half_s:
            async with self._turns:
                await asyncio.sleep(self._half_s)

    async def turn(self) -> None:
        """Wait until all work is done that was asked for earlier."""
        async with self._turns:
            return


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
    """Answers requests after a delay, their prefill, and as many steps as they have tokens, all as the curve says.

    The engine computes one thing at a time: prefills one after another, and meanwhile no steps. All running sequences
    are at the same step, so one clock of steps tells when each ends: at the step at which it began plus its tokens. An
    answer has one token, whatever it took. Requests beyond `max_num_seqs` wait in their order.
    """

    is_async = True

    def __init__(
        self, curve: EngineCurve, max_num_seqs: int, size: Size, trainer: TrainerState, driver: Driver
    ) -> None:
        self.weight_version = 0
        self.is_paused = False
        self._curve, self._max_num_seqs, self._size = curve, max_num_seqs, size
        self._trainer, self._driver = trainer, driver
        self._loop = asyncio.get_running_loop()
        self._running: list[tuple[float, int, _Sequence]] = []  # a heap: the step of the end, order of arrival
        self._prefilling: deque[_Sequence] = deque()
        self._prefill_left_s = 0.0  # of the first one
        self._num_delayed = 0  # requests that take a place and no time of the engine
        self._waiting: deque[_Sequence] = deque()
        self._num_arrived = 0
        self._step, self._at = 0.0, self._loop.time()  # steps done at that time
        self._timer: asyncio.TimerHandle | None = None
        trainer.engines.append(self)

    @property
    def is_computing(self) -> bool:
        return bool(self._running or self._prefilling)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        (request,) = requests
        num_tokens, first = self._size(request)
        version = self.weight_version
        sequence = _Sequence(num_tokens)
        await self._driver.work()
        self.advance()
        self._waiting.append(sequence)
        self.reschedule()
        await sequence.ended
        await self._driver.work()
        yield Completion(request.request_id, (first,), (0.0,), "stop", (version, self.weight_version))

    def advance(self) -> None:
        """Count what was done since the last call."""
        now = self._loop.time()
        if not self.is_paused:
            if self._prefilling:
                self._prefill_left_s -= (now - self._at) / self._slowdown
            elif self._running:
                self._step += (now - self._at) / self._step_s
        self._at = now

    def reschedule(self) -> None:
        """End what has ended, begin what fits, and wait for the next end; right after `advance`."""
        self._begin_waiting()
        while self._next_end_s <= RESOLUTION_S:
            self._end_next()
            self._begin_waiting()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.is_computing and not self.is_paused:
            self._timer = self._loop.call_at(self._at + self._next_end_s, self._on_time)

    def _begin_waiting(self) -> None:
        while self._waiting and self._num_places_taken < self._max_num_seqs:
            sequence = self._waiting.popleft()
            if sequence.ended.done():  # its request was cancelled
                continue
            if self._curve.request_s:
                self._num_delayed += 1
                self._loop.call_later(self._curve.request_s, self._end_delay, sequence)
            else:
                self._begin_prefill(sequence)

    @property
    def _num_places_taken(self) -> int:
        return len(self._running) + len(self._prefilling) + self._num_delayed

    def _end_delay(self, sequence: _Sequence) -> None:
        self.advance()
        self._num_delayed -= 1
        if not sequence.ended.done():
            self._begin_prefill(sequence)
        self.reschedule()

    def _begin_prefill(self, sequence: _Sequence) -> None:
        if not self._curve.prefill_s:
            self._begin(sequence)
            return
        self._prefilling.append(sequence)
        if len(self._prefilling) == 1:
            self._prefill_left_s = self._curve.prefill_s

    def _begin(self, sequence: _Sequence) -> None:
        self._num_arrived += 1
        heapq.heappush(self._running, (self._step + sequence.num_tokens, self._num_arrived, sequence))

    def _end_next(self) -> None:
        """End the prefill or the sequence whose end is next."""
        if self._prefilling:
            sequence = self._prefilling.popleft()
            self._prefill_left_s = self._curve.prefill_s
            if not sequence.ended.done():
                self._begin(sequence)
            return
        ended = heapq.heappop(self._running)[2].ended
        if not ended.done():
            ended.set_result(None)

    @property
    def _next_end_s(self) -> float:
        """Return the seconds until the next end; infinity if the engine has nothing to do."""
        if self._prefilling:
            return max(self._prefill_left_s, 0.0) * self._slowdown
        return max(self._running[0][0] - self._step, 0.0) * self._step_s if self._running else math.inf

    @property
    def _slowdown(self) -> float:
        return self._curve.beside_training if self._trainer.is_training else 1.0

    @property
    def _step_s(self) -> float:
        return max(self._curve.seconds(len(self._running)) * self._slowdown, 1e-12)

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
