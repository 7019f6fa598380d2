import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.weight_manifests import Weights
from nemo_rl.weight_sync.in_process import InProcess


class Trainable:
    """A policy of one weight, and an engine that may write to it while it loads it."""

    def __init__(self, *, is_written: bool) -> None:
        self.weight = torch.ones(2, 2)
        self.loaded = torch.zeros(2, 2)
        self._is_written = is_written

    async def run_with_weights(self, use: Callable[[Any], Any]) -> Any:
        return use([("a.weight", self.weight.detach())])

    async def update_weights(self, weights: Weights, weight_version: int) -> None:
        for _, tensor in map_weights(weights):
            self.loaded.copy_(tensor.mul_(2.0) if self._is_written else tensor)


@pytest.mark.parametrize("is_written", [False, True])
def test_engine_that_writes_to_the_policys_own_tensors_is_refused(is_written: bool) -> None:
    async def main() -> None:
        both: Any = Trainable(is_written=is_written)
        transport = InProcess()
        await transport.deliver(both, both, await transport.stage(both), 1)
        assert torch.equal(both.loaded, both.weight)

    if is_written:
        with pytest.raises(WeightSyncError, match=r"written to the policy's own a\.weight while it loaded it"):
            asyncio.run(main())
    else:
        asyncio.run(main())
