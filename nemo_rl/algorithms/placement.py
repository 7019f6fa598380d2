"""Whose turn it is on a device that policy, engine and teachers share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nemo_rl.interfaces import Generation, Policy


@dataclass(frozen=True, slots=True)
class Placement:
    """Calls sleep, wake, offload and onload around generation and training; nothing where nothing is shared.

    A run begins with both on the device. In every step: `prepare_for_training`, train, `prepare_for_refit`, publish,
    `prepare_for_generation`, generate.
    """

    policy: Policy
    generation: Generation
    shares_device: bool
    teachers_share_device: bool = False  # some teacher computes where the policy does

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """The engine gives up its memory to reward models that score inside, and takes it back."""
        if self.shares_device:
            await self.generation.sleep()
        try:
            yield
        finally:
            if self.shares_device:
                await self.generation.wake()

    @asynccontextmanager
    async def teacher_phase(self) -> AsyncIterator[None]:
        """`prepare_for_training` with time between: inside, neither engine nor policy is on the device."""
        if self.shares_device:
            await self.generation.sleep()
        elif self.teachers_share_device:
            await self.policy.offload()
        try:
            yield
        finally:
            if self.shares_device or self.teachers_share_device:
                await self.policy.onload()

    async def prepare_for_training(self) -> None:
        """The engine gives up its memory, then the policy takes its place."""
        if self.shares_device:
            await self.generation.sleep()
            await self.policy.onload()

    async def prepare_for_refit(self) -> None:
        """The engine is there to take weights, which the policy still holds."""
        if self.shares_device:
            await self.generation.wake()

    async def prepare_for_generation(self) -> None:
        """The policy leaves the device to the engine."""
        if self.shares_device:
            await self.policy.offload()
