"""Turns of policy, engine and teachers on a device that they share."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from nemo_rl.interfaces import Generation, OffloadPart, Policy
from nemo_rl.tracing import span


@dataclass(frozen=True, slots=True)
class Placement:
    """Device sharing: calls sleep, wake, offload and onload around generation and training; no-ops without sharing.

    A run begins with both models on the device. In every step: `prepare_for_training`, train, publish inside
    `delivery`, generate. From the first refit on, the engine's cache and the policy are never there together.
    """

    policy: Policy
    generation: Generation
    shares_device: bool
    stays_with_engine: bool = False  # the policy never leaves a device that it shares with an engine
    teachers_share_device: bool = False  # some teacher shares the policy's device
    clock: Callable[[], float] = time.perf_counter
    _seconds: dict[str, float] = field(default_factory=dict)  # by kind of move, since `take_seconds`

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Put the engine to sleep while reward models score inside the block."""
        if self.shares_device:
            await self._timed("sleep", self.generation.sleep())
        try:
            yield
        finally:
            if self.shares_device:
                await self._timed("wake", self.generation.wake())

    @asynccontextmanager
    async def teacher_phase(self) -> AsyncIterator[None]:
        """Clear the device for teachers inside the block, then load the policy for training."""
        if self.shares_device:
            await self._timed("sleep", self.generation.sleep(discards_weights=True))
        elif self.teachers_share_device:
            await self._timed("offload", self.policy.offload())
        try:
            yield
        finally:
            if self.shares_device or self.teachers_share_device:
                await self._timed("onload", self.policy.onload())

    async def prepare_for_training(self) -> None:
        """Put the engine to sleep, without its weights, which the next refit restores; then load the policy."""
        if self.shares_device:
            await self._timed("sleep", self.generation.sleep(discards_weights=True))
            await self._timed("onload", self.policy.onload())

    @asynccontextmanager
    async def delivery(self) -> AsyncIterator[None]:
        """Keep only the weights of policy and engine on the device inside, and the engine alone afterwards.

        If both stay, the memory that training has freed is given back first: the engine's process loads weights.
        """
        if self.stays_with_engine:
            await self.policy.empty_cache()
        if self.shares_device:
            await self._timed("offload", self.policy.offload("optimizer", "reference"))
            await self._timed("wake", self.generation.wake("weights"))
        yield
        if self.shares_device:
            await self._timed("offload", self.policy.offload("weights"))
            await self._timed("wake", self.generation.wake("kv_cache"))

    @asynccontextmanager
    async def policy_turn(self, *parts: OffloadPart) -> AsyncIterator[None]:
        """Give the device to these parts of the policy inside, between refit and training; to the engine afterwards."""
        if self.shares_device:
            await self._timed("sleep", self.generation.sleep())
            await self._timed("onload", self.policy.onload(*parts))
        yield
        if self.shares_device:
            await self._timed("offload", self.policy.offload(*parts))
            await self._timed("wake", self.generation.wake())

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of sleep, wake, offload and onload since the last call; those that happened."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    async def _timed(self, name: str, move: Awaitable[None]) -> None:
        start = self.clock()
        try:
            with span(name):
                await move
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self.clock() - start
