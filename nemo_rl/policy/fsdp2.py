"""`FSDP2Policy`: the policy in this process, one rank on a thread of its own."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.interfaces import LossFn, TopK
from nemo_rl.policy.rank import RankPolicy
from nemo_rl.policy.ranks import ALONE, RankLayout
from nemo_rl.policy.thread import PolicyThread
from nemo_rl.types import TrainingBatch

ResultT = TypeVar("ResultT")


class FSDP2Policy:
    """A `RankPolicy` whose calls leave the event loop free; satisfies `interfaces.PolicyConfig`.

    The arguments are those of `BaseRank`; without a layout it is a rank alone.
    """

    def __init__(self, config: PolicyConfig, *, layout: RankLayout = ALONE, **arguments: Any) -> None:
        self._thread = PolicyThread()
        try:
            self._rank = self._thread.run_blocking(partial(RankPolicy, config, layout=layout, **arguments))
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._rank.logprobs, batch)

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._rank.reference_logprobs, batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._thread.run(self._rank.topk_logprobs, batch, k)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._thread.run(self._rank.train_step, batch, loss_fn)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` on the policy's thread."""
        return cast(ResultT, await self._thread.run(self._rank.run_with_weights, use))

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        await self._thread.run(partial(self._rank.save, Path(path), save_optimizer=save_optimizer))

    async def finish_save(self) -> None:
        await self._thread.run(self._rank.finish_save)

    async def load(self, path: Path) -> None:
        await self._thread.run(self._rank.load, Path(path))

    async def offload(self) -> None:
        await self._thread.run(self._rank.offload)

    async def onload(self) -> None:
        await self._thread.run(self._rank.onload)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        try:
            await self._thread.run(self._rank.close)
        finally:
            self._thread.close()
