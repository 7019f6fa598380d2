"""The transport `in_process`: an engine in the policy's process reads the policy's own tensors."""

from nemo_rl.config.layout import Layout
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.interfaces import WeightSource, WeightTarget
from nemo_rl.weight_manifests import LocalWeights, Weights


class InProcess:
    """Gives the engine the policy's own tensors to copy; nothing else changes them meanwhile.

    An engine that wrote to them would train the policy: torch counts writes, and any write raises WeightSyncError.
    """

    def __init__(self) -> None:
        self._writes: list[int] = []  # write count per tensor, before delivery

    async def stage(self, policy: WeightSource) -> LocalWeights:
        weights = LocalWeights(await policy.run_with_weights(tuple))
        self._writes = [tensor._version for _, tensor in weights.tensors]
        return weights

    async def deliver(
        self, policy: WeightSource, generation: WeightTarget, staged: Weights, weight_version: int
    ) -> None:
        await generation.update_weights(staged, weight_version)
        assert isinstance(staged, LocalWeights)
        for (name, tensor), writes in zip(staged.tensors, self._writes, strict=True):
            if tensor._version != writes:
                raise WeightSyncError(
                    f"the engine has written to the policy's own {name} while it loaded it; with "
                    "weight_sync.transport: shared_memory it gets a copy"
                )

    def close(self) -> None:
        """Do nothing: no weights are held between refits."""


def make_in_process(section: WeightSyncConfig, layout: Layout) -> InProcess:
    return InProcess()
